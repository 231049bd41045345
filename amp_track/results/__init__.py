"""The results of the commands, as plain data."""
