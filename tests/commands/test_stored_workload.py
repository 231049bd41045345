"""Which file runs when a store names the workload: it is decided before the file is imported."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from simulated import SimulatedRunner
from support import WORKLOADS, Done, client, request, stores

from amp_track.commands.max_batch import max_batch
from amp_track.commands.worker import work
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.config.options import Request, Trust
from amp_track.records.errors import BadInput
from amp_track.session.checks import StoredWorkload, trusted_workload
from amp_track.targets import source
from amp_track.workers import liveness

pytestmark = pytest.mark.usefixtures("fresh_stores")
Command = Callable[..., Done]
TINY = (WORKLOADS / "tiny.py").read_text()
MARKS = f"{TINY}\nfrom pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
"""A workload that leaves a file when it is imported."""


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload outside the working folder."""
    file = tmp_path_factory.mktemp("outside") / "outside.py"
    file.write_text(MARKS)
    return file


def store_run(reference: str, digest: str | None, imports: tuple[str, ...] = ()) -> str:
    """Store a training that has stopped, as `amp-track train` or anyone who can write to the store would."""
    assert digest is not None
    tags = {
        "amp_track.kind": "train",
        "amp_track.job": Job(workload=reference, precision="fp32", device="cpu", steps=4).as_json(),
        "amp_track.process": json.dumps(liveness.this_process()),
        "amp_track.workload_digest": digest,
        "amp_track.workload_imports": json.dumps(imports),
    }
    run_id: str = client().create_run("0", tags=tags).info.run_id
    client().set_terminated(run_id, "KILLED")
    return run_id


def content_of_stores() -> list[str]:
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in ("mlflow.db", "optuna.db")]


