"""Units of memory, and sizes as text."""

from __future__ import annotations

MEBIBYTE = 2**20


def format_bytes(size: float) -> str:
    """Return a size with three significant digits and binary units: 5.9 MiB, 1.53 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:  # from there on it would be 1e+03
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
