"""Memory policies: estimates, costs and fallbacks, from which plans are made; pure functions."""
