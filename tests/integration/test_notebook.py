"""Commands called from a cell of a notebook, in a real kernel."""

import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support import DIGITS

FIT = """
import amp_track

result = amp_track.max_batch({workload!r}, precision="fp32", max_batch_size=64)
"""
SHOW = "result"
TRAIN = """
trained = amp_track.train({workload!r}, precision="fp32", epochs=8)
"""
A_CLASS_OF_THE_NOTEBOOK = """
class Own(amp_track.Workload):
    def model(self): ...
    def train_data(self): ...
    def eval_data(self): ...

try:
    amp_track.max_batch(Own)
except amp_track.BadInput as error:
    print(error)
"""
A_FILE_OF_THE_NOTEBOOK = """%%writefile mine.py
import torch

def train_steps(batch_size, precision):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        model(torch.randn(batch_size, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""
A_FUNCTION = """
import amp_track

found = amp_track.max_batch(
    "mine:train_steps", precision="fp32", memory_budget="64MiB", max_batch_size=64, confirm_steps=8
)
print(found.max_batch)
"""
A_FUNCTION_OF_THE_NOTEBOOK = """
def train_steps(batch_size, precision):
    yield

try:
    amp_track.max_batch(train_steps)
except amp_track.BadInput as error:
    print(error)
"""
CELLS = (FIT, SHOW, TRAIN, A_CLASS_OF_THE_NOTEBOOK)


class RecordingClient(NotebookClient):
    """Runs a notebook, and notes when a message changed what a cell shows."""

    def __init__(self, notebook: Any, **settings: Any) -> None:
        super().__init__(notebook, **settings)
        self.changed_at: dict[int, list[float]] = {}

    def process_message(self, message: Any, cell: Any, cell_index: int) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.changed_at.setdefault(cell_index, []).append(time.monotonic())
        return super().process_message(message, cell, cell_index)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the client, not ours
def test_a_cell_shows_progress_in_one_output(clean_folder: Path) -> None:
    sources = [source.format(workload=DIGITS) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = RecordingClient(notebook, timeout=600, resources={"metadata": {"path": str(clean_folder)}})
    client.execute()
    *cells, rejected = notebook.cells
    max_batch, show, train = (shown_in(cell) for cell in cells)

    (lines,) = max_batch
    first, *probes = lines["text/plain"].splitlines()
    assert first == "finding the max batch within the free memory at fp32"
    assert all(line.startswith(("fp32 batch ", "fp32: batch 64 ran in ", "every max")) for line in probes)
    (confirmation,) = (probe for probe in probes if "(confirmation run)" in probe)
    assert confirmation.startswith("fp32 batch 64     fits")
    assert lines["text/html"].startswith("<pre") and confirmation in lines["text/html"]

    (table,) = show
    assert table["text/html"].count("<table") == 1
    assert "--max-batch-size" in table["text/html"]

    (line,) = train
    assert line["text/plain"].startswith("epoch 8/8  loss ")
    (said,) = [output.text for output in rejected.outputs if output.get("name") == "stdout"]
    assert said.startswith("workload: the class Own exists only in this notebook or script")
    assert "Move it into a file" in said
    for changed_at in client.changed_at.values():
        assert len(changed_at) > 4, "it moves"
        assert len(changed_at) < 4 * (changed_at[-1] - changed_at[0]) + 10, "a few times a second, and for each line"


def shown_in(cell: Any) -> list[dict[str, str]]:
    """The outputs of a cell by type. One warning is not ours: Optuna imports tqdm, which looks for ipywidgets."""
    streams = [output for output in cell.outputs if output.output_type == "stream"]
    assert all("IProgress not found" in stream.text and stream.text.count("\n") <= 2 for stream in streams)
    return [output.data for output in cell.outputs if output not in streams]


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_a_function_of_a_written_file_is_found_and_one_of_a_cell_is_rejected(clean_folder: Path) -> None:
    sources = (A_FILE_OF_THE_NOTEBOOK, A_FUNCTION, A_FUNCTION_OF_THE_NOTEBOOK)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(clean_folder)}}).execute()
    _, found, rejected = (
        "".join(output.text for output in cell.outputs if output.get("name") == "stdout") for cell in notebook.cells
    )
    assert found == "{'fp32': 64}\n"
    assert rejected.startswith("workload: the function train_steps exists only in this notebook or script")
    assert "%%writefile" in rejected
