"""What the commands find, as plain data."""
