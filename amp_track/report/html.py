"""Results as HTML for notebooks: headings, tables and notes. Needs no style sheet; works in light and dark themes."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import DictLoader, Environment, StrictUndefined

from amp_track.report import compare, max_batch, plan, search, train
from amp_track.report.table import Table
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult
from amp_track.results.train import TrainResult

# Only the page's own color and a half-transparent gray: legible on white and on black.
_TABLE = """\
{%- set line = "1px solid rgba(128, 128, 128, 0.6)" -%}
{%- set cell = "padding: 0.3em 0.8em; vertical-align: top; white-space: pre-line; background: transparent; " -%}
<table style="border-collapse: collapse; margin: 0.5em 0 1em; color: inherit; font-variant-numeric: tabular-nums">
<caption style="caption-side: top; text-align: left; padding: 0.3em 0; color: inherit">{{ table.title }}</caption>
<thead><tr>
{%- for column in table.columns %}
<th scope="col" style="{{ cell }}border-bottom: {{ line }}; text-align: {{ 'right' if column.right else 'left' }}">
{{- column.heading }}</th>
{%- endfor %}
</tr></thead>
{%- for section in table.sections %}
<tbody style="border-bottom: {{ line }}">
{%- for row in section %}
{%- set is_first = loop.first %}
<tr>
{%- for column, text in zip(table.columns, row) if is_first or not column.spans %}
{%- set tag = "th" if column.key else "td" %}
<{{ tag }}{% if column.key %} scope="row"{% endif %}
{%- if column.spans %} rowspan="{{ section | length }}"{% endif %} style="{{ cell }}
{{- 'font-weight: normal; ' if column.key }}text-align: {{ 'right' if column.right else 'left' }}">
{{- text }}</{{ tag }}>
{%- endfor %}
</tr>
{%- endfor %}
</tbody>
{%- endfor %}
</table>
"""

_RESULT = """\
<section style="color: inherit">
<h4 style="color: inherit">{{ heading }}</h4>
{% for line in lines %}<p style="margin: 0.2em 0">{{ line }}</p>
{% endfor %}
{%- for table in tables %}{% include "table" %}{% endfor %}
{%- if notes %}<ul style="margin-top: 0; max-width: 60em">
{% for note in notes %}<li>{{ note }}</li>
{% endfor %}</ul>
{% endif %}</section>
"""

_ENVIRONMENT = Environment(
    loader=DictLoader({"table": _TABLE, "result": _RESULT}), autoescape=True, undefined=StrictUndefined
)
_ENVIRONMENT.globals["zip"] = zip


def table_html(table: Table) -> str:
    """Return a table as an HTML fragment."""
    return _ENVIRONMENT.get_template("table").render(table=table)


def train_html(result: TrainResult) -> str:
    """Return the result of a training as an HTML fragment."""
    heading = f"{result.job.workload}: training"
    return _html(heading, train.tables(result), result.advice, lines=train.lines(result))


def max_batch_html(result: MaxBatchResult) -> str:
    """Return the max batches as an HTML fragment."""
    return _html("Max batch", [max_batch.max_batch_table(result)], max_batch.max_batch_notes(result))


def search_html(result: SearchResult) -> str:
    """Return the result of a search as an HTML fragment."""
    return _html("Speed and metric within the max batch", search.search_tables(result), search.notes(result))


def compare_html(result: CompareResult) -> str:
    """Return a comparison of precisions as an HTML fragment, answers first."""
    return _html("Comparison of precisions", compare.tables(result), compare.notes(result), lines=result.answers)


def plan_html(result: PlanResult) -> str:
    """Return a memory plan as an HTML fragment."""
    return _html("Predicted memory", plan.plan_tables(result), plan.plan_notes(result))


def _html(heading: str, tables: Sequence[Table], notes: Sequence[str], *, lines: Sequence[str] = ()) -> str:
    template = _ENVIRONMENT.get_template("result")
    return template.render(heading=heading, tables=tables, notes=notes, lines=lines)
