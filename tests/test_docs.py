"""Check README.md and docs/ against the code: generated parts are fresh, links resolve, commands parse."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from support import ROOT, tokens

import amp_track
from amp_track import cli
from amp_track.config.commands import FLAGS
from amp_track.records.memory_state import MemoryState, WayOut
from amp_track.records.plan import Category, Holding
from amp_track.records.result import Diagnosis
from amp_track.report import explain as explain_report
from amp_track.report import train as train_report
from amp_track.results.explain import ExplainResult
from amp_track.tracking.run import DIAGNOSIS

sys.path.append(str(ROOT / "docs"))
import site_pages

README = ROOT / "README.md"
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("docs", "benchmarks", "experiments", "tests") for page in (ROOT / folder).rglob("*.md")),
]
RECORDS = sorted((ROOT / "docs" / "output").glob("*.json"))
assert RECORDS, "docs/output is empty: run `make docs-all`"
FEWEST_LETTERS = 7
"""A text with fewer letters outside of its placeholders matches too many lines."""


# ------------------------------------------------------------------------------------------------------- generated


def test_every_generated_part_is_what_make_docs_would_write() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "golden").rglob("*[[]json].txt")), ids=lambda file: file.stem)
def test_every_key_that_json_prints_is_on_its_page(file: Path) -> None:
    printed = file.read_text().partition("--- stdout\n")[2].partition("\n--- stderr")[0]
    page = (ROOT / "docs" / "json.md").read_text()
    assert [key for key in json.loads(printed) if f"`{key}`" not in page] == []


def lines_of(record: Path) -> list[str]:
    lines: list[str] = json.loads(record.read_text())["lines"]
    return lines


OF_A_RUN = {"fp32", "bf16", "amp", "accuracy", "mse", "stepsskipped"}
"""Headings that depend on what was run: precisions, the workload's metric, and a column that amp adds."""


def tables_shown(lines: list[str]) -> set[tuple[str, ...]]:
    """Return the headings of each table of a text, without spaces, so that wrapping does not matter."""
    found = set()
    for start, line in enumerate(lines):
        if line.startswith("┏"):
            end = next(index for index in range(start, len(lines)) if lines[index].startswith("┡"))
            columns = zip(*(row.split("┃")[1:-1] for row in lines[start + 1 : end]), strict=True)
            headings = ("".join("".join(cells).split()) for cells in columns)
            found.add(tuple(heading for heading in headings if heading not in OF_A_RUN))
    return found


@cache
def tables_of_today() -> set[tuple[str, ...]]:
    """Return the tables of the golden files, which hold what commands print, and of two results that these lack."""
    goldens = [file.read_text().splitlines() for file in (ROOT / "tests" / "golden").rglob("*.txt")]
    failed = Holding(layer="", operation="", category=Category.ACTIVATIONS, size_bytes=1)
    state = MemoryState(holdings=(failed,), failed=failed, allocated_bytes=1, reserved_bytes=1)
    way = WayOut(change="", cost="", saved_bytes=1)
    explained = ExplainResult(source="", state=state, peak=state, ways_out=(way,), max_batch=1)
    diagnosis = train_report.diagnosis_table(Diagnosis(every=1, steps=1, seconds=1.0, layers=()))
    made = [*explain_report.tables(explained), diagnosis]
    headings = {tuple("".join(column.heading.split()) for column in table.columns) for table in made}
    return headings.union(*map(tables_shown, goldens))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_tables_shown_have_the_headings_of_today(record: Path) -> None:
    assert tables_shown(lines_of(record)) <= tables_of_today(), "run `make docs-all`"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_tables_shown_fit_100_columns(record: Path) -> None:
    assert [line for line in lines_of(record) if re.match("[┏┃┡│├└]", line) and len(line) > 100] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_examples_show_no_path_of_the_machine_that_ran_them(record: Path) -> None:
    assert not [line for line in lines_of(record) if re.search(r"(^|[\s:])/\w+/", line)]


