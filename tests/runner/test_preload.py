"""The imports of the fork server: they change no workload, and a missing module fails each job."""

import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import DIGITS, FAULTS, ROOT


def run(
    *arguments: str | Path, expected_exit_code: int = 0, python: str | Path = sys.executable, **settings: Any
) -> subprocess.CompletedProcess[str]:
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)
    assert done.returncode == expected_exit_code, done.stderr
    return done


def with_folder(folder: Path, **variables: str) -> dict[str, str]:
    """Return an environment in which Python also finds the modules of a folder."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])} | variables


def install(folder: Path, name: str, source: str) -> Path:
    """Install a package in a folder and return its `site-packages`."""
    package = folder / "site-packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return package.parent


def inspection(workload: str | Path) -> str:
    """Return a program that inspects a workload and prints its name."""
    return f"""
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
print(JobRunner({str(workload)!r}).inspect(Job(workload={str(workload)!r})).workload_name)
"""


_RENAMED = """
import sys
if "forkserver import main" in str(sys.orig_argv):
    from amp_track.runner import fork_server
    fork_server.REQUIRED_MODULES = ("amp_track.runner.renamed_since",)
"""


def test_a_wrong_name_fails_the_job(tmp_path: Path) -> None:
    """multiprocessing ignores an ImportError in the fork server."""
    (tmp_path / "sitecustomize.py").write_text(_RENAMED)
    done = run("-c", inspection(FAULTS), expected_exit_code=1, env=with_folder(tmp_path))
    assert done.stdout == ""
    assert "AmpTrackError: The fork server cannot import a module that every job needs" in done.stderr
    assert "ModuleNotFoundError: No module named 'amp_track.runner.renamed_since'" in done.stderr


_TELLS_WHAT_IS_IMPORTED = """
import sys
print("torch._dynamo" in sys.modules, file=sys.stderr)
"""
_INSPECTS_AND_RUNS = """
import time
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
runner = JobRunner({workload!r})
runner.start(inspects=True)
job = Job(workload={workload!r}, precision="fp32", epochs=1, device="cpu")
job = resolve(job, runner.inspect(job))
time.sleep(0.1)  # the server looks every 10 ms whether the inspection has ended
print(*(runner.run(job).status for _ in range(2)))
"""


@pytest.mark.nightly
def test_only_the_inspection_starts_before_the_imports_of_a_step(tmp_path: Path) -> None:
    workload = tmp_path / "workload.py"
    workload.write_text(Path(FAULTS).read_text() + _TELLS_WHAT_IS_IMPORTED)
    done = run("-c", _INSPECTS_AND_RUNS.format(workload=str(workload)))
    assert done.stdout == "fits fits\n"
    assert done.stderr.split() == ["False", "True", "True"]


_KILLED = f"""
import os, signal
from amp_track.runner.runner import JobRunner
signal.signal(signal.SIGINT, lambda *_: None)
JobRunner({FAULTS!r}).start()
os.killpg(0, signal.SIGINT)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly
def test_a_server_whose_command_was_killed_ends_without_a_word() -> None:
    """Ctrl-C during the start of its Python would print a traceback."""
    done = run("-c", _KILLED, expected_exit_code=-signal.SIGKILL, start_new_session=True)
    assert done.stderr == "", "which lasts until the server has closed stderr, too"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["random", "torch", "numpy"])
def test_no_file_of_the_working_folder_takes_the_place_of_a_package(tmp_path: Path, name: str) -> None:
    """Python searches there first. A `torch.py` made budgets wrong by the memory of the real one, and the server
    imported a `random.py` before it could prevent that."""
    program, folder = tmp_path / "bin" / "program.py", tmp_path / "working"
    for file in (program, folder / f"{name}.py"):
        file.parent.mkdir()
        file.write_text("raise SystemExit('the wrong one')")
    program.write_text(inspection(FAULTS))
    assert run(program, cwd=folder).stdout == "Faults\n"


@pytest.mark.nightly
def test_a_job_sees_nothing_of_how_the_fork_server_was_started(tmp_path: Path) -> None:
    """Programs that a job starts have the usual module search path."""
    workload, program = tmp_path / "workload.py", tmp_path / "program.py"
    workload.write_text(Path(FAULTS).read_text() + "\nassert 'PYTHONSAFEPATH' not in os.environ\n")
    program.write_text(inspection(workload))
    assert run(program).stdout == "Faults\n"


