"""What a run shows and writes while it trains: progress, metrics, completions, trackers."""
