"""The device that is measured, its driver and the versions: asked in a process of its own, which imports torch.

    python -m benchmarks.gpu.machine DEVICE

prints one JSON object; or one line on stderr, with exit code 2, where there is no such device.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from typing import Any

import amp_track
from amp_track.records.errors import BadInput
from benchmarks.gpu.parts import PRECISIONS, ROOT, Machine
from benchmarks.processes import ENVIRONMENT
from benchmarks.provenance import versions

_LIMIT_SECONDS = 300
_PACKAGES = ("torchvision", "mlflow", "optuna", "lightning", "accelerate", "pytest", "hypothesis")


def describe(device: str, *, tiny: bool) -> Machine:
    """Return what a fresh process finds. Raises BadInput where there is no such device."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.machine", device]
    try:
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=_LIMIT_SECONDS, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"--device: got {device}, which did not answer for {_LIMIT_SECONDS} s, expected one that does; see "
            "whether `python -c 'import torch; torch.zeros(1).cuda()'` ends"
        ) from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode == BadInput.exit_code:
            raise BadInput(said)
        if "ModuleNotFoundError" in said:
            raise BadInput(
                f"python: got {sys.executable} ({said}), expected one with the packages of pyproject.toml; "
                "name another: make gpu PYTHON=…"
            )
        raise BadInput(f"--device: got {device}, expected one that torch can open ({said}); try --device cpu")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    found["provenance"]["tiny"] = tiny
    return Machine(device=found["kind"] if device == "auto" else device, tiny=tiny, **found)


def folder_of(machine: Machine) -> str:
    """Return the name of its folder of rows: `nvidia-h200`; small sizes have one of their own."""
    name = re.sub(r"[^a-z0-9]+", "-", str(machine.provenance["device"]).lower()).strip("-") or machine.kind
    return f"{name}-tiny" if machine.tiny else name


def source_digest() -> str:
    """Return eight hexadecimal digits that identify the code of the package, which a bare tree has no commit for."""
    content = hashlib.sha256()
    for file in sorted((ROOT / "amp_track").rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:8]


def _found(name: str) -> dict[str, Any]:
    import torch

    from amp_track.training.amp.precision import support
    from amp_track.training.devices.open import open_device

    device = open_device(name)
    supports = {precision: support(precision, device.torch_device) for precision in PRECISIONS}
    return {
        "kind": device.kind,
        "precisions": {name: "" if found.supported else found.reason for name, found in supports.items()},
        "provenance": {
            "date": datetime.date.today().isoformat(),
            "device": device.name,
            "driver": device.hardware().driver or None,
            "cores": os.cpu_count(),
            "memory_bytes": device.capacity_bytes(),
            "platform": f"{platform.system()} {platform.release()}",
            "source": source_digest(),
            "versions": {
                "amp_track": amp_track.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
                **versions(*_PACKAGES),
            },
        },
    }


def main() -> None:
    try:
        print(json.dumps(_found(sys.argv[1])))
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
