"""What one command opens, runs and publishes."""
