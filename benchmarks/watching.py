"""Measure the cost of watching a training that is not ours: a plain loop with and without amp_track's hooks.

    python -m benchmarks.watching [--repeats 9]

The hooks of max-batch stay in a process, so each loop runs in a fresh one, in turns. `amp_track.watch` comes and goes:
one loop with a GradScaler is watched and not watched in turns, in blocks of steps, with and without logging to MLflow
on SQLite every 0.1 s (the default is 10 s), and with `on_oom` (on a CPU, without the history of an allocator). All use
one thread. The CPU time of a step tells more than wall time, which noise hides. The small step shows the cost itself;
the large one takes about 5 ms.

Writes benchmarks/results/watching-cpu.json and prints it as a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from amp_track.config.job import Job
from benchmarks import markdown, processes, provenance

WARM_UP_STEPS = 20
WIDTHS = {"small step": (16, 2000), "5 ms step": (1024, 300)}
"""The width of the network and the number of timed steps."""
BATCH_SIZE = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "amp_track.watch": {"log": False},
    "amp_track.watch with MLflow": {"log": True, "log_every_seconds": 0.1},
    'amp_track.watch with on_oom="explain"': {"log": False, "on_oom": "explain"},
}
BLOCKS = 24
"""Pairs of blocks of steps, watched and not watched, of one loop."""


def seconds_per_step(width: int, steps: int, *, watched: bool) -> float:
    """Return the CPU seconds of a step of a plain loop."""
    import torch
    import torch._dynamo  # as in a job process
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    if watched:
        from amp_track.training.devices.open import open_device
        from amp_track.training.watch import TrainingWatch

        job = Job(precision="fp32", device="cpu", batch_size=BATCH_SIZE, steps=10**9)
        TrainingWatch(job, open_device("cpu"), lambda event: None, enforce_budget=False).install()
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    count = BATCH_SIZE * (WARM_UP_STEPS + steps)
    data = TensorDataset(torch.randn(count, 64), torch.randint(0, 10, (count,)))
    started = 0.0
    for index, (inputs, targets) in enumerate(DataLoader(data, batch_size=BATCH_SIZE)):
        if index == WARM_UP_STEPS:
            started = time.thread_time()
        loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return (time.thread_time() - started) / steps


def seconds_of_watch(width: int, steps: int, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Return the CPU seconds of a step of one loop, watched and not watched, for each pair of blocks."""
    import torch
    from torch import nn

    import amp_track

    torch.set_num_threads(1)
    steps //= 6
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = torch.randn(BATCH_SIZE, 64), torch.randint(0, 10, (BATCH_SIZE,))

    def block() -> float:
        started = time.process_time()  # logging to a server has its own thread
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return (time.process_time() - started) / steps

    found: dict[str, list[float]] = {"bare": [], "watched": []}
    block()
    for pair in range(BLOCKS):
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            if watched:
                with amp_track.watch(scaler, optimizer, model=model, **settings):
                    found["watched"].append(block())
            else:
                found["bare"].append(block())
    return found


def measure(repeats: int) -> dict[str, Any]:
    runs: dict[str, dict[str, list[float]]] = {name: {"bare": [], "watched": []} for name in WIDTHS}
    for repeat in range(repeats):
        for case, of_case in runs.items():
            for watched in (False, True) if repeat % 2 == 0 else (True, False):
                of_one = processes.json_of("benchmarks.watching", "--one", case, str(watched))
                of_case["watched" if watched else "bare"].append(of_one)
    summaries = {case: _summary(of_case) for case, of_case in runs.items()}
    found = provenance.of_device(str(processes.ROOT / "experiments" / "digits.py"), device="cpu")
    for case in WIDTHS:
        for variant in VARIANTS:
            blocks = processes.json_of("benchmarks.watching", "--watch", case, variant)
            summaries[f"{variant}, {case}"] = _summary(blocks)
    return {**found, "n": repeats, "blocks": BLOCKS, "summaries": summaries, "runs": runs}


def _summary(runs: dict[str, list[float]]) -> dict[str, float]:
    """Return medians in microseconds: of a bare step, and of the paired differences with their range."""
    bare, watched = ([seconds * 1e6 for seconds in runs[name]] for name in ("bare", "watched"))
    differences = [after - before for before, after in zip(bare, watched, strict=True)]
    return {
        "bare_cpu_us": statistics.median(bare),
        "watch_cpu_us": statistics.median(differences),
        "watch_cpu_us_least": min(differences),
        "watch_cpu_us_most": max(differences),
    }


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, found in result["summaries"].items():
        least, most = found["watch_cpu_us_least"], found["watch_cpu_us_most"]
        shown = name if "," in name else f"a function or a script, {name}"
        takes = [f"{found['bare_cpu_us']:,.0f} µs", f"{found['watch_cpu_us']:.0f} µs", f"{least:.0f} to {most:.0f} µs"]
        rows.append([shown, *takes])
    times = f"n={result['n']}; amp_track.watch: {result['blocks']} pairs of blocks of one loop; medians"
    shown = markdown.table(["what is watched", "its step", "watching takes", "range"], rows)
    return f"{shown}\n\n*{provenance.sentence(result, 'torch', 'mlflow')}, {times}*"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9, help="measurements per case (default 9)")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WATCHED"), help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=2, metavar=("CASE", "VARIANT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        case, variant = arguments.watch
        print(json.dumps(seconds_of_watch(*WIDTHS[case], VARIANTS[variant])))
    elif arguments.one:
        case, watched = arguments.one
        print(json.dumps(seconds_per_step(*WIDTHS[case], watched=watched == "True")))
    else:
        result = measure(arguments.repeats)
        provenance.write("watching-cpu", result)
        print(table(result))


if __name__ == "__main__":
    main()
