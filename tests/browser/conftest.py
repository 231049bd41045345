"""A real browser: Debian's Chromium, driven by Playwright. Nothing may be asked of another machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from support import PHONE

from benchmarks.servers import Server, running_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
"""Chromium refuses its sandbox to root, and asks Google's servers at every start unless it is told not to."""
WIDE = {"width": 1400, "height": 900}
SCREENSHOTS = os.environ.get("AMP_TRACK_SCREENSHOTS")
"""A folder to keep screenshots in, for people to look at."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a wide window."""
    yield from _opened(browser, WIDE)


@pytest.fixture(params=[WIDE, PHONE], ids=["wide", "phone"])
def any_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of a wide window, and one of a phone."""
    yield from _opened(browser, request.param)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A tracking server on the store of the current folder."""
    with running_server(tmp_path / "server", database=f"sqlite:///{Path.cwd()}/mlflow.db") as running:
        yield running


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[[Page], None]:
    """`keep(page)` saves a screenshot under the test's name, where AMP_TRACK_SCREENSHOTS names a folder."""

    def save(page: Page) -> None:
        if SCREENSHOTS:
            name = re.sub(r"\W+", "-", request.node.name).strip("-")
            page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)

    return save


def _opened(browser: Browser, viewport: dict[str, int]) -> Iterator[Page]:
    opened = browser.new_page(viewport=viewport)  # type: ignore[arg-type]
    opened.set_default_timeout(60_000)
    asked: list[str] = []
    errors: list[str] = []
    opened.on("request", lambda request: asked.append(urlsplit(request.url).hostname or ""))
    opened.on("pageerror", lambda error: errors.extend([str(error)] if opened.url.startswith("file:") else []))
    opened.on("console", lambda message: errors.extend([message.text] if _is_ours(message) else []))
    yield opened
    opened.close()
    assert set(asked) <= {"127.0.0.1", ""}, "no request leaves the machine"
    assert errors == []


def _is_ours(message: ConsoleMessage) -> bool:
    """True for an error of a page of ours: opened from disk, or in the frame in which MLflow shows it."""
    return message.type == "error" and urlsplit(message.location["url"]).scheme in ("file", "blob")
