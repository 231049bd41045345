"""Results as HTML for notebooks: headings, tables and notes."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from amp_track.report import plan, summary, train
from amp_track.report.table import table_html
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult
from amp_track.results.train import TrainResult

_RESULT = """\
<section style="color: inherit">
<h4 style="color: inherit">{{ heading }}</h4>
{% for line in lines %}<p style="margin: 0.2em 0">{{ line }}</p>
{% endfor %}
{%- for table in tables %}{{ table_html(table) }}{% endfor %}
{%- if notes %}<ul style="margin-top: 0; max-width: 60em">
{% for note in notes %}<li>{{ note }}</li>
{% endfor %}</ul>
{% endif %}</section>
"""
_TEMPLATE = Environment(autoescape=True, undefined=StrictUndefined).from_string(
    _RESULT, globals={"table_html": lambda table: Markup(table_html(table))}
)


def result_html(result: TrainResult | MaxBatchResult | SearchResult | CompareResult | PlanResult) -> str:
    """Return the result of a command as an HTML fragment."""
    lines: list[str] = []
    match result:
        case TrainResult():
            heading, lines = f"{result.job.workload}: training", train.lines(result)
            tables, notes = train.tables(result), list(result.advice)
        case PlanResult():
            heading, tables, notes = "Predicted memory", plan.plan_tables(result), plan.plan_notes(result)
        case _:
            heading, tables, notes = _HEADINGS[type(result)], summary.tables(result), summary.notes(result)
            lines = list(result.answers) if isinstance(result, CompareResult) else []
    return _TEMPLATE.render(heading=heading, tables=tables, notes=notes, lines=lines)


_HEADINGS = {
    MaxBatchResult: "Max batch",
    SearchResult: "Speed and metric within the max batch",
    CompareResult: "Comparison of precisions",
}
