"""Run the command line: `python -m amp_track` is the same as `amp-track`."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

from amp_track.records.errors import INTERRUPTED_EXIT_CODE, INTERRUPTS


def main() -> NoReturn:
    """Run the console script.

    Until the command begins to work, a signal ends the process at once: there is nothing to be ended, and an exception
    would show a traceback of whatever module is being imported.
    """
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # which `nohup` sets
            signal.signal(number, _end_at_once)
    from amp_track import cli

    try:
        cli.main()
    finally:
        for number in INTERRUPTS:  # all is recorded; Python's own end would turn a signal into another exit code
            signal.signal(number, signal.SIG_IGN)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):  # whoever reads stderr may be gone
        os.write(2, b"amp-track: interrupted\n")
    os._exit(INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
