"""Tables and results as HTML, Markdown and text: for notebooks, pages, notes and `print`. Needs no style sheet."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from amp_track.report import explain, plan, summary, train
from amp_track.report.table import Table, render_text
from amp_track.results.compare import CompareResult
from amp_track.results.estimate import Estimate
from amp_track.results.explain import ExplainResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.plan import PlanResult
from amp_track.results.search import SearchResult
from amp_track.results.train import TrainResult

AnyResult = TrainResult | MaxBatchResult | SearchResult | CompareResult | PlanResult | ExplainResult | Estimate
_HEADINGS = {
    MaxBatchResult: "Max batch",
    SearchResult: "Speed and metric within the max batch",
    CompareResult: "Comparison of precisions",
}


def result_html(result: AnyResult) -> str:
    heading, lines, tables, notes = _parts(result)
    return templates().get_template("result.html").render(heading=heading, tables=tables, notes=notes, lines=lines)


def result_text(result: AnyResult) -> str:
    """Return the tables, notes and answer that the command prints, without the pages."""
    heading, lines, tables, notes = _parts(result)
    if not isinstance(result, summary.Result):
        return "\n".join([heading, *lines, render_text(tables, notes).rstrip()])
    said = summary.answer(result)
    return "\n".join([render_text(tables, said.caveats), *summary.answer_lines(said, said.command)])


def _parts(result: AnyResult) -> tuple[str, list[str], list[Table], list[str]]:
    """Return the heading of a result, its first lines, its tables and its notes."""
    lines: list[str] = []
    match result:
        case TrainResult():
            heading, lines = f"{result.job.workload}: training", train.lines(result)
            tables, notes = train.tables(result), list(result.advice)
        case PlanResult():
            heading, tables, notes = "Predicted memory", plan.plan_tables(result), plan.plan_notes(result)
        case ExplainResult():
            heading, tables, notes = "Out of memory", explain.tables(result), explain.notes(result)
            lines = [line for line in (explain.headline(result), explain.max_batch_line(result)) if line]
        case Estimate():
            heading, tables, notes = result.headline, plan.estimate_tables(result), list(result.notes)
        case _:
            heading, tables, notes = _HEADINGS[type(result)], summary.tables(result), summary.notes(result)
            lines = list(result.answers) if isinstance(result, CompareResult) else []
    return heading, lines, tables, notes


def table_html(table: Table) -> str:
    return templates().get_template("table.html").render(table=table)


def table_markdown(table: Table) -> str:
    """Return a table as Markdown, without its title."""
    rule = ["--:" if column.right else "---" for column in table.columns]
    headings, *rows = [
        [_escaped(text).replace("\n", " ") for text in row]
        for row in ([column.heading for column in table.columns], *table.rows)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def _escaped(text: str) -> str:
    """Escape Markdown markup: names of workloads and options may contain it."""
    return re.sub(r"[\\`*_{}\[\]<>#|!~]", r"\\\g<0>", text)


@functools.cache
def templates() -> Environment:
    """Return the templates of the folder page/."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "page"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = _escaped
    environment.globals |= {"table_html": table_html, "table_markdown": table_markdown, "zip": zip}
    return environment
