"""Format sizes in bytes."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """Return a size with three significant digits and binary units: 5.9 MiB, 1.53 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
