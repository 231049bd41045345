"""Choose the next batch size to probe."""
