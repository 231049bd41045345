"""One color for each precision, wherever it is drawn."""

from __future__ import annotations

PRECISION_COLORS = {"fp32": "#0072B2", "tf32": "#56B4E9", "amp": "#D55E00", "bf16": "#009E73"}
"""By precision. Of Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), which color-blind people can tell."""
