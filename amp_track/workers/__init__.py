"""Processes of this machine, and locks for what they must not do at the same time."""
