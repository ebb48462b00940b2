"""What users import: trainers, their configurations, `forecast_memory`."""
