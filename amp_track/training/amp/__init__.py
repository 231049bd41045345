"""The AMP-aware training step. It needs nothing of the rest of the package but plain records."""