def rejected(amp_track: Command, message: str, *arguments: str) -> None:
    """Check that a command is rejected in one line and writes nothing."""
    before = content_of_stores()
    done = amp_track(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert content_of_stores() == before


def test_a_model_by_name_runs_no_code_of_the_store(outside: Path) -> None:
    def trusted(reference: str) -> str:
        stored = StoredWorkload(
            owner="run", reference=reference, digest="", imports=None, with_workload="", if_changed=""
        )
        return trusted_workload(stored, Request(job=Job()))

    config = outside.with_suffix(".json")
    config.write_text("{}")
    assert trusted("timm:resnet18") == "timm:resnet18"
    with pytest.raises(BadInput, match="outside the working folder"):
        trusted(f"transformers:{config}")
    Path("bert.json").write_text("{}")
    assert trusted("transformers:bert.json") == "transformers:bert.json"


@pytest.mark.parametrize(
    "other", [{"command": ["sh", "-c", "touch ran"]}, {"workload": "amp_track.integrations.transformers:train"}]
)
def test_a_run_names_no_other_code(amp_track: Command, other: dict[str, Any]) -> None:
    Path("mine.py").write_text(MARKS)
    run_id = store_run("mine.py", source.digest(Path("mine.py")))
    job = json.loads(client().get_run(run_id).data.tags["amp_track.job"]) | other
    client().set_tag(run_id, "amp_track.job", json.dumps(job))
    for given in ([], ["mine.py"]):
        rejected(amp_track, "expected the run of a training", "train", *given, "--resume", run_id)
    assert not Path("ran").exists()


@pytest.mark.parametrize("how", ["an absolute path", "a path with ..", "a link", "a module"])
def test_a_file_outside_the_working_folder_needs_trust(
    amp_track: Command, outside: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = str(outside)
    if how == "a path with ..":
        reference = f"../{outside.parent.name}/outside.py"
    elif how == "a link":
        Path("here.py").symlink_to(outside)
        reference = "here.py"
    elif how == "a module":
        monkeypatch.syspath_prepend(outside.parent)
        reference = "outside:Tiny"
    run_id = store_run(reference, source.digest(outside))
    rejected(amp_track, "outside the working folder", "train", "--resume", run_id)
    assert not outside.with_suffix(".ran").exists()


def test_nothing_beside_a_link_into_the_working_folder_is_imported(amp_track: Command, outside: Path) -> None:
    """Whoever made the link chose what lies beside it, and would bring code along."""
    Path("mine.py").write_text(f"{TINY}\nimport outside\n")
    link = outside.with_name("link.py")
    link.symlink_to(Path("mine.py").resolve())
    done = amp_track("train", "--resume", store_run(str(link), source.digest(Path("mine.py"))))
    assert done.returncode == 2
    assert "No module named 'outside'" in done.stderr
    assert not outside.with_suffix(".ran").exists()


@pytest.mark.parametrize("imports", ["a\0.py", "x" * 5000 + ".py", "/proc/self/environ", "no.py"])
def test_odd_names_of_imported_files_are_another_version(amp_track: Command, imports: str) -> None:
    Path("mine.py").write_text(MARKS)
    run_id = store_run("mine.py", source.digest(Path("mine.py")), (imports,))
    rejected(amp_track, "another version of mine.py", "train", "--resume", run_id)
    assert not Path("mine.ran").exists()


@pytest.mark.parametrize("is_given", [False, True])
def test_a_trusted_file_outside_the_working_folder_runs(amp_track: Command, outside: Path, is_given: bool) -> None:
    run_id = store_run(str(outside), source.digest(outside))
    done = amp_track("train", str(outside) if is_given else "--trust-store", "--resume", run_id)
    assert "has no checkpoint" in done.stderr
    assert outside.with_suffix(".ran").exists()


@pytest.mark.parametrize("changed", ["mine.py", "helper_of_mine.py"])
def test_a_changed_file_is_not_imported_unless_allowed(
    amp_track: Command, inspected: Callable[[Job], Inspection], changed: str
) -> None:
    Path("helper_of_mine.py").write_text("")
    Path("mine.py").write_text(f"{TINY}\nimport helper_of_mine\n")
    known = inspected(Job(workload="mine.py", device="cpu"))
    assert known.workload_imports == ("helper_of_mine.py",)
    run_id = store_run("mine.py", known.workload_digest, known.workload_imports)
    assert "has no checkpoint" in amp_track("train", "--resume", run_id).stderr, "unchanged"

    Path(changed).write_text(f"{Path(changed).read_text()}\nfrom pathlib import Path\nPath('ran').touch()\n")
    rejected(amp_track, "created with another version of mine.py", "train", "--resume", run_id)
    assert not Path("ran").exists()
    allowed = amp_track("train", "--resume", run_id, "--allow-changed-workload")
    assert "has no checkpoint" in allowed.stderr
    assert Path("ran").exists()


def test_a_file_that_only_the_import_finds_is_compared_after_it(
    amp_track: Command, inspected: Callable[[Job], Inspection]
) -> None:
    helper = Path("new_helper.py")
    Path("mine.py").write_text(f"{TINY}\nimport pathlib\nif pathlib.Path('{helper}').exists(): import new_helper\n")
    known = inspected(Job(workload="mine.py", device="cpu"))
    helper.write_text("WIDTH = 1")
    done = amp_track("train", "--resume", store_run("mine.py", known.workload_digest, known.workload_imports))
    assert done.returncode == 2
    assert "created with another version of mine.py" in done.stderr


@pytest.fixture
def study(fresh_stores: None) -> None:
    """The study `mine` of the workload mine.py."""
    Path("mine.py").write_text(TINY)
    asked = request(Job(workload="mine.py"), precisions=("fp32",), study="mine", max_batch_size=8)
    max_batch(asked, runner=SimulatedRunner())


@pytest.mark.usefixtures("study")
class TestWorkers:
    def test_a_study_names_no_file_outside_the_working_folder(self, amp_track: Command, outside: Path) -> None:
        """Anyone who can write to the store can change the recorded command."""
        stored = optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"])
        command = json.loads(stored.user_attrs["command"])
        command["job"]["workload"] = str(outside)
        command["inspection"]["workload_digest"] = source.digest(outside)
        stored.set_user_attr("command", json.dumps(command))
        for more in ([], ["--workers", "2"]):
            rejected(amp_track, "outside the working folder", "worker", "mine", *more)
        assert not outside.with_suffix(".ran").exists()
        assert not Path("amp_track-workers").exists()
        trusting = dataclasses.replace(request(Job(), study="mine"), trust=Trust(trust_store=True))
        with pytest.raises(BadInput, match="workload source"):  # the study itself is of another file
            work(trusting, runner=SimulatedRunner())

    def test_a_study_takes_no_worker_with_another_version_of_its_workload(self, amp_track: Command) -> None:
        Path("mine.py").write_text(MARKS)
        for more in ([], ["mine.py"], ["--trust-store"]):
            rejected(amp_track, "created with another version of mine.py", "worker", "mine", *more)
        assert not Path("mine.ran").exists()

    def test_a_worker_that_is_given_the_file_leaves_the_one_on_record(self) -> None:
        moved = str(Path("mine.py").rename("moved.py"))
        work(request(Job(workload=moved), study="mine", given=frozenset({"workload"})), runner=SimulatedRunner())
        Path("moved.py").rename("mine.py")
        work(request(Job(), study="mine"), runner=SimulatedRunner())
