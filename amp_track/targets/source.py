"""Find, identify and import the source files of a target. Imports no torch: some files must run before it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from amp_track.config.job import DEFAULT_WORKLOAD, library_of_model
from amp_track.records.errors import BadInput, describe_type

_SUFFIXES = importlib.machinery.all_suffixes()
"""The suffixes of importable files: .py, .so, …"""
LIBRARIES = ("accelerate", "lightning", "pytorch-lightning", "timm", "transformers")
"""Libraries that train: each version may use another amount of memory."""
LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
"""Modules that start the script of their command in its own interpreters, as torchrun and `accelerate launch` do."""
ESTIMATE = "amp_track.estimate(model, example, optimizer)"
"""The call that plans a model without a Workload."""
MODELS_BY_NAME = "timm:NAME, torchvision:NAME, transformers:CONFIG.json"
WAYS_TO_PLAN = f"{ESTIMATE}, or by name: {MODELS_BY_NAME}"
_IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*(?:from\b[ \t]*(\.*)([\w.]*)[ \t]*)?\bimport\b[ \t]*(\([^)]*\)|.*)", re.MULTILINE
)
"""Matches an import statement: the dots of a relative one, its module, and its names."""
_ahead: dict[str, ModuleType | BaseException] = {}
"""What `import_ahead` has imported or caught, until `import_workload` asks for it."""


def check_reference(workload: str) -> None:
    """Check the workload's name, and that its file exists. Quick: runs before torch is imported."""
    try:
        workload.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{workload}: expected a file name in UTF-8. Rename the file.") from None
    module, colon, name = workload.partition(":")
    if library_of_model(workload) is not None:
        _check_named_model(workload)
        return
    if colon and module.endswith(".py"):
        raise BadInput(
            f"{workload}: a file has no name after a colon. Use {module}, which must hold one Workload, or "
            f"{Path(module).stem}:{name} for a class or a function."
        )
    hint = f"Write one to start from: {init_command()}."
    if colon and not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
        raise BadInput(
            f"WORKLOAD: got {workload}, expected package.module:Class or a Python file with one Workload. {hint}"
        )
    if workload == DEFAULT_WORKLOAD and not os.path.isfile(workload):
        raise BadInput(
            f"{workload}, the default target, is not in this folder. Name your file, or write one to start from: "
            f"{init_command()}."
        )
    if not colon and not os.path.isfile(workload):  # Path.is_file() raises OSError where a name is too long
        raise BadInput(
            f"{workload}: file not found, expected a Python file with one Workload, package.module:Class, or a model: "
            f"{MODELS_BY_NAME}. {hint}"
        )


def check_is_no_script(workload: str) -> None:
    """Check that a file has a class statement, before its import, which would run the whole training of a script."""
    if not workload.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(workload).read_bytes())
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):  # its import says what is wrong
        return
    if not any(isinstance(node, ast.ClassDef) for node in ast.walk(tree)):
        raise no_workload(workload)


def no_workload(file: str) -> BadInput:
    """Return the error for a file without a Workload."""
    script = f"amp-track max-batch -- python {shlex.quote(file)} --batch-size {{batch_size}}"
    return BadInput(
        f"{file}: the file defines no subclass of Workload. Pass a script to max-batch as it is ({script}), write a "
        f"Workload to start from ({init_command()}), or plan a model with {WAYS_TO_PLAN}."
    )


def init_command() -> str:
    """Return the command that writes a Workload to a file that does not exist yet."""
    names = ("train.py", "mine.py", "workload.py")
    return f"amp-track init {next((name for name in names if not os.path.lexists(name)), 'new_workload.py')}"


def config_file(path: str) -> Path:
    """Return the configuration file of a transformers model, which may be named by its folder."""
    return Path(path, "config.json") if os.path.isdir(path) else Path(path)


def _check_named_model(reference: str) -> None:
    """Check that the library of a model is installed, and that the configuration file of transformers exists."""
    library, _, name = reference.partition(":")
    if importlib.util.find_spec(library) is None:
        raise BadInput(f"{reference}: {library} is not installed. Install it with pip install {library}.")
    if library == "transformers" and not os.path.isfile(config_file(name)):
        raise BadInput(f"{reference}: file not found, expected a config.json of a transformers model, or its folder.")


