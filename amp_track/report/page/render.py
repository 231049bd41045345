"""Render a report page as self-contained HTML and as Markdown."""

from __future__ import annotations

import functools

from amp_track.report import links
from amp_track.report import summary as answers
from amp_track.report.html import templates
from amp_track.report.page.content import Page
from amp_track.report.summary import Result
from amp_track.results.compare import CompareResult


def page_html(page: Page, *, ui: str, start: str | None = None) -> str:
    """Return the page as one self-contained HTML file: no requests, no stored data, opens from disk.

    `ui` is the URL of MLflow's UI, for the links, and `start` the command that starts it.
    """
    return templates().get_template("page.html").render(
        page=page,
        in_tools=answers.IN_TOOLS,
        run_url=functools.partial(links.run, ui, page.result.experiment_id),
        links=links.pages(page.result, ui),
        start=start,
    )  # fmt: skip


def page_markdown(page: Page, *, ui: str) -> str:
    """Return the page as Markdown: the recommendation and the tables, without charts and trials."""
    return templates().get_template("page.md").render(
        page=page, answer=page.answer, in_tools=answers.IN_TOOLS, links=links.pages(page.result, ui)
    )  # fmt: skip


def note_markdown(result: Result) -> str:
    """Return the recommendation as the description of the study's run, with links relative to the UI."""
    return templates().get_template("note.md").render(answer=answers.answer(result), links=links.pages(result, ""))


def dashboard_markdown(result: Result, *, ui: str, is_view: bool = False) -> str:
    """Return the recommendation as a note for optuna-dashboard; `is_view` for the study of one precision."""
    return templates().get_template("dashboard.md").render(
        answer=answers.answer(result),
        study=result.study,
        has_max_batches=not isinstance(result, CompareResult),
        is_view=is_view,
        links=links.pages(result, ui),
    )  # fmt: skip
