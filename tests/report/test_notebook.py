"""What a cell shows, in IPython's own shell in a process of its own. tests/integration has a kernel."""

import json
import subprocess
import sys
from typing import Any

PROGRAM = """
import json, sys, time
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from amp_track.report.progress import CellOutput

shell = InteractiveShell.instance()
cell = CellOutput()
with capture_output() as captured:
    exec(sys.stdin.read())
print(json.dumps([{"updates": output.update, "id": output.transient["display_id"], "plain": output.data["text/plain"],
                   "html": output.data["text/html"]} for output in captured.outputs]))
"""


def shown_by(program: str) -> list[dict[str, Any]]:
    """What was displayed, in order."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=program, capture_output=True, text=True, check=True)
    shown: list[dict[str, Any]] = json.loads(done.stdout)
    return shown


def test_lines_that_stay_and_one_that_changes_are_one_output() -> None:
    shown = shown_by("""
cell.say("first")
time.sleep(0.4)
cell.change("half")
cell.say("second")
cell.change("")
""")
    assert [output["updates"] for output in shown] == [False, True, True, True]
    assert len({output["id"] for output in shown}) == 1
    assert [output["plain"] for output in shown] == ["first", "first\nhalf", "first\nsecond\nhalf", "first\nsecond"]


def test_it_is_updated_a_few_times_a_second_at_most() -> None:
    shown = shown_by("""
began = time.monotonic()
while time.monotonic() - began < 1:
    cell.change(f"step {time.monotonic()}")
cell.change("")
""")
    assert 3 <= len(shown) <= 6
    assert shown[-1]["plain"] == ""


def test_earlier_lines_are_folded_away_and_text_is_escaped() -> None:
    *_, last = shown_by("""
for number in range(14):
    cell.say(f"<line {number}>")
""")
    folded, sight = last["html"].split("</details>")
    assert folded.startswith("<details><summary>4 earlier lines</summary>")
    assert "&lt;line 3&gt;" in folded and "&lt;line 4&gt;" not in folded
    assert sight.count("\n") == 9 and "&lt;line 13&gt;" in sight
    assert "<line" not in last["html"]


def test_another_cell_has_an_output_of_its_own() -> None:
    shown = shown_by("""
cell.say("one")
shell.execution_count += 1
cell.say("two")
""")
    assert [(output["updates"], output["plain"]) for output in shown] == [(False, "one"), (False, "two")]
    assert shown[0]["id"] != shown[1]["id"]
