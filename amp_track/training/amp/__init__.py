"""The AMP-aware training step, usable without the rest of the package.

It imports only records, precision names from `config`, and the instruction sets of the CPU from `training.devices`.
"""
