"""Tests and benchmarks for a machine with a GPU, in stages that can be continued: docs/gpu.md."""
