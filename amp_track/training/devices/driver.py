"""The version of the NVIDIA driver, which decides with the device how much memory a context and a kernel take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_FILE = Path("/proc/driver/nvidia/version")


def driver_version() -> str:
    """Return the version such as `570.86.15`, or "" where neither the kernel nor nvidia-smi tells it."""
    try:
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", _FILE.read_text())
        if found:
            return found.group(1)
    except OSError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