_TOUCHES_CUDA = """
import torch
torch.cuda._is_in_bad_fork = lambda: True  # the value after a fork from a process with CUDA
"""


def runs_of_a_workload_that_imports(package_source: str, folder: Path, *, device: str) -> tuple[list[str], list[str]]:
    """Return the statuses of two jobs whose workload imports a package, and the log lines about CUDA."""
    packages = install(folder, "touches_cuda", package_source)
    workload, program = folder / "workload.py", folder / "program.py"
    workload.write_text(Path(FAULTS).read_text().replace("import torch\n", "import torch\nimport touches_cuda\n", 1))
    program.write_text(
        f"""
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
box = JobRunner({str(workload)!r})
job = Job(workload={str(workload)!r}, precision="fp32", epochs=1, device={device!r})
job = resolve(job, box.inspect(job))
print(box.run(job).status, box.run(job).status)
"""
    )
    done = run(program, cwd=folder, env=with_folder(packages))
    return done.stdout.split(), [line for line in done.stderr.splitlines() if "initializes CUDA" in line]


@pytest.mark.nightly
def test_a_package_that_touches_cuda_is_imported_by_the_jobs_instead(tmp_path: Path) -> None:
    statuses, (line,) = runs_of_a_workload_that_imports(_TOUCHES_CUDA, tmp_path, device="auto")
    assert statuses == ["fits", "fits"]
    assert line.startswith("import touches_cuda initializes CUDA")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source", "times_said"),
    [("import torch\ntorch.zeros(1, device='cuda')\n", 1), ("import torch\ntorch.cuda.is_available()\n", 0)],
)
def test_a_package_that_really_does_ends_no_job(tmp_path: Path, cuda: object, source: str, times_said: int) -> None:
    statuses, lines = runs_of_a_workload_that_imports(source, tmp_path, device="cuda")
    assert statuses == ["fits", "fits"]
    assert len(lines) == times_said


_SERVER_OF_ITS_OWN = f"""
import multiprocessing, os
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
if __name__ == "__main__":  # for its own process
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=print, args=("before",))
    process.start()
    process.join()
    before = dict(os.environ)
    print(JobRunner({FAULTS!r}).inspect(Job(workload={FAULTS!r})).workload_name)
    print(os.environ == before)
"""


@pytest.mark.nightly
def test_a_program_that_has_a_fork_server_already_is_served_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_SERVER_OF_ITS_OWN)
    assert run("program.py", cwd=tmp_path).stdout.split() == ["before", "Faults", "True"]


_SAYS_WHAT_IT_SAW = """
from dataclasses import dataclass
from typing import ClassVar
from amp_track import Metric, Workload
from torch import nn
from torch.utils.data import TensorDataset

@dataclass(frozen=True)
class Says(Workload):
    metric: ClassVar[Metric] = Metric(f"{reads_environment.SEEN} - {torch.get_num_threads()} threads")

    def model(self): return nn.Linear(1, 1)
    def train_data(self): return TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))
    eval_data = train_data
"""
_TELL = """
import logging
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
logging.basicConfig(format="%(message)s")
if __name__ == "__main__":
    for workload in {workloads}:
        print(JobRunner(workload).inspect(Job(workload=workload, device="cpu")).metric_name)
"""


@pytest.mark.slow
def test_what_a_workload_sets_before_an_import_is_seen_by_that_import(tmp_path: Path) -> None:
    """Also after another workload of the same program that begins with that import."""
    packages = install(tmp_path, "reads_environment", "import os\nSEEN = os.environ.get('READ_AT_IMPORT')\n")
    sets = "import os\nos.environ['READ_AT_IMPORT'] = 'set'\nos.environ['OMP_NUM_THREADS'] = '2'\n"
    tops = [
        f"import torch\nimport reads_environment\n{sets}",
        f"import torch\n{sets}import reads_environment\n",
        f"{sets}import reads_environment\nimport torch\n",
    ]
    files = [tmp_path / f"workload{number}.py" for number in range(len(tops))]
    for file, top in zip(files, tops, strict=True):
        file.write_text(top + _SAYS_WHAT_IT_SAW)
    (tmp_path / "program.py").write_text(_TELL.format(workloads=list(map(str, files))))
    done = run("program.py", cwd=tmp_path, env=with_folder(packages, OMP_NUM_THREADS="1"))
    assert done.stdout.splitlines() == ["None - 1 threads", "set - 1 threads", "set - 2 threads"]
    (line,) = done.stderr.splitlines()
    assert "workload2.py, line 2 runs before torch is imported, so each job imports torch itself, which took" in line


