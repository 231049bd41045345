"""The names of those files, among the artifacts of runs, that are both written and looked for."""

CURVES_PLOT = "curves.png"
"""A training's curves."""
SEARCH_PLOT, COMPARE_PLOT = "search.png", "compare.png"
"""What the run of a study shows of all its trainings."""
