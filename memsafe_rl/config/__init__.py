"""Settings: their declaration, and the checks, help and refusals that follow from it."""