@pytest.mark.slow
def test_an_import_that_hangs_in_the_fork_server_is_left_to_the_jobs(tmp_path: Path) -> None:
    hangs = "import multiprocessing\nSEEN = 'seen'\nwhile multiprocessing.parent_process() is None: pass\n"
    packages = install(tmp_path, "reads_environment", hangs)
    (tmp_path / "workload.py").write_text("import torch\nimport reads_environment\n" + _SAYS_WHAT_IT_SAW)
    limit = "from amp_track.runner import job_processes\njob_processes.IMPORT_SECONDS = 2.0\n"
    (tmp_path / "program.py").write_text(limit + _TELL.format(workloads=[str(tmp_path / "workload.py")]))
    done = run("program.py", cwd=tmp_path, env=with_folder(packages, OMP_NUM_THREADS="1"))
    assert done.stdout.splitlines() == ["seen - 1 threads"]
    (line,) = done.stderr.splitlines()
    assert line == "import reads_environment: it did not finish within 2 s, so each job runs it."


def test_an_installed_copy_finds_the_packages_beside_it(tmp_path: Path) -> None:
    """Python lists `site-packages` once, at its place in PYTHONPATH. When that was taken off the path of the server,
    it found no torch, and each job imported it, in seconds."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    shutil.copytree(ROOT / "amp_track", packages / "amp_track", ignore=shutil.ignore_patterns("__pycache__"))
    later = install(tmp_path / "later", "beside", "raise SystemExit('the wrong one')")
    (packages / "others.pth").write_text(f"{later}\n{Path(numpy.__file__).parents[1]}\n")
    (packages / "beside.py").write_text("import sys\nprint('imported', file=sys.stderr)\n")
    workload = tmp_path / "workload.py"
    workload.write_text(Path(FAULTS).read_text().replace("annotations\n", "annotations\nimport beside\n", 1))
    program = _INSPECTS_AND_RUNS.format(workload=str(workload))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run("-c", program, python=tmp_path / "venv" / "bin" / "python", env=environment)
    assert done.stdout == "fits fits\n"
    assert done.stderr.count("imported") == 1, "in the fork server"


@pytest.mark.nightly
def test_jobs_run_the_package_of_their_command_and_not_an_installed_copy(tmp_path: Path) -> None:
    """As under `mlflow run`, which starts the command in the project folder and has installed a copy of the project."""
    installed = tmp_path / "site-packages"
    shutil.copytree(ROOT / "amp_track", installed / "amp_track", ignore=shutil.ignore_patterns("__pycache__"))
    job_process = installed / "amp_track" / "runner" / "job_main.py"
    job_process.write_text(job_process.read_text() + '\nprint("of the installed copy")\n')
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = run(
        "-m", "amp_track", "dtypes", FAULTS, "--precision", "fp32", cwd=ROOT,
        env=environment | {"PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert "of the installed copy" not in done.stderr + done.stdout


@pytest.mark.slow
def test_a_server_whose_folder_was_deleted_is_replaced(tmp_path: Path) -> None:
    script = f"""
import os, shutil
from amp_track.config.job import Job
from amp_track.runner.runner import JobRunner
if __name__ == "__main__":
    runner = JobRunner({DIGITS!r})
    for name in ("first", "second"):
        os.mkdir(name)
        os.chdir(name)
        if name == "first":
            runner.start(inspects=True)  # which imports torch for a second
            shutil.rmtree(os.getcwd())
            os.chdir({str(tmp_path)!r})
    print(runner.inspect(Job(workload={DIGITS!r}, device="cpu")).workload_name)
"""
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Digits\n"), done.stderr
    assert "Traceback" not in done.stderr
