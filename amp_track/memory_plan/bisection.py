"""The largest number that fits, where nothing is known but whether one does."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], *, above: int, below: int) -> int:
    """Return the largest number between two bounds that fits, or `above` if none does.

    Steps from `above` double until one does not fit, and the last of them is bisected. Where what fits is not
    monotone, it is one that fits next to one that does not.

    Args:
        fits: whether a number fits; asked about 2·log2 of the distance times.
        above: a number that fits, or the one before the first.
        below: a number that does not fit, or the one after the last.
    """
    step = 1
    low, high = above, min(above + step, below)
    while high < below and fits(high):
        step *= 2
        low, high = high, min(high + step, below)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