@cache
def texts_in_the_source() -> list[re.Pattern[str]]:
    """Return a pattern for every text in the source; placeholders of f-strings match anything."""
    patterns = []
    for file in sorted((ROOT / "amp_track").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            literals = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            letters = sum(character.isalpha() for text in literals if isinstance(text, str) for character in text)
            if letters >= FEWEST_LETTERS:
                pattern = "".join(re.escape(text) if isinstance(text, str) else ".*" for text in literals)
                patterns.append(re.compile(pattern))
    return patterns


def sentences(lines: list[str]) -> Iterator[str]:
    """Yield the sentences of an example: its notes, unwrapped, and the reasons of its probes."""
    note = ""
    for line in lines:
        if note and line.startswith("  "):
            note += " " + line.strip()
            continue
        if note:
            yield note
        note = line.removeprefix("· ") if line.startswith("· ") else ""
        if probed := re.fullmatch(r"\S+ +batch \d+ .*?  \((.+)\)", line):
            yield probed.group(1)
    if note:
        yield note


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_sentences_shown_are_those_of_today(record: Path) -> None:
    for sentence in sentences(lines_of(record)):
        of_a_precision = re.sub(r"^\w+: (.+)\.$", r"\1", sentence)  # without the precision
        known = any(text.fullmatch(said) for text in texts_in_the_source() for said in (sentence, of_a_precision))
        assert known, f"{sentence!r}: run `make docs-all`"


def test_the_check_of_sentences_can_fail() -> None:
    lines = ["· no such sentence is in the source", "  of this package at all", "bf16 batch 9  fits  (only for fun)"]
    found = list(sentences(lines))
    assert found == ["no such sentence is in the source of this package at all", "only for fun"]
    assert not any(text.fullmatch(sentence) for sentence in found for text in texts_in_the_source())


def test_every_metric_is_on_the_page_about_mlflow() -> None:
    page = (ROOT / "docs" / "mlflow.md").read_text()
    nodes = [node for file in (ROOT / "amp_track").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text for text in texts if re.fullmatch(r"(train|eval|amp|time|input|throughput|memory)/[a-z_]+", text)}
    assert len(names) > 15
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_text_and_table_in_mlflow_is_on_its_page() -> None:
    page = (ROOT / "docs" / "mlflow-tags.md").read_text()
    sources = "".join(file.read_text() for file in (ROOT / "amp_track").rglob("*.py"))
    names = {DIAGNOSIS} | set(re.findall(r"\.(?:text|table)\(\s*\"([\w-]+\.(?:txt|json))\"", sources))
    assert len(names) > 5
    assert {name for name in names if f"`{name}`" not in page} == set()


# ------------------------------------------------------------------------------------------------ links and commands


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for level, text in re.findall(r"^(#+) (.+)$", page.read_text(), re.MULTILINE):
        assert level
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        numbered = (f"{anchor}-{number}" for number in range(1, 100))
        found.add(anchor if anchor not in found else next(name for name in numbered if name not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = [token.attrGet("href" if token.type == "link_open" else "src") for token in tokens(page)]
    for link in links:
        if link is None or re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT.resolve()), f"{link} leads out of the project"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_anchors_are_github_s(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What does `it` cost, and why?\n\n## Python\n\n## Python\n")
    assert anchors(page) == {"what-does-it-cost-and-why", "python", "python-1"}


def parameters_of(command: str) -> list[Any]:
    group: Any = typer.main.get_command(cli.app)
    return list(group.commands[command].params)


def commands_shown() -> Iterator[tuple[str, list[str]]]:
    """Yield every `amp-track` command of every page, with the page's name."""
    for page in PAGES:
        for token in tokens(page):
            texts = []
            if token.type == "fence" and token.info in ("console", "text"):
                texts = [line.removeprefix("$ ") for line in token.content.splitlines() if line.startswith("$ ")]
            elif token.type == "code_inline":
                texts = [token.content]
            for text in texts:
                program, *arguments = shlex.split(text, comments=True) if text.startswith("amp-track ") else [""]
                if program and arguments[0][0].isalpha() and arguments[0].islower():
                    yield page.name, arguments


def test_every_command_shown_parses() -> None:
    group: Any = typer.main.get_command(cli.app)
    shown = list(commands_shown())
    assert len(shown) > 30
    for page, (command, *arguments) in shown:
        try:
            group.commands[command].make_context(command, arguments)
        except typer.BadParameter.__mro__[1] as error:
            pytest.fail(f"{page}: amp-track {command} {shlex.join(arguments)}: {error}")


def test_a_budget_too_small_for_a_gpu_is_given_with_the_cpu() -> None:
    # README.md says it in words; a plan and an explanation run nothing.
    small = [(page, words) for page, words in commands_shown() if re.search(r"--memory-budget \d+MiB", " ".join(words))]
    ran = [(page, words) for page, words in small if words[0] not in ("plan", "explain") and page != "README.md"]
    assert len(ran) > 5
    assert [(page, words) for page, words in ran if "cpu" not in words] == []


def test_python_shown_parses_and_takes_its_keywords_from_the_flags() -> None:
    calls = 0
    for page in PAGES:
        for token in tokens(page):
            if token.type != "fence" or token.info != "python":
                continue
            for node in ast.walk(ast.parse(token.content)):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name("amp_track"), attr=command), keywords=keywords):
                        if command in ("estimate", "watch"):  # which are no commands
                            known = set(inspect.signature(getattr(amp_track, command)).parameters)
                        else:
                            flags = [parameter.opts[0] for parameter in parameters_of(command.replace("_", "-"))]
                            known = {flag.removeprefix("--").replace("-", "_") for flag in flags}
                        assert {str(keyword.arg) for keyword in keywords} <= known, page.name
                        calls += 1
    assert calls >= 3


# ----------------------------------------------------------------------------------------------------------- README


def test_the_readme_and_its_first_screen_are_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    first_screen = "\n".join(lines[:40])
    for said in ("docs/images/report.png", "make search", "make test", "| fp32 |", "| bf16 |", "(few!)", "**few!**"):
        assert said in first_screen
    assert "**Two GPUs have run this**" in first_screen
    assert first_screen.count("```") % 2 == 0, "the first screen ends within a block"


def test_the_table_of_the_readme_is_narrow() -> None:
    table = [line for line in README.read_text().splitlines()[:40] if line.startswith("|")]
    assert 5 <= len(table) <= 6  # tf32 is the sixth, where it runs
    assert max(map(len, table)) <= 110


def test_the_screenshot_of_the_readme_is_small() -> None:
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size <= 200_000


# ------------------------------------------------------------------------------------------------------------- site


def pages_in(nav: list[Any]) -> Iterator[str]:
    """Yield the pages of mkdocs.yml's navigation."""
    for entry in nav:
        (content,) = entry.values()
        yield from pages_in(content) if isinstance(content, list) else [content]


def test_every_page_is_in_the_navigation_once() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    found = list(pages_in(yaml.safe_load(text)["nav"]))
    assert len(found) == len(set(found))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(found)
    commands = {Path(page).stem for page in found if page.startswith("commands/")}
    assert commands == set(FLAGS)


def test_every_public_name_is_on_one_page_of_the_site() -> None:
    names = [name for names in site_pages.API_PAGES.values() for name in names.split() if "." not in name]
    assert sorted(names) == sorted(amp_track.__all__)


def test_links_of_the_site_lead_to_its_pages() -> None:
    markdown = "[a](amp-step.md#a) `[b](b.md)` [two\nlines](../README.md) [c](../experiments/mlp.py) [d](../deploy)"
    shown = site_pages._for_the_site(f"{markdown}\n```\n[e](../README.md)\n```\n", page="docs/gpu.md", site="gpu.md")
    changed = "[a](amp-step.md#a) `[b](b.md)` [two\nlines](index.md) [c](files/experiments/mlp.py.md) d"
    assert shown == f"{changed}\n```\n[e](../README.md)\n```\n"


def test_without_mkdocs_the_site_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(ROOT / "docs" / "site_pages.py"), "build"]  # -S: no installed packages
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "The site needs MkDocs with Material and mkdocstrings: pip install '.[site]'.\n"
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = ["mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 60
    loaded = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//""")
    assert [page.name for page in pages if loaded.search(page.read_text())] == []
