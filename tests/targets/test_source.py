"""The identity of a target's sources."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from amp_track.targets.source import LIBRARIES, called, imported_files, versions_of_libraries


def test_only_the_libraries_that_a_workload_names_are_part_of_its_identity(clean_folder: Path) -> None:
    Path("mine.py").write_text("import my_lightning\nfrom timm import create_model\n")
    Path("helper.py").write_text("def f():\n    import transformers\n")
    versions = {name: importlib.metadata.version(name) for name in ("timm", "transformers")}
    assert dict(versions_of_libraries([Path("mine.py"), Path("helper.py")])) == versions


def test_every_installed_library_is_part_of_the_identity_of_a_function() -> None:
    found = dict(versions_of_libraries())
    assert {"accelerate", "lightning", "timm", "transformers"} <= found.keys() <= set(LIBRARIES)


def test_the_imports_of_a_script_are_found_without_running_it(clean_folder: Path) -> None:
    files = {
        "train.py": "import torch, helper as h  # not unrelated\ndef f():\n    from models import (\n  net, x)\n",
        "helper.py": "try: import json; import late\nexcept: raise SystemExit\n",
        "late.py": "a syntax error",
        "models/net.py": "from . import layers\nfrom .blocks.conv import *\nfrom ... import above\n",
        "models/layers.py": "",
        "models/blocks/__init__.py": "from ..norm \\\n  import Norm\n",
        "models/blocks/conv.py": "import train\n",
        "models/norm.py": "",
        "unrelated.py": "",
        "models/unrelated.py": "",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    used = sorted(name for name in files if "unrelated" not in name and name != "train.py")
    assert imported_files(Path("train.py").resolve()) == tuple(used)
    Path("below").mkdir()
    Path("below/run.py").write_text("from models import layers")
    assert imported_files(Path("below/run.py").resolve()) == ("../models/layers.py",), "of python -m below.run"


def test_a_function_is_called_by_name_or_else_by_position() -> None:
    assert called("textwrap:TextWrapper", initial_indent="> ", written_as="").initial_indent == "> ", "not its first"
    assert called("fractions:Fraction", batch_size=8, written_as="") == 8, "it has another name for it"
