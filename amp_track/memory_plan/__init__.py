"""Predict the memory of a training without running it: the memory plan."""
