"""Run a command of amp-track on a simulated device, and stand still within the jobs that are named until let go.

python tests/integration/held_worker.py NAME HOLDS SECONDS TIMES ARGUMENT…, with the repository and its tests on
PYTHONPATH. HOLDS are numbers of jobs with commas between; at each the file NAME.holds.NUMBER is made and
NAME.goes.NUMBER waited for. Every job takes SECONDS. TIMES are fields of `database.Times`: heartbeat=1,grace=3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from simulated import SimulatedRunner
from support import write_without_waiting_for_the_disk

from amp_track import cli
from amp_track.config.job import Job, JobFolder
from amp_track.records.events import Event, Launched
from amp_track.records.result import JobResult
from amp_track.session import session
from amp_track.study import database
from amp_track.workers import interrupts


@dataclass
class HeldJobRunner(SimulatedRunner):
    """A simulated device whose jobs take their time."""

    name: str = ""
    holds: tuple[int, ...] = ()
    seconds: float = 0.0

    def run(self, job: Job, on_event: Callable[[Event], None], *, folder: JobFolder | None = None) -> JobResult:
        number = len(self.jobs)

        def held(event: Event) -> None:
            on_event(event)
            if isinstance(event, Launched):  # the job has its run
                self._hold(number)

        return super().run(job, held, folder=folder)

    def _hold(self, number: int) -> None:
        if number in self.holds:
            Path(f"{self.name}.holds.{number}").touch()
            while not Path(f"{self.name}.goes.{number}").exists():
                interrupts.sleep(0.02)
        interrupts.sleep(self.seconds)


def main(name: str, holds: str, seconds: str, times: str, *arguments: str) -> None:
    write_without_waiting_for_the_disk()
    numbers = tuple(int(number) for number in holds.split(",") if number)
    device = HeldJobRunner(name=name, holds=numbers, seconds=float(seconds))
    session.JobRunner = lambda *_, **__: device  # type: ignore[misc,assignment]
    changed = {name: int(value) for name, _, value in (time.partition("=") for time in times.split(",") if time)}
    database.TIMES = replace(database.TIMES, **changed)
    sys.argv = ["amp-track", *arguments]
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
