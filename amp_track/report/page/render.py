"""Render a report page as self-contained HTML and as Markdown."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from amp_track.report import links
from amp_track.report import summary as answers
from amp_track.report.page import svg
from amp_track.report.page.charts import Chart
from amp_track.report.page.content import Page
from amp_track.report.summary import Result
from amp_track.report.table import escape_markdown, table_html, table_markdown
from amp_track.results.compare import CompareResult
from amp_track.stores import addresses


def page_html(page: Page, *, ui: str) -> str:
    """Return the page as one self-contained HTML file: no requests, no stored data, opens from disk.

    Args:
        page: the page of a study.
        ui: the URL of MLflow's UI, for the links.
    """
    return _environment().get_template("page.html").render(
        page=page,
        run_url=functools.partial(links.run, ui, page.experiment_id),
        links=links.named_pages(page.result, ui),
        start=f"amp-track ui {shlex.quote(page.study)}" if ui == addresses.DEFAULT_UI else None,
        svg=_svg,
        table=lambda table: Markup(table_html(table)),
    )  # fmt: skip


def page_markdown(page: Page, *, ui: str) -> str:
    """Return the page as Markdown: the recommendation and the tables, without charts and trials."""
    return _environment().get_template("page.md").render(
        page=page, links=links.named_pages(page.result, ui), table=table_markdown
    )  # fmt: skip


def note_markdown(result: Result) -> str:
    """Return the recommendation as the description of the study's run, with links relative to the UI."""
    return _brief("note.md", result, ui="")


def dashboard_markdown(result: Result, *, ui: str, is_view: bool = False) -> str:
    """Return the recommendation as a note for optuna-dashboard.

    Args:
        result: the result of a study.
        ui: the URL of MLflow's UI, for the links.
        is_view: whether the note is for the study of one precision.
    """
    return _brief("dashboard.md", result, ui=ui, is_view=is_view)


def _brief(template: str, result: Result, *, ui: str, is_view: bool = False) -> str:
    return (
        _environment()
        .get_template(template)
        .render(
            answer=answers.answer(result),
            study=answers.name(result),
            has_max_batches=not isinstance(result, CompareResult),
            is_view=is_view,
            links=links.named_pages(result, ui),
        )
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = escape_markdown
    return environment


def _svg(chart: Chart, number: int) -> Markup:
    return Markup(svg.inline(chart.figure, alt=f"{chart.title}. {chart.alt}", prefix=f"chart{number}"))
