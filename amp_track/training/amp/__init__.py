"""The AMP-aware training step, usable on its own: of the rest of the package it imports plain records only."""
