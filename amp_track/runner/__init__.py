"""Run one job in fresh processes."""