def reference_of(target: object) -> str:
    """Return the file, or `package.module:name`, from which a fresh process loads a workload or a function."""
    if isinstance(target, str | os.PathLike) and (reference := os.fspath(target)):
        return reference
    from amp_track.workload import Workload

    if isinstance(target, FunctionType) or (inspect.isclass(target) and issubclass(target, Workload)):
        return importable_name(target)
    raise BadInput(
        f"workload: got {target!r}, expected a file, package.module:Class, a class that extends Workload, or a "
        "function; pass options as set={…}"
    )


def importable_name(target: Any) -> str:
    """Return the name by which a fresh process imports a class or function. Raises BadInput if it cannot."""
    if isinstance(target, str):
        if not target.partition(":")[2].isidentifier():
            raise BadInput(f"{target}: expected package.module:name, of a function or class.")
        return target
    if not hasattr(target, "__qualname__"):
        raise BadInput(
            f"workload: got {describe_type(target)}. Pass its class or a function that makes it, which a fresh process "
            "can import."
        )
    if "." in target.__qualname__:
        raise BadInput(
            f"workload: {target.__qualname__} is defined in a function or a class; a fresh process cannot import it. "
            "Move it to the top level of a module or file."
        )
    if target.__module__ == "__main__":
        kind = "class" if inspect.isclass(target) else "function"
        raise BadInput(
            f"workload: the {kind} {target.__qualname__} exists only in this notebook or script, and a fresh process "
            "cannot import it. Move it into a file, in a notebook with %%writefile, and pass the file's path or "
            f"module:{target.__qualname__}."
        )
    source = inspect.getsourcefile(target)
    if target.__module__.startswith("amp_track_workload_") and source is not None:
        return str(Path(source))  # loaded from a file by `load_workload`
    return f"{target.__module__}:{target.__qualname__}"


def named_object(reference: str) -> Any:
    """Return the function or class of `package.module:name`. Raises BadInput if its module has none of that name."""
    module, _, name = reference.partition(":")
    found = getattr(import_workload(reference), name, None)
    if not callable(found):
        raise BadInput(f"{reference}: {module} has no function or class named {name}.")
    return found


def called(reference: str, *, written_as: str, **arguments: Any) -> Any:
    """Return what the function of `package.module:name` returns, called by name, or by position if it has other names.

    Raises:
        BadInput: the function does not take the arguments.
    """
    function = named_object(reference)
    signature = inspect.signature(function)
    by_name = arguments.keys() <= signature.parameters.keys()
    try:
        bound = signature.bind(**arguments) if by_name else signature.bind(*arguments.values())
    except TypeError as error:
        raise BadInput(f"{reference}: {error}. Write it as {written_as}.") from None
    return function(*bound.args, **bound.kwargs)


def import_ahead(reference: str) -> None:
    """Import a workload now; `import_workload` returns that module once, or raises that exception."""
    try:
        _ahead[reference] = import_workload(reference)
    except BaseException as error:  # SystemExit too
        _ahead[reference] = error


def import_workload(reference: str) -> ModuleType:
    """Return the module of `train.py` or `package.module:Class`. Raises whatever its code raises."""
    ahead = _ahead.pop(reference, None)
    if isinstance(ahead, BaseException):
        raise ahead
    if ahead is not None:
        return ahead
    module_name, colon, _ = reference.partition(":")
    if not colon:
        return _import_file(Path(reference))
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module_name)


def _import_file(path: Path) -> ModuleType:
    name = f"amp_track_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path` does: helpers beside the file can be imported
    spec.loader.exec_module(module)
    return module


def workload_files(reference: str) -> list[Path]:
    """Return all files that a workload reference may name, with symbolic links resolved.

    A path names one file. `package.module:Class` may name several files, in the working folder and on `sys.path`: how
    the command was started decides which one its jobs import. Of a model by name, only a configuration counts.
    """
    module, colon, name = reference.partition(":")
    if library_of_model(reference) is not None:
        return [config_file(name).resolve()] if module == "transformers" else []
    if not colon:
        return [Path(reference).resolve()]
    parts = module.split(".")
    names = [f"{stem}{suffix}" for stem in (parts[-1], f"{parts[-1]}/__init__") for suffix in _SUFFIXES]
    folders = [Path(folder).joinpath(*parts[:-1]) for folder in ("", *sys.path)]
    return list({file.resolve() for folder in folders for name in names if (file := folder / name).is_file()})


