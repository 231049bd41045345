"""Processes of this machine and what they must not do at the same time."""
