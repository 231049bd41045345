"""Finds out where memory ends, from measurements. Pure: no torch, no process, no store."""
