"""What engines of other libraries have in common, and how a function becomes an engine."""