def digest(file: Path, imports: Iterable[str] = ()) -> str | None:
    """Return the first 12 hexadecimal digits of the SHA-256 of a file and those beside it; None if one is no source."""
    try:  # a name comes from a store and may be any text
        files = sorted({file.resolve(), *((file.parent / name).resolve() for name in imports)})
        if not all(each.is_file() for each in files) or not all(name.endswith(tuple(_SUFFIXES)) for name in imports):
            return None
        return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]
    except (OSError, ValueError):
        return None


def imported_files(script: Path) -> tuple[str, ...]:
    """Return the files that a script's import statements name, relative to its folder, without running anything.

    They are searched in its folder and in the working folder (`python -m`), not among the installed packages.
    """
    found, folders = [script], tuple(dict.fromkeys((script.parent, Path.cwd())))
    for file in found:  # it grows
        for bases, name in _import_statements(file, folders):
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):  # a package's __init__.py runs before its modules
                stems = [os.path.join(base, *parts[:depth]) for base in bases]
                files = [f"{stem}{ending}" for stem in stems for ending in (f"{os.sep}__init__.py", ".py")]
                imported = next((Path(each) for each in files if os.path.isfile(each)), script)
                if imported not in found:
                    found.append(imported)
    return tuple(sorted(os.path.relpath(file, script.parent) for file in found[1:]))


def _import_statements(file: Path, folders: Sequence[Path]) -> Iterator[tuple[Sequence[Path], str]]:
    """Yield the dotted name of each import of a file, with the folders that may have it.

    A word too many does no harm. Parsing is exact, and took 4 s for the 235 files that timm's train.py imports.
    """
    with suppress(OSError):
        text = re.sub(r"#.*|\\\n", "", file.read_text(errors="replace"))  # or \ continues a line
        for dots, module, names in _IMPORT.findall(text):
            bases = file.parents[len(dots) - 1 : len(dots)] if dots else folders
            for name in re.findall(r"\w+(?:\.\w+)*|\*", names):  # of a module, or in it
                yield bases, f"{module}.{name}" if module else name


def versions_of_libraries(files: Iterable[Path] | None = None) -> tuple[tuple[str, str], ...]:
    """Return the versions of the installed libraries that train, without importing them; of files, of those they name.

    A function or a command may use any: its own imports may come late, and from other packages.
    """
    texts = [file.read_text(errors="replace") for file in files] if files is not None else None
    found = []
    for name in LIBRARIES:
        if texts is None or any(re.search(rf"\b{name.replace('-', '_')}\b", text) for text in texts):
            with suppress(importlib.metadata.PackageNotFoundError):
                found.append((name, importlib.metadata.version(name)))
    return tuple(found)


def script_of(command: Sequence[str]) -> str:
    """Return the Python file that a command runs: its first word that is one, or the file of `-m module`.

    Raises:
        BadInput: it has no {batch_size}, or runs no Python file.
    """
    if not any("{batch_size}" in word for word in command):
        raise BadInput(
            "The command has no {batch_size}. Write it where the script takes its batch size: "
            "amp-track max-batch -- python train.py --batch-size {batch_size}"
        )
    if shutil.which(command[0]) is None and not is_python(command[0]):
        if command[0].endswith(".py"):
            raise BadInput(f"{command[0]} is no program. Write python {command[0]}.")
        raise BadInput(f"{command[0]}: no such program. Check its name, or install it.")
    for before, word in pairwise(("", *command)):
        if word.endswith(".py") and os.path.isfile(word):
            return word
        if before == "-m" and "{" not in word and word not in LAUNCHERS:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(word)
                if spec is not None and spec.origin is not None:
                    return spec.origin
    raise BadInput(f"{' '.join(command)}: no word of this command is an existing Python file. Check its path.")


def is_python(program: str) -> bool:
    """Return whether a program is the Python of this environment, whose scripts can run in the job process."""
    folder, name = os.path.split(program)
    return name.startswith("python") and folder in ("", os.path.dirname(sys.executable))
