"""What the processes that benchmarks start and measure have in common."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    # The repository first, and then what this process has: packages may lie beside a bare tree.
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
