"""Sizes in bytes as people read them."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """Return a size for people: 5.9 MiB, 1.53 GiB, with three significant digits and binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
