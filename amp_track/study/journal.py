"""Studies in a journal file of Optuna, for several machines without a database server.

Optuna records no heartbeats in a journal. Here each heartbeat is a line, and every reader measures with its own clock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from filelock import FileLock
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import TrialState

from amp_track.records.errors import BadInput, StoreFailed
from amp_track.study import database, optuna_internals

LOCK_SECONDS = 15
"""Break a lock after this time without a write. A heartbeat that waits for the lock is still in time."""
_POLL_SECONDS = 0.01
_HEARTBEAT = "amp_track:heartbeat"


class _Lock(JournalFileSymlinkLock):
    """Optuna's lock, which its other programs take, too."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file), grace_period=LOCK_SECONDS)
        # Relative: Optuna waits forever for a link whose target is missing (the folder is mounted under another name).
        self._lock_target_file = file.name
        self._file = file

    def acquire(self) -> bool:
        """Wait for the lock, then cut off an incomplete last line: its writer was killed, or the disk was full."""
        super().acquire()
        try:
            with self._file.open("r+b") as journal:
                size = journal.seek(0, os.SEEK_END)
                journal.seek(max(size - 1, 0))
                if journal.read(1) not in (b"", b"\n"):
                    journal.seek(0)
                    journal.truncate(journal.read().rfind(b"\n") + 1)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # another program has broken it
            super().release()


class JournalFile(JournalFileBackend):
    """The file of a journal. Any method may raise StoreFailed or OSError."""

    def __init__(self, file: Path) -> None:
        self._shown, self._file = file, file.absolute()
        super().__init__(str(self._file), lock_obj=_Lock(self._file))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        self._check()
        return super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines, in a lock that the kernel releases with its holder.

        Without it, all search workers that wait for a dead holder's lock break it at once, and the second one breaks
        the lock that the first has just taken (Optuna 5.0.0). No signal interrupts the wait: the lines may be the
        result of a long training.
        """
        mode = stat.S_IMODE(self._check().st_mode)  # everyone who may write to the journal may lock it
        lock = FileLock(f"{self._file}.amp_track.write.lock", mode=mode, fallback_to_soft=False)
        with lock.acquire(poll_interval=_POLL_SECONDS):
            self._check()
            super().append_logs(logs)

    def _check(self) -> os.stat_result:
        """Return the status of the file. Raise StoreFailed if it was deleted, or replaced by a shorter one."""
        with contextlib.suppress(FileNotFoundError):
            status = self._file.stat()
            if status.st_size >= next(reversed(self._log_number_offset.values())):  # the bytes read so far
                return status
        raise StoreFailed(
            f"The journal {self._shown} was deleted or replaced during the command. Restore it, or start over."
        )


class SharedJournal(JournalStorage, optuna_internals.StaleTrialHeartbeat):
    """A journal whose trials have heartbeats.

    Raises:
        BadInput: the file is not a journal of Optuna, or it is damaged.
    """

    def __init__(self, file: Path) -> None:
        self._beats = itertools.count(1)
        self._seen: dict[int, tuple[object, float]] = {}
        """The last heartbeat of each trial, and the time at which this process first saw it."""
        try:
            super().__init__(JournalFile(file))
        except (OSError, StoreFailed):
            raise
        except Exception as error:  # Optuna raises anything for a line that is not its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadInput(
                f"--storage: {file} is no valid journal of Optuna ({reason}). Restore a backup, or use another storage."
            ) from error

    @property
    def cached(self) -> SharedJournal:
        """This storage: it keeps the journal in memory and reads only new lines."""
        return self

    def close(self) -> None:
        """Do nothing: the file is open only during reads and writes."""

    def record_heartbeat(self, trial_id: int) -> None:
        with contextlib.suppress(UpdateFinishedTrialError):
            self.set_trial_system_attr(trial_id, _HEARTBEAT, next(self._beats))

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the trials without a heartbeat for the grace period, or twice that for a live process of this machine.

        Only the clock of this process is used, not those of other machines.
        """
        now, grace, stale = time.monotonic(), database.TIMES.grace, []
        for trial in self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,)):
            trial_id, beat = optuna_internals.id_of(trial), trial.system_attrs.get(_HEARTBEAT)
            known, since = self._seen.get(trial_id, (beat, now))
            self._seen[trial_id] = beat, (since if beat == known else now)
            if now - self._seen[trial_id][1] > grace * (2 if database.is_seen_to_work(trial.user_attrs) else 1):
                stale.append(trial_id)
        return stale

    def get_heartbeat_interval(self) -> int:
        return database.TIMES.heartbeat
