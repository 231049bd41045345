"""Run the command line: `python -m amp_track` is the same as `amp-track`."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from types import FrameType
from typing import NoReturn

from amp_track.records.errors import INTERRUPTED_EXIT_CODE, INTERRUPTS


def main() -> NoReturn:
    """Run the console script.

    During the imports, a signal ends the process at once: nothing needs a cleanup, and an exception would print the
    traceback of an import.
    """
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` sets it
            signal.signal(number, _end_at_once)
    gc.disable()  # imports leave little garbage
    from amp_track import cli

    gc.enable()
    try:
        cli.main()
    finally:
        for number in INTERRUPTS:  # results are stored; a signal during Python's shutdown would change the exit code
            signal.signal(number, signal.SIG_IGN)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):  # the reader of stderr may have closed it
        os.write(2, b"amp-track: interrupted\n")
    os._exit(INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    main()
