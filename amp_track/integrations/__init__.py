"""Trainings written with other libraries. Each module needs its extra: `amp-track[lightning]`, `[transformers]`."""
