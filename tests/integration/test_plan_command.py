"""`amp-track plan` as a user meets it."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support import DIGITS, ROOT, Done

Command = Callable[..., Done]
WORKLOADS = ROOT / "tests" / "memory_plan" / "workloads.py"
PRECISIONS = ["fp32", "tf32", "amp", "bf16"]


@pytest.mark.slow
def test_a_max_batch_is_where_one_more_sample_needs_more(amp_track: Command) -> None:
    def run(*arguments: str) -> dict:
        return json.loads(amp_track("plan", DIGITS, "--precision", "amp", "--json", *arguments).stdout)

    max_batch = run("--memory-budget", "48MiB")["budgets"]["48MiB"]["amp"]
    needs = [
        run("--batch-size", str(size))["precisions"]["amp"]["peak_reserved_bytes"]
        for size in (max_batch["max_batch"], max_batch["max_batch"] + 1)
    ]
    assert needs[0] == max_batch["peak_reserved_bytes"] <= 48 * 2**20 < needs[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--memory-budget", "lots"],
            "--memory-budget: got 'lots', expected a size of 1MiB or more with its unit, such as 6GiB",
        ),
        (["--gpu", "RTX 4091"], "--gpu: got 'RTX 4091', expected a GPU such as GeForce RTX 4090, "),
        (["--tracking-uri", "sqlite:///x.db"], "--tracking-uri requires --track"),
        (["--vary", "depht=2,3"], "--vary depht: got '2', expected an option of "),
        (["--vary", "depth=2,two"], "--vary depth: got 'two', expected int"),
        (["--vary", "depth"], "--vary: got 'depth', expected option=value,value,…"),
        (["--frozen", "--vary", "frozen=True"], "frozen is given by both --vary and --frozen. Omit one of the two."),
        (["--image-size", "64", "--set", "image_size=32"], "image_size is given by both --image-size and --set."),
        (["--sequence-length", "0"], "--sequence-length: got '0', expected a whole number of 1 or more"),
        (["--csv", "a.csv"], "--csv requires --memory-budget or --gpu."),
        (["--csv", "no/a.csv", "--gpu", "T4"], "--csv: no/a.csv cannot be written."),
        (["--check", "no/a.json", "--update"], "--check: no/a.json cannot be written."),
        (["--check", f"{'a' * 300}.json"], f"--check: {'a' * 300}.json cannot be read: "),
        (["--check", "a.json", "--vary", "width=8"], "--vary is not supported with --check or --against"),
        (["--optimizer", "sgd"], "--optimizer is not for "),
        (["--gpu", "T4", "--precision", "bf16"], "--precision: bf16 needs compute capability 8.0 or newer; Tesla T4 "),
        (["timm:test_resnet", "--what-if"], "--what-if requires a single target."),
        (["--update"], "--update requires --check."),
        (["--check", "a.json", "--against", "main"], "--check and --against exclude each other."),
        (["--check", __file__], f"{__file__} is not a memory plan of this version of amp_track: "),
        (["--tolerance", "5%"], "--tolerance requires --check or --against."),
        (["--tolerance", "0.1"], "--tolerance: got '0.1', expected a percentage above 0, such as 1%"),
        (["--effective-batch-size", "64"], "--effective-batch-size requires --memory-budget or --gpu"),
    ],
)
def test_bad_input_is_one_line(amp_track: Command, arguments: list[str], message: str, tmp_path: Path) -> None:
    precision = () if "--precision" in arguments else ("--precision", "fp32")
    done = amp_track("plan", str(WORKLOADS), *precision, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"amp-track: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("act", "line", "why"),
    [
        ("numpy", "return x + float(x.detach().numpy().mean())", ".numpy() is not supported"),
        pytest.param("mask", "return x + x[x > 0].sum()", "DynamicOutputShapeException", marks=pytest.mark.nightly),
        (
            "built-with-item",
            "return Layers(self.width, self.depth, str(nn.Linear(3, 3).weight.mean().item()))",
            ".item() in the model's constructor",
        ),
    ],
)
def test_a_step_that_needs_values_is_told_its_line(amp_track: Command, act: str, line: str, why: str) -> None:
    done = amp_track("plan", str(WORKLOADS), "--set", f"act={act}", "--memory-budget", "1GiB")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.match(rf"amp-track: \S*workloads.py:\d+ \({re.escape(line)}\): ", done.stderr)
    assert why in done.stderr
    assert "measure with amp-track max-batch" in done.stderr


def test_a_recurrent_layer_is_rejected_because_its_memory_is_unknown(amp_track: Command) -> None:
    done = amp_track("plan", str(WORKLOADS), "--set", "act=recurrent", "--memory-budget", "1GiB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("amp-track: recurrent: cuDNN keeps an unknown amount of memory of a recurrent layer ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_of_several_targets_those_that_can_be_planned_are_shown(amp_track: Command) -> None:
    done = amp_track("plan", "timm:test_resnet", "timm:sequencer2d_s", "--precision", "amp", "--image-size", "64")
    assert done.returncode == 0, done.stderr
    assert "predicted memory at batch" in done.stdout
    assert "timm:sequencer2d_s cannot be planned: " in done.stdout
    assert "amp-track max-batch timm:sequencer2d_s --synthetic" in done.stdout
    done = amp_track("plan", "timm:test_resnet", "timm:test_resnt", "--precision", "amp")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_step_that_fails_is_told_its_line_with_its_traceback(amp_track: Command) -> None:
    done = amp_track("plan", str(WORKLOADS), "--set", "act=wrong", "--memory-budget", "1GiB")
    assert done.returncode == 2
    *_, last = done.stderr.splitlines()
    assert re.match(r"amp-track: \S*workloads.py:\d+ \(return x @ x\): ", last)


@pytest.mark.slow
def test_flags_of_a_model_by_name_set_its_options(amp_track: Command) -> None:
    def planned(*arguments: str) -> dict:
        done = amp_track("plan", "timm:test_vit", "--precision", "fp32", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    flags = planned("--optimizer", "sgd", "--image-size", "64", "--frozen", "--checkpoint-activations")
    names = ["optimizer_name=sgd", "image_size=64", "frozen=True", "checkpoint_activations=True"]
    options = planned(*(word for name in names for word in ("--set", name)))
    assert flags["precisions"] == options["precisions"] != planned()["precisions"]


@pytest.mark.slow
def test_an_option_that_a_model_by_name_lacks_names_its_flag(amp_track: Command) -> None:
    done = amp_track("plan", "timm:pit_ti_224", "--checkpoint-activations")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "amp-track: --checkpoint-activations: timm:pit_ti_224 does not support it\n"
    done = amp_track("plan", "timm:pit_ti_224", "--sequence-length", "8")
    problem = "--sequence-length is not for timm:pit_ti_224: it is for models of texts by name"
    assert (done.returncode, done.stderr) == (2, f"amp-track: {problem} (transformers:CONFIG.json).\n")


@pytest.mark.slow
def test_a_model_by_name_is_measured_on_synthetic_batches(amp_track: Command, tmp_path: Path) -> None:
    small = ["timm:test_resnet", "--memory-budget", "1GiB", "--precision", "fp32", "--set", "image_size=32"]
    small += ["--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]  # MLflow keeps a default one for the whole process
    done = amp_track("max-batch", *small, "--max-batch-size", "2", "--confirm-steps", "0")
    assert (done.returncode, done.stderr) == (2, "amp-track: timm:test_resnet has no data. Add --synthetic.\n")
    assert list(tmp_path.iterdir()) == []
    done = amp_track("max-batch", *small, "--max-batch-size", "2", "--confirm-steps", "0", "--synthetic", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["precisions"]["fp32"]["max_batch"] == 2


@pytest.mark.slow
def test_an_error_of_a_model_by_name_is_explained(amp_track: Command, tmp_path: Path) -> None:
    (tmp_path / "bert.json").write_text(
        '{"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}'
    )
    done = amp_track(
        "explain", "transformers:bert.json", "--memory-budget", "64MiB", "--batch-size", "999", "--precision", "fp32"
    )
    assert done.returncode == 0, done.stderr
    assert "bert.encoder.layer.0" in done.stdout


@pytest.mark.nightly
def test_a_precision_that_is_possible_nowhere_else_is_planned_on_a_cpu(amp_track: Command) -> None:
    done = amp_track("plan", DIGITS, "--precision", "tf32,fp32", "--gpu", "A100 40GB", "--json")
    planned = json.loads(done.stdout)["budgets"]["NVIDIA A100 40GB"]
    assert planned["tf32"]["max_batch"] > 1000
    assert planned["fp32"]["samples_per_s_rough_estimate"] > 1000
    assert planned["tf32"]["samples_per_s_rough_estimate"] is None


@pytest.mark.nightly
def test_several_options_are_planned_side_by_side(amp_track: Command) -> None:
    done = amp_track(
        "plan", str(WORKLOADS), "--vary", "width=64,128", "--vary", "depth=2,02", "--vary", "depth=4", "--json",
        "--precision", "fp32,bf16",
        "--memory-budget", "64MiB", "--effective-batch-size", "1024",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    changes = [{"width": "64", "depth": "4"}, {"width": "128", "depth": "2"}, {"width": "128", "depth": "4"}]
    assert plan["changes"] == {"width": "64", "depth": "2"}
    assert [variant["changes"] for variant in plan["variants"]] == changes
    assert [variant["precisions"]["fp32"]["relative_work"] > 1 for variant in plan["variants"]] == [True] * 3
    assert plan["precisions"]["fp32"]["relative_work"] == 1
    assert plan["precisions"]["fp32"]["half_precision_work"] == 0
    assert plan["precisions"]["bf16"]["half_precision_work"] == 1
    max_batch = plan["budgets"]["64MiB"]["fp32"]
    assert max_batch["micro_batch"] * max_batch["grad_accum"] == 1024
    ways = plan["ways"]["64MiB"]
    assert len(ways) == 8
    assert ways[0]["changes"] == {"width": "64", "depth": "2"}
    assert ways[0]["precision"] == "bf16"
    assert max(way["peak_reserved_bytes"] for way in ways) <= 64 * 2**20


@pytest.mark.nightly
def test_what_if_changes_one_thing_at_a_time(amp_track: Command) -> None:
    file = str(ROOT / "tests" / "workloads" / "choices.py")
    done = amp_track("plan", file, "--what-if", "--precision", "fp32", "--memory-budget", "64MiB", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [each["changes"] for each in plan["variants"]] == [{"optimizer_name": "sgd"}, {"checkpointing": "True"}]
    now, sgd, checkpointing = (
        (each["budgets"]["64MiB"]["fp32"]["at_most_batch"], each["precisions"]["fp32"]["relative_work"])
        for each in (plan, *plan["variants"])
    )
    assert now[1] == sgd[1] == 1 < checkpointing[1] < 1.4, "the forward pass is made twice"
    assert now[0] < sgd[0] < checkpointing[0]
    assert plan["changes_nothing"] == []
    assert list(plan["not_planned"]) == ["reads=an array"]
    assert ".numpy() is not supported" in plan["not_planned"]["reads=an array"]


def test_a_tracked_plan_is_one_run_with_plot_and_snapshots(amp_track: Command, tmp_path: Path) -> None:
    done = amp_track(
        "plan", str(WORKLOADS), "--track", "--memory-budget", "64MiB", "--precision", "fp32,tf32,amp", "--json"
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == "amp_track"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (plan["run_id"], "FINISHED")
    assert run.data.tags["amp_track.kind"] == "plan"
    assert run.data.params["capacity"] == "64MiB"
    max_batch = plan["budgets"]["64MiB"]["amp"]
    assert run.data.metrics["plan/amp/max_batch/64MiB"] == max_batch["max_batch"]
    files = {item.path: item.file_size for item in client.list_artifacts(run.info.run_id)}
    assert list(files) == ["memory-amp.pickle", "memory-fp32.pickle", "memory.png", "plan.json", "report.txt"]
    assert min(files.values()) > 500
    assert not (tmp_path / "optuna.db").exists()


def test_a_check_fails_where_a_peak_has_moved(amp_track: Command, tmp_path: Path) -> None:
    def check(*arguments: str) -> Done:
        target = (str(WORKLOADS), "--precision", "fp32", "--memory-budget", "64MiB")
        return amp_track("plan", *target, "--check", "memory.json", *arguments)

    missing = check()
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "memory.json does not exist. Write it with --update." in missing.stderr
    assert list(tmp_path.iterdir()) == []
    assert check("--update").returncode == 0
    same = check()
    assert same.returncode == 0, same.stderr
    assert same.stdout.splitlines()[-1] == "No peak and no safe batch has moved by more than 1% since memory.json."
    other = check("--set", "width=96", "--csv", "plans.csv", "--track")
    assert (other.returncode, other.stdout) == (2, "")
    assert [file.name for file in tmp_path.iterdir()] == ["memory.json"], "nothing else is written"
    assert other.stderr.startswith("amp-track: --set width: 96 here, but none for memory.json.")
    changed = tmp_path / "workloads.py"
    changed.write_text(WORKLOADS.read_text().replace("width: int = 64", "width: int = 96"))
    written = (tmp_path / "memory.json").read_bytes()
    (tmp_path / "memory.json").write_bytes(written.replace(str(WORKLOADS).encode(), changed.name.encode()))

    def check_changed(*arguments: str) -> Done:
        target = (str(changed), "--precision", "fp32", "--memory-budget", "64MiB")
        return amp_track("plan", *target, "--check", "memory.json", *arguments)

    moved = check_changed("--json")
    assert moved.returncode == 4
    assert "layers.0: " in moved.stderr
    assert moved.stderr.splitlines()[-1].startswith("amp-track: The plan has moved by more than 1% since memory.json")
    assert {each["name"] for each in json.loads(moved.stdout)["moved"]} == {
        "fp32, peak of tensors at batch 64", "fp32, safe batch on 64MiB",
    }  # fmt: skip
    assert check_changed("--tolerance", "500%").returncode == 0


@pytest.mark.slow
def test_a_plan_is_compared_with_that_of_another_commit(
    amp_track: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    file = tmp_path / "models" / "net.py"
    file.parent.mkdir()
    file.write_text(WORKLOADS.read_text().replace("width: int = 64", "width: int = WIDTH"))
    file.write_text(file.read_text().replace("import torch\n", "import torch\nfrom settings.widths import WIDTH\n", 1))
    widths = tmp_path / "settings" / "widths.py"
    widths.parent.mkdir()
    widths.write_text("WIDTH = 64")
    (tmp_path / "images").symlink_to("/data/images")
    monkeypatch.syspath_prepend(tmp_path)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a net")
    plan = ("plan", "models/net.py", "--precision", "fp32", "--memory-budget", "64MiB", "--against", "HEAD")
    assert amp_track(*plan, "--track").returncode == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("SELECT COUNT(*) FROM runs").fetchone() == (1,), "not the plan of the earlier revision"
    widths.write_text("WIDTH = 96")  # a module that the target imports
    moved = amp_track(*plan)
    assert moved.returncode == 4
    assert "fp32, peak of tensors at batch 64: " in moved.stderr
    unknown = amp_track(*plan[:-1], "v9", "--csv", "plans.csv")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert not (tmp_path / "plans.csv").exists()
    assert unknown.stderr.startswith("amp-track: --against v9: ")


@pytest.mark.slow
def test_several_targets_are_one_table_and_one_csv_file(amp_track: Command, tmp_path: Path) -> None:
    models = ("torchvision:squeezenet1_1", "timm:test_resnet")
    done = amp_track("plan", *models, "--gpu", "T4", "--precision", "fp32,bf16", "--csv", "plans.csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("predicted max batch\n")
    with (tmp_path / "plans.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["target"], row["precision"]) for row in rows] == [
        (model, name) for model in models for name in ("fp32", "bf16")
    ]
    assert all(0 < int(row["safe_batch"]) < int(row["max_batch"]) for row in rows if row["precision"] == "fp32")
    assert all("compute capability" in row["skipped"] for row in rows if row["precision"] == "bf16")
    alone = amp_track("plan", models[1], "--gpu", "T4", "--precision", "fp32", "--json")
    assert json.loads(alone.stdout)["budgets"]["Tesla T4"]["fp32"]["max_batch"] == int(rows[2]["max_batch"])
