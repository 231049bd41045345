"""User-visible texts use the vocabulary of PyTorch, MLflow and Optuna, and no second word for the same idea."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support import ROOT, tokens

BANNED = {
    r"edges?": "max batch",
    r"largest batch(es)?(?! sizes? that fits?)": "max batch",
    r"frontier": "max batch",
    r"cards?": "GPU",
    r"pictures?": "plot",
    r"verdicts?": "status",
    r"sandbox(es)?": "job runner, job process",
    r"spool": "outbox",
    r"peers": "ranks",
    r"refus(e|es|ed|al)": "rejected",
    r"quality": "metric",
    r"told|heard|gone|let go|mended|came to|so many|once more|of its own(?! [a-z])|as if|whoever": "plain words",
}
"""By pattern, what to say instead."""
_WORDS = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
PAGES = [
    *ROOT.glob("docs/*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
]


def messages(file: Path) -> Iterator[tuple[int, str]]:
    """Every string of a module that is a sentence and no docstring, with its line; of commands the docstrings too."""
    tree = ast.parse(file.read_text())
    unseen = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and not getattr(node, "name", "").endswith("_command"):
                unseen.add(id(statement.value))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unseen
        if is_text and " " in node.value.strip():
            yield node.lineno, node.value


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Every text of a page outside code, with its line."""
    for token in tokens(page):
        if token.type == "inline":
            text = " ".join(child.content for child in token.children or () if child.type == "text")
            yield (token.map or [0])[0] + 1, text


def found(texts: Iterator[tuple[int, str]], file: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line}: {word[0]!r} in {text[:80]!r}"
        for line, text in texts
        for word in _WORDS.finditer(text)
    ]


def test_messages_use_the_vocabulary() -> None:
    files = sorted((ROOT / "amp_track").rglob("*.py"))
    assert [line for file in files for line in found(messages(file), file)] == []


def test_pages_use_the_vocabulary() -> None:
    assert [line for page in PAGES for line in found(prose(page), page)] == []
