"""dtypes: show the dtype of every operation of the model. Writes nothing."""

from __future__ import annotations

from amp_track.config.options import Request
from amp_track.records.dtypes import DtypesReport
from amp_track.records.errors import NothingFits
from amp_track.report import progress
from amp_track.session.run_job import raise_on_crash, why_it_does_not_fit
from amp_track.session.session import Session


def dtypes(request: Request) -> DtypesReport:
    """Trace one forward and backward pass. Raises as `train` does."""
    session = Session.prepare(request, (request.job.precision,), uses_stores=False)
    with progress.working("tracing one forward and backward pass"):
        report = session.runner.dtypes(session.job)
    if isinstance(report, DtypesReport):
        return report
    raise_on_crash(session.job, report)
    raise NothingFits(why_it_does_not_fit(session, session.job, report))
