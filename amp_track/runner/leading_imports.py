"""Find the imports of a workload file that can run in advance without changing its behavior.

A file may set an environment variable or patch a module, and then import a module that depends on it. So only imports
above the first other statement run in advance. An import of a module that is not installed counts as another statement:
it is code of the user and may do anything.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

_REQUIRED = {"torch", "numpy", "amp_track"}
"""Packages that are loaded after `import torch`, and amp_track."""
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_LIBRARIES = {
    "amp_track.integrations.lightning": "import lightning.pytorch",
    "amp_track.integrations.transformers": "from transformers import Trainer",
    "timm": "import timm",
    "torchvision": "import torchvision",
    "transformers": "import transformers",
}
"""The slow import of each integration and of models by name, which comes before any code of the user."""
_Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class LeadingImports:
    """The import statements at the top of a workload file."""

    statements: tuple[str, ...] = ()
    """Imports of installed packages, in the order of the file, without the standard library."""
    stopped_at: str = ""
    """The first other statement: `train.py, line 3`."""
    is_self_contained: bool = False
    """True if the file otherwise imports only the standard library and packages that every job needs. Other imports of
    a fork server do not affect such a file."""


def leading_imports(workload: str) -> LeadingImports:
    """Return the import statements before any other statement in a workload file, or in the packages of its module."""
    module, colon, _ = workload.partition(":")
    if module in _LIBRARIES:
        return LeadingImports(("import torch", _LIBRARIES[module]))
    here = os.getcwd()
    path = sorted(sys.path, key=lambda folder: folder in ("", here))  # a stable sort: only the working folder moves
    if colon:
        path.append(here)
        files = _files_of_module(module, path)
        if not files:  # for example in a zip archive
            return LeadingImports((), module)
    else:
        files = [workload] if os.path.isfile(workload) else []  # reading a pipe would block
        path.insert(0, os.path.realpath(os.path.dirname(workload)))  # as `targets.source` does
    statements: list[str] = []
    parsed = {file: _parsed_file(file) for file in files}
    for file, tree in parsed.items():
        for node in _top_level(tree):
            if not isinstance(node, _Import) or not _is_installed(node, path):
                contained = all(_imports_only(each, statements) for each in parsed.values())
                return LeadingImports(tuple(statements), f"{file}, line {node.lineno}", contained)
            if not sys.stdlib_module_names >= _packages(node):
                statements.append(ast.unparse(node))
    return LeadingImports((*statements, "import torch"), is_self_contained=True)  # no statement precedes the imports


def is_of_required_package(statement: str) -> bool:
    """Return whether a statement imports only from packages that every job needs."""
    return _packages(_parsed(statement)) <= _REQUIRED


def may_share_server(running: Sequence[str], wanted: LeadingImports) -> bool:
    """Return whether a fork server that has run some statements may serve a workload with other leading imports.

    It may if both import torch, and the server has imported nothing else that the workload may import later.
    """
    if tuple(running) == wanted.statements:
        return True
    others = {statement for statement in running if not is_of_required_package(statement)}
    if not wanted.is_self_contained and not others <= set(wanted.statements):
        return False
    return any(map(_imports_torch, running)) and any(map(_imports_torch, wanted.statements))


def _imports_only(tree: ast.Module, statements: Sequence[str]) -> bool:
    """Return whether all imports of a file, including its functions, are of required packages or in `statements`."""
    imported = {name for node in ast.walk(tree) if isinstance(node, _Import) for name in _packages(node)}
    allowed = {name for statement in statements for name in _packages(_parsed(statement))}
    return imported <= sys.stdlib_module_names | _REQUIRED | allowed


def _imports_torch(statement: str) -> bool:
    """Return whether a statement imports torch, directly or through `from amp_track import Workload`."""
    node = _parsed(statement)
    if isinstance(node, ast.ImportFrom) and node.module == "amp_track":
        return "Workload" in [alias.name for alias in node.names]
    return "torch" in _packages(node)


def _parsed(statement: str) -> _Import:
    (node,) = ast.parse(statement).body
    assert isinstance(node, _Import)
    return node


def _files_of_module(module: str, path: Sequence[str]) -> list[str]:
    """Return the files that Python runs to import a module: those of its packages and of the module."""
    names = module.split(".")
    for folder in path:
        own = Path(folder, *names)
        file = next((each for each in (own / "__init__.py", own.with_suffix(".py")) if each.is_file()), None)
        if file is not None:
            packages = [Path(folder, *names[:depth], "__init__.py") for depth in range(1, len(names))]
            return [str(each) for each in (*packages, file) if each.is_file()]
    return []


def _parsed_file(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):  # last two: too many parentheses
        return ast.Module([], [])


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a file that have an effect when it is imported."""
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.Assign(targets=[ast.Name()], value=value) if _is_literal(value):  # __version__, __all__
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
                continue
        yield node


def _is_literal(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return True
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return all(map(_is_literal, elements))
    return False


def _packages(node: _Import) -> set[str]:
    """Return the top-level packages of an import statement; "" for a relative one."""
    if isinstance(node, ast.ImportFrom):
        return {"" if node.level else (node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names}


def _is_installed(node: _Import, path: Sequence[str]) -> bool:
    """Return whether a statement imports only the standard library and installed packages, not code of the user."""
    for name in _packages(node) - sys.stdlib_module_names - _REQUIRED:
        try:
            spec = PathFinder.find_spec(name, path) if name else None
        except (ImportError, ValueError):
            return False
        if spec is None:
            return False
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        if not any(_INSTALLED_FOLDERS & set(Path(place).parts) for place in places):
            return False
    return True
