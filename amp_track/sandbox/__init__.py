"""Runs one job in fresh processes. The only package that imports `amp_track.training`."""
