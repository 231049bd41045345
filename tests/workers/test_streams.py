"""Standard streams of a small character set: what is printed degrades to ASCII."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track import cli
from amp_track.report import progress
from amp_track.report.table import Column, Table, print_table
from amp_track.workers.streams import LossyStream

ENCODINGS = ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8"]


def opened(encoding: str) -> tuple[io.BytesIO, io.TextIOWrapper]:
    written = io.BytesIO()
    return written, io.TextIOWrapper(written, encoding=encoding, newline="\n", write_through=True)


def can_be_encoded(sign: str, encoding: str) -> bool:
    return bool(sign.encode(encoding, "ignore"))


@given(st.sampled_from(ENCODINGS), st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_printed_and_what_the_encoding_has_stays(encoding: str, text: str) -> None:
    written, stream = opened(encoding)
    LossyStream(stream).write(text)
    printed = written.getvalue().decode(encoding)
    expected = [sign for sign in text if not sign.isascii() and can_be_encoded(sign, encoding)]
    assert [sign for sign in printed if not sign.isascii()] == expected
    if all(can_be_encoded(sign, encoding) for sign in text):
        assert printed == text


def test_common_signs_have_a_spelling() -> None:
    written, stream = opened("ascii")
    LossyStream(stream).write("1–2 × 3… amp → fp32 ± 4\u00a0%, größer")
    assert written.getvalue() == rb"1-2 x 3... amp -> fp32 +- 4 %, gr\xf6\xdfer"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_tables_and_progress_can_be_printed_in_a_small_character_set(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = opened(encoding), opened(encoding)
    monkeypatch.setattr(sys, "stdout", LossyStream(out[1]))
    monkeypatch.setattr(sys, "stderr", LossyStream(err[1]))
    rows = ((("bf16 × 2", "–"), ("fp32", "1 → 2")),)
    print_table(Table(title="a – b", columns=(Column("a", key=True), Column("b")), sections=rows))
    progress.say("once more…")
    printed = out[0].getvalue().decode(encoding)
    assert "a - b" in printed
    assert "1 -> 2" in printed
    assert "+--" in printed
    assert err[0].getvalue().decode(encoding) == "once more...\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_command_prints_in_a_small_character_set(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = opened(encoding), opened(encoding)
    monkeypatch.setattr(sys, "stdout", out[1])
    monkeypatch.setattr(sys, "stderr", err[1])
    for arguments, written in ((["compare", "--help"], out[0]), (["max-batch", "no–where.py"], err[0])):
        monkeypatch.setattr(sys, "argv", ["amp-track", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, 2)
        assert b"amp-track" in written.getvalue()
    assert b"no-where.py: file not found" in err[0].getvalue()


def test_a_job_prints_to_stderr_whatever_stdout_is(tmp_path: Path) -> None:
    """A file that can be sought in, where stderr is a pipe: `amp-track max-batch … > result 2> >(tee log)`."""
    program = "from amp_track.runner import process_setup as p; p.print_to_stderr(); print('printed')"
    with (tmp_path / "result").open("w") as result:
        done = subprocess.run([sys.executable, "-c", program], stdout=result, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "printed\n")
    assert (tmp_path / "result").read_text() == ""
