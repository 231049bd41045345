"""Run the stages: each part in a process of its own with a time limit, each row kept as it comes."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.part import one_line, tail
from benchmarks.gpu.parts import Machine, Part, Planned, Request
from benchmarks.gpu.rows import Row, RowFile, Status
from benchmarks.gpu.stages import LIMIT_MINUTES, Stage
from benchmarks.processes import ENVIRONMENT

Clock = Callable[[], float]
Say = Callable[[str], None]
_TICK_SECONDS = 0.5


@dataclass(frozen=True)
class Deadlines:
    """When to stop, in seconds of a clock.

    Attributes:
        soft: from here on no new row is started: the limit of the stage.
        hard: here the row in flight is given up, too: the limit of the programme.
    """

    soft: float
    hard: float

    @staticmethod
    def of_stage(now: float, end: float) -> Deadlines:
        return Deadlines(soft=min(now + LIMIT_MINUTES * 60, end), hard=end)


@dataclass
class Report:
    """What came of one stage in this run. Rows that were there before are `kept`."""

    stage: str
    kept: int = 0
    made: list[Row] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, status: Status) -> int:
        return sum(row.status is status for row in self.made)

    @property
    def is_complete(self) -> bool:
        return not self.left and not self.count(Status.FAILED)


class StageRun:
    """One stage on one machine."""

    def __init__(
        self,
        stage: Stage,
        machine: Machine,
        folder: Path,
        deadlines: Deadlines,
        *,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._stage = stage
        self._machine = machine
        self._file = RowFile(folder / f"{stage.name}.jsonl")
        self._deadlines = deadlines
        self._clock = clock
        self._say = say
        self._attempted: set[str] = set()
        self.report = Report(stage.name)

    def run(self) -> Report:
        """Measure what is not there. Each row is tried once."""
        started = self._clock()
        kept = self._file.read()
        self.report.kept = sum(row.is_done(self._machine.provenance) for row in kept.values())
        while (next_part := self._next_part()) is not None:
            part, pending = next_part
            if self._clock() >= self._deadlines.soft:
                break
            if not self._write_without_measuring(pending) and self._measure(part, pending):
                break
        self.report.left = [planned.key for _, pending in self._pending_parts() for planned in pending]
        self.report.seconds = self._clock() - started
        return self.report

    def _pending_parts(self) -> list[tuple[Part, list[Planned]]]:
        """The parts with rows that are neither there nor were tried in this run."""
        kept = {key: row for key, row in self._file.read().items() if row.is_done(self._machine.provenance)}
        parts = []
        for part in self._stage.load().parts(self._machine, kept):
            pending = [row for row in part.rows if row.key not in kept and row.key not in self._attempted]
            if pending:
                parts.append((part, pending))
        return parts

    def _next_part(self) -> tuple[Part, list[Planned]] | None:
        return next(iter(self._pending_parts()), None)

    def _write_without_measuring(self, pending: Sequence[Planned]) -> bool:
        """Write the rows that cannot be measured here; return whether there were any."""
        found = False
        for row in pending:
            if reason := row.impossible or row.missing:
                status = Status.IMPOSSIBLE if row.impossible else Status.MISSING
                self._keep(Row(key=row.key, status=status, reason=reason))
                found = True
        return found

    def _measure(self, part: Part, pending: Sequence[Planned]) -> bool:
        """Measure in a process of its own; return whether time is up. At least one row is tried, or time is up."""
        limits = {row.key: row.limit_seconds for row in pending}
        request = Request(
            module=self._stage.module, part=part.name, keys=tuple(limits), device=self._machine.device,
            kind=self._machine.kind, tiny=self._machine.tiny,
        )  # fmt: skip
        in_flight, attempted_before, said = "", set(self._attempted), ""
        with PartProcess(request) as process:
            limit = self._clock() + part.start_limit_seconds
            why = ""
            while not why:
                message = process.next_message(_TICK_SECONDS)
                now = self._clock()
                match message:
                    case {"started": str(key)}:
                        in_flight, limit = key, now + limits.get(key, part.start_limit_seconds)
                        if now >= self._deadlines.soft:
                            return True
                    case {"row": dict(found)}:
                        self._keep(Row.from_line(json.dumps(found)))
                        in_flight, limit = "", now + part.start_limit_seconds
                    case {"ended": int(code)}:
                        why, said = f"its process ended with code {code}", process.stderr()
                if not why and now >= self._deadlines.hard:
                    return True
                if not why and now >= limit:
                    why = f"gave up after {limits.get(in_flight, part.start_limit_seconds):g} s"
                    said = process.stderr()
        if not in_flight and self._attempted == attempted_before:
            in_flight = pending[0].key  # nothing came of it at all
        if in_flight:
            why = one_line(": ".join([why, *said.strip().splitlines()[-1:]]))
            self._keep(Row(key=in_flight, status=Status.FAILED, reason=why, values={"stderr": tail(said)}))
        return False

    def _keep(self, row: Row) -> None:
        self._attempted.add(row.key)
        provenance = {**self._machine.provenance, "date": datetime.date.today().isoformat()}
        row = dataclasses.replace(row, provenance=provenance)
        self._file.append(row)
        self.report.made.append(row)
        because = f": {row.reason[:160]}" if row.reason else ""
        self._say(f"{self._stage.name:<11}{row.key}  {row.status} ({row.seconds:.1f} s){because}")


class PartProcess:
    """The process of one part, in a process group and a folder of its own. Nothing of it outlives the block."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> PartProcess:
        self._folder = tempfile.TemporaryDirectory(prefix="amp_track-gpu-", ignore_cleanup_errors=True)
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.part"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, cwd=self._folder.name,
            env=os.environ | ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(self._request)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died already, and its end is read like any other
        return self

    def next_message(self, seconds: float) -> dict[str, Any] | None:
        """Return what it printed next, or `{"ended": code}`; None if nothing came for so long."""
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            return None

    def stderr(self) -> str:
        """Return what it wrote to stderr so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._messages.put(json.loads(line))
        self._messages.put({"ended": self._process.wait()})

    def __exit__(self, *exception: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the group has ended
        self._process.wait()
        self._reader.join(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self._folder.cleanup()


def run(
    stages: Sequence[Stage],
    machine: Machine,
    folder: Path,
    *,
    minutes: float | None,
    clock: Clock = time.monotonic,
    say: Say,
) -> list[Report]:
    """Run stages in their order, and stop after so many minutes. What each left is in its report."""
    end = clock() + (minutes * 60 if minutes is not None else float("inf"))
    reports = []
    for stage in stages:
        deadlines = Deadlines.of_stage(clock(), end)
        say(f"{stage.name}: {stage.purpose}")
        reports.append(StageRun(stage, machine, folder, deadlines, clock=clock, say=say).run())
    return reports
