"""What a step measures and a run logs: metrics, alarms, and who is informed of them."""
