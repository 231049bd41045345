"""Who imports whom: imports go down only, and each outside library has one room."""

from __future__ import annotations

import ast
from pathlib import Path

from support import ROOT

PACKAGE = ROOT / "amp_track"

USES = {
    "records": set(),
    "planner": {"records"},
    "workers": {"records"},
    "workload_import": {"records"},
    "workload": {"records", "workload_import"},
    "training.devices": {"records"},
    "training.amp": {"records", "training.devices"},
    "training": {"records", "workload", "training.amp", "training.devices"},
    "results": {"records", "planner"},
    "report": {"records", "planner", "results"},
    "study": {"records", "planner", "results", "workers"},
    "tracking": {"records", "workers"},
    "training.planning": {"records", "workload", "training", "training.amp"},
    "sandbox": {
        "records", "planner", "workers", "workload", "workload_import",
        "training", "training.amp", "training.devices", "training.planning",
    },
    "commands.session": {"records", "planner", "workers", "results", "report", "study", "tracking", "sandbox"},
    "commands": {
        "records", "planner", "workers", "results", "report", "study", "tracking", "sandbox", "commands.session",
    },
    "api": {"records", "results", "workload", "report", "commands"},
    "cli": {"records", "workers", "report", "sandbox", "commands"},
}  # fmt: skip
"""By room, the rooms below it that it may import."""
TOWARDS_TYPES_AND_SETTINGS = {("commands.session", "commands.request"), ("commands.session", "commands.flags")}
"""What was asked for is data, although it lies beside the commands."""
HOME_OF = {"mlflow": "tracking", "optuna": "study"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def room_of(module: str) -> str:
    """Return the deepest room that a module lies in: `training.amp` for `training.amp.step`."""
    parts = module.split(".")
    rooms = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((room for room in rooms if room in USES), "the top")


def imports_of(tree: ast.AST) -> set[str]:
    """Return the modules of this package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "amp_track":
                base = module.removeprefix("amp_track").removeprefix(".")
                inside = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
                found |= {name if name in NAMES else base for name in inside}
            case ast.Import(names=names):
                found |= {
                    alias.name.removeprefix("amp_track.") for alias in names if alias.name.startswith("amp_track.")
                }
    return found - {""}


def outside_imports_of(tree: ast.AST) -> set[str]:
    """Return the top-level packages that a module imports, wherever in it, for types alone too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.split(".")[0])
    return found


TREES = {name_of(path): ast.parse(path.read_text()) for path in MODULES}


def test_imports_go_down_only() -> None:
    for module, tree in TREES.items():
        if module in ("", "__main__"):
            continue  # the public names, and `python -m`
        room = room_of(module)
        for imported in imports_of(tree):
            target = room_of(imported)
            allowed = target == room or target in USES[room] or (room, imported) in TOWARDS_TYPES_AND_SETTINGS
            assert allowed, f"{module} imports {imported}: {room} may use {sorted(USES[room])}"


def test_each_outside_library_has_one_room() -> None:
    for module, tree in TREES.items():
        for library, home in HOME_OF.items():
            assert library not in outside_imports_of(tree) or room_of(module) == home, module


def test_modules_are_imported_by_their_full_names() -> None:
    """A relative import or a public name would hide which room is used."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(level=level) if level:
                    raise AssertionError(f"{module}: line {node.lineno} imports relatively")
                case ast.ImportFrom(module="amp_track", names=names):
                    assert {alias.name for alias in names} <= NAMES, f"{module}: line {node.lineno} uses a public name"


def test_the_check_of_imports_can_fail() -> None:
    tree = ast.parse(
        "def late():\n    from amp_track.study import fit\n    from amp_track import tracking\n    import mlflow"
    )
    assert imports_of(tree) == {"study.fit", "tracking"}
    assert outside_imports_of(tree) == {"amp_track", "mlflow"}
    assert room_of("study.fit") == "study" not in USES["report"]


def test_no_two_modules_import_each_other() -> None:
    imports = {module: imports_of(tree) for module, tree in TREES.items()}
    seen: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in seen:
            for imported in sorted(imports.get(module, ())):
                visit(imported, (*above, module))
            seen.add(module)

    for module in sorted(imports):
        if module:
            visit(module, ())


def test_a_jobs_process_imports_neither_stores_nor_the_command_line() -> None:
    for module, tree in TREES.items():
        if room_of(module) in ("records", "workload", "training", "training.amp", "training.devices"):
            assert not outside_imports_of(tree) & {"mlflow", "optuna", "typer", "rich", "matplotlib"}, module
