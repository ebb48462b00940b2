"""From what a user passes to a training setup: checks, factories by kind of model, and the one place that builds."""
