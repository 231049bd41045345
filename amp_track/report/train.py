"""One training in words and tables."""

from __future__ import annotations

from rich.table import Table

from amp_track.records.diagnosis import Diagnosis


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """One row for each layer, over all diagnosed steps."""
    table = Table(title=f"layers at {diagnosis.steps} steps, one in {diagnosis.every}", title_justify="left")
    for heading in ("layer", "non-finite", "underflowing", "zero", "largest\noutput"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in diagnosis.layers:
        fractions = [f"{fraction:.2%}" for fraction in (layer.non_finite, layer.underflowing, layer.zero)]
        table.add_row(
            layer.layer,
            *(fractions if layer.has_gradients else ["–"] * 3),
            f"{layer.largest_output:.4g}" if layer.largest_output is not None else "–",
        )
    return table
