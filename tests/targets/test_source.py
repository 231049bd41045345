"""The identity of a target's sources."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from amp_track.targets.source import LIBRARIES, versions_of_libraries


def test_only_the_libraries_that_a_workload_names_are_part_of_its_identity(clean_folder: Path) -> None:
    Path("mine.py").write_text("import my_lightning\nfrom timm import create_model\n")
    Path("helper.py").write_text("def f():\n    import transformers\n")
    versions = {name: importlib.metadata.version(name) for name in ("timm", "transformers")}
    assert dict(versions_of_libraries([Path("mine.py"), Path("helper.py")])) == versions


def test_every_installed_library_is_part_of_the_identity_of_a_function() -> None:
    found = dict(versions_of_libraries())
    assert {"accelerate", "lightning", "timm", "transformers"} <= found.keys() <= set(LIBRARIES)
