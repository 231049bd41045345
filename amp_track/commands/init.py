"""init: write a file to start from, which runs. Its first lines are the commands to run it."""

from __future__ import annotations

import contextlib
import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from amp_track.config.options import Request
from amp_track.records.errors import BadInput, summary

_TEMPLATES = Path(__file__).parent.parent / "templates"
"""The templates, with FILE and MODULE in place of the name of the file. They are data: this package imports none."""
_FOR_A_CPU = r" --memory-budget \S+| --precision fp32,bf16"
"""The flags of their commands that make a CPU reach its limit soon. On a GPU no training may fit such a budget."""


def init(request: Request) -> list[str]:
    """Write the template to the new file that is the job's target. Return the commands to run in its folder.

    Raises:
        BadInput: the file exists, has no usable name, or cannot be written. Nothing is written.
    """
    file = Path(request.job.workload)
    _check_name(file)
    text = (_TEMPLATES / f"{request.init_options.template}.py").read_text(encoding="utf-8")
    text = text.replace("FILE", shlex.quote(file.name)).replace("MODULE", file.stem)
    try:
        with file.open("x", encoding="utf-8") as opened:
            try:
                opened.write(text)
                opened.flush()
            except OSError:  # such as a full disk
                with contextlib.suppress(OSError):
                    file.unlink()
                raise
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be written: {summary(error)}") from None
    lines = [line.removeprefix("    ") for line in text.split('"""')[1].splitlines() if line.startswith("    ")]
    return [re.sub(_FOR_A_CPU, "", line) for line in lines] if _has_gpu() else lines


def _has_gpu() -> bool:
    """Return whether this machine has a GPU of NVIDIA or AMD that is not hidden, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    has_device = any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd"))
    return has_device or shutil.which("nvidia-smi") is not None


def _check_name(file: Path) -> None:
    """Raise BadInput unless the file is new and its name is that of a Python module which hides no other one."""
    if os.path.lexists(file):
        raise BadInput(f"{file} exists already. Choose another name.")
    if file.suffix != ".py" or not file.stem.isidentifier() or keyword.iskeyword(file.stem):
        raise BadInput(f"FILE: got {file}, expected the name of a new Python file, such as train.py.")
    if file.stem in sys.modules or importlib.util.find_spec(file.stem) is not None:  # __main__ may have no spec
        raise BadInput(
            f"FILE: got {file}, the name of an installed module, which it would hide. Choose another name, such as "
            f"my_{file.name}."
        )
    if not file.parent.is_dir():
        raise BadInput(f"{file.parent}: no such folder. Create it first.")
