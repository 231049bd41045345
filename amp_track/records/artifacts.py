"""The names of those files, among the artifacts of runs, that are both written and looked for."""

CURVES_PICTURE = "curves.png"
"""A training's curves."""
SEARCH_PICTURE, COMPARE_PICTURE = "search.png", "compare.png"
"""What the run of a study shows of all its trainings."""
