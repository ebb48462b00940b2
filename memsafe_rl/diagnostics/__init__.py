"""Environment checks, out-of-memory messages, and the status files of a run."""
