"""The programme for a machine with a GPU: stages of a few minutes, whose rows are kept as they come."""
