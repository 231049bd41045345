"""A workload's training step without its device: every tensor has a shape and a dtype, and no memory."""
