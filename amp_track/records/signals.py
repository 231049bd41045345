"""The signals that a command ends at with its runs ended: all of them mean the same."""

from __future__ import annotations

import signal

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""Ctrl-C, what `kill` and batch systems send, and what comes when the terminal is closed, which Windows lacks."""
