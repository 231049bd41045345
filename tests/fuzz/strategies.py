"""What is drawn: command lines, values, environments. Not random text alone, but what programs stumble over."""

from __future__ import annotations

from hypothesis import strategies as st
from support import WORKLOADS

from amp_track.config.cli_params import Flag
from amp_track.config.commands import FLAGS

TINY = str(WORKLOADS / "tiny.py")
COMMANDS = tuple(FLAGS)
_LONG = ("x" * 300, "x" * 5000, "9" * 400, "9" * 5000)
_NUMBERS = (
    "0", "-1", "1", "2", "-0", "+1", " 8", "8 ", "08", "1_0", "0x10", "1e0", "1.0", ".5", "1.", "1e-400", "5e-324",
    "2147483648", "9223372036854775807", "9223372036854775808", "1e308", "1e309", "nan", "inf", "-inf", "Infinity",
    "１", "١", "½", "²", "1,5",
)  # fmt: skip
_TEXTS = (
    "", " ", "\t", "\n", "a\nb", "\r", "\x1b[31m", "\x85", "\u2028", "é", "e\u0301", "\u202e", "\udcff", "🦀", "-",
    "--", "--json", "--set", "-h", "-x", "%s", "{0}", "';--", '"', "\\", ",", "=", "=a", "a=", "a=b", "a:b", ":", "::",
    "a:", ":a", "a.b:C", "..:A", "/", ".", "..", "~", "*", "None", "auto", "epoch", "true", "[/]", "[bold", "$HOME",
    'a b/☃:"x"', "http://[", "0" * 32, "cuda:-1", "100%", "99.99999999999999999%", "1 bit", "5 %", "1.5.5MiB", "²MiB",
    "fp32,", "fp32,,amp", "FP32", "1,nan", "1e-2,1e-4", "width=1,", "wi dth=1", "1=1",
)  # fmt: skip
ODD = st.one_of(
    st.sampled_from((*_NUMBERS, *_TEXTS, *_LONG)),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
)
"""A text that few flags take."""
_COUNTS = ("1", "2", " 8", "08", "2147483648", "9223372036854775807", "１")
_FEW = ("1", "2")
_SIZES = ("1", "4096", "64MiB", "0.5GiB", "1 mib", "900TiB", "8EiB", "9" * 40 + "EiB")
_PARTS = ("5%", "99.99999999999999999%", "1e-320%", "1", "1MiB", "900TiB", "9" * 400)
OPTIONS = (
    "width=8", "width=0", "width=-1", "width=1e3", "width= 8", "width=１", "width=" + "9" * 30, "width=None",
    "factor=nan",
    "factor=1e400", "bias=yes", "bias=2", "label=", "label=None", "label=\n", "label=\udcff", "label=" + "x" * 5000,
    "depth=2", "depth=3", "kind=odd", "limit=None", "limit=3", "sizes=(1, 2)", "sizes=1", "height=3", "batch_size=2",
    "model=x", "__class__=1", "wïdth=1",
)  # fmt: skip
_VALUES = (
    "width=1,2", "width=2,02", "width=1,x", "factor=1,1.0,nan", "factor=1e308,-1e308", "depth=1,2,3", "bias=True,no",
    "label=a,é", "label=\udcff,a", "limit=None,1", "sizes=1,2", "height=1",
)  # fmt: skip
_TAKEN = {
    "--precision": ("fp32", "bf16", "amp", "tf32", "fp32,bf16", "bf16, bf16,fp32"),
    "--device": ("auto", "cpu", "cuda", "cuda:" + "9" * 30, "mps", "meta", "xpu:1"),
    "--set": OPTIONS,
    "--vary": _VALUES,
    "--lr-range": ("1e-4,1e-2", "5e-324,1e308"),
    "--lr": ("1e-3", "1e308", "5e-324", "1_0"),
    "--max-grad-norm": ("1", "1e308", "5e-324"),
    "--lr-scaling": ("none", "linear", "sqrt"),
    "--memory-budget": _SIZES,
    "--headroom": _PARTS,
    "--tolerance": ("1%", "1e308%", "5e-324"),
    "--gpu": ("RTX 4090", "4090", "é"),
    "--study": ("s", " s", "é", "x" * 300, "'", "[bold", "%s"),
    "--resume": ("0" * 32, "_", "١", "x" * 300),
    "--storage": ("sqlite:///other.db",),
    "--time-limit": ("1e-300", "1e300"),
    "--job-timeout": ("1e-300", "1e9"),
    "--seed": ("0", "2147483647"),
    "--confirm-steps": ("0", "1", "epoch"),
    "--batch-size": ("1", "2", "8", "9", "auto"),
    "--epochs": _FEW, "--steps": _FEW, "--trials": _FEW, "--seeds": _FEW, "--num-workers": ("0",),
    "--nproc": ("1", "9223372036854775807"),
}  # fmt: skip
"""Texts that a flag takes, whatever comes of them; other flags take counts. None makes a command take long."""
_SOON_DONE = ("--epochs", "--steps", "--trials", "--seeds", "--confirm-steps", "--num-workers", "--batch-size")
"""Flags whose large values are right, and take for ever."""
ODD_WORKLOADS = st.one_of(
    ODD,
    st.sampled_from(
        (
            "link", "folder", "folder/", "pipe", "loop", "empty.py", "no.txt", "bytes.py", "tab\t.py", "json:tool",
            "os:path", "json:", "no_such:X", "a\nb:c", "amp_track:Workload", "/dev/zero", "/proc/self/mem", "x/" * 3000,
            "x" * 300 + ".py",
        )
    ),
)  # fmt: skip
"""Files of `odd_files`, and names of nothing."""


@st.composite
def flags(draw: st.DrawFn, command: str, *, odd: bool = False) -> list[str]:
    """Draw a flag of the command with a value that it takes; an odd one has another value, name or spelling."""
    flag = draw(st.sampled_from(FLAGS[draw(st.sampled_from((command, command, *COMMANDS))) if odd else command]))
    name = flag.name
    if odd:
        name = draw(st.sampled_from((name, name, name, name.replace("-", "_").replace("__", "--", 1), name[:-1])))
    if flag.is_switch:
        said = draw(st.sampled_from(((), (), ("true",), ("FALSE",), *((("maybe",),) if odd else ()))))
        return [name, *said] if flag.name != "--compile" else [name, "false"]  # a compilation takes half a minute
    if odd:
        value = draw(ODD.filter(lambda text: _is_soon_done(flag, text)))
        return draw(st.sampled_from(([name, value], [name, value], [f"{name}={value}"], [name])))
    return [name, draw(st.sampled_from(_TAKEN.get(flag.name, _COUNTS)))]


def _is_soon_done(flag: Flag, text: str) -> bool:
    if flag.name not in _SOON_DONE:
        return True
    try:
        value = flag.value(text)
    except ValueError:
        return True
    return not isinstance(value, int) or value <= 2


@st.composite
def command_lines(draw: st.DrawFn, commands: tuple[str, ...] = COMMANDS) -> list[str]:
    """Draw a command line: of flags with values that they take, but for one odd thing in most of them."""
    command = draw(st.sampled_from(commands))
    parts = draw(st.lists(flags(command), max_size=3))
    workload = TINY
    match draw(st.sampled_from((*["flag"] * 5, *["workload"] * 2, *["word"] * 2, "nothing"))):
        case "workload":
            workload = draw(ODD_WORKLOADS)
        case "word":
            parts.append([draw(ODD)])
        case "flag":
            parts.append(draw(flags(command, odd=True)))
    parts.append([workload])
    if draw(st.booleans()):
        parts.append(["--json"])
    short = {"search": ["--trials", "1"], "plan": ["--precision", "fp32"]}.get(command, [])
    return [command, *short, *(word for part in draw(st.permutations(parts)) for word in part)]


_FIELDS = ("width", "batch_size", "learning_rate", "num_workers", "metric", "set", "_x", "model_kind", "über")
_TYPES = (
    "int", "float", "str", "bool", "int | None", "Literal[1, 'a']", "tuple[int, ...]", "list", "Undefined", "Path",
    "Callable[..., int]", "nn.Module", "ClassVar[int]", "Mode", "'int'", "5",
)  # fmt: skip
_DEFAULTS = (
    "1", "0", "-1", "True", "'many'", "'a\\n'", "'\\udcff'", "1e400", "float('nan')", "1e-3", "None", "[]", "(1, 2)",
    "10**5000", "Path('x')", "Mode.A", "len", "object()", "dataclasses.field(default_factory=list)", "1j",
    "dataclasses.field(default_factory=lambda: 1 / 0)", "dataclasses.field()", "Metric('')", "Metric('a b/☃:\"x\"')",
    "Metric('a', 'yes')", "Metric(5)", "Metric('x' * 300)", "Metric('loss')", "'accuracy'", "Unprintable()",
)  # fmt: skip
_DATA = (
    "TensorDataset(torch.zeros(8, 4), torch.zeros(8).long())", "None", "[]", "[1]", "[(None, None)]", "5", "iter([])",
    "[(torch.zeros(4), torch.tensor(0))] * 8", "Endless()", "1 / 0", "'text'", "[(torch.zeros(4),)] * 8", "{}",
    "[('a', 'b')] * 8",
)  # fmt: skip
_DECORATORS = ("@dataclass(frozen=True)", "@dataclass", "", "@dataclass(kw_only=True, slots=True)")
_FILE = """{future}import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from amp_track import Metric, Workload


class Mode(enum.Enum):
    A = "a"


class Endless:
    def __len__(self):
        return {length}


class Unprintable:
    def __repr__(self):
        raise RuntimeError("not to be shown")


{decorator}
class {name}(Workload):
{fields}
    def model(self):
        return nn.Linear(4, 2)

    def train_data(self):
        return {data}

    eval_data = train_data
"""
_CONTENTS = (
    b"", b"\xff", b"\0", b"\xef\xbb\xbf", b"# coding: no-such", b"import", b"1 / 0", b"(" * 10_000, b"\r\r\r",
    b"-" * 20_000 + b"1", b"x = " + b"[" * 150 + b"]" * 150, b"from amp_track import Workload", b"9" * 5000,
    b"raise ExceptionGroup('a\\nb', [ValueError()])", b"from . import x", "ж = 1".encode("koi8-r"),
)  # fmt: skip


@st.composite
def workload_files(draw: st.DrawFn) -> bytes:
    """Draw the content of a file: a workload with odd fields and data, or no workload."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(st.sampled_from(_CONTENTS), st.binary(max_size=20)))
    fields = draw(st.lists(st.tuples(*map(st.sampled_from, (_FIELDS, _TYPES, _DEFAULTS))), max_size=2))
    lines = [f"    {name}: {kind} = {default}\n" for name, kind, default in fields]
    text = _FILE.format(
        future=draw(st.sampled_from(("", "from __future__ import annotations\n"))),
        length=draw(st.sampled_from(("2**40", "-1", "'a'", "2**70", "1 / 0"))),
        decorator=draw(st.sampled_from(_DECORATORS)),
        name=draw(st.sampled_from(("Odd", "Ünïcode", "X" * 300, "Workload"))),
        fields="".join(lines) or "    pass\n",
        data=_DATA[0] if fields else draw(st.sampled_from(_DATA)),
    )
    return text.encode()


_VARIABLES = {
    "MLFLOW_TRACKING_URI": ("", "sqlite:///mlflow.db"),
    "MLFLOW_RUN_ID": ("", "0" * 32, " ", "a\nb", "é", "\udcff", "../x", "x" * 300, "x" * 5000, "'"),
    "MLFLOW_EXPERIMENT_ID": ("", "0", "1", "-1", "99999999999999999999", "x", " ", "1.5", "é", "\udcff",
        "x" * 5000, "0' or 1"),
    "MLFLOW_EXPERIMENT_NAME": ("", " ", "amp_track", "Default", "é", "a\nb", "\udcff", "x" * 501, "x" * 5000, "'",
        "a/b", "[bold"),
    "OMP_NUM_THREADS": ("", "0", "-1", "x", "\udcff", "9" * 400),
    "GLIBC_TUNABLES": ("x", "\udcff"),
    "COLUMNS": ("", "0", "-1", "1", "x", "100000"),
}  # fmt: skip


@st.composite
def environments(draw: st.DrawFn) -> dict[str, str]:
    """Draw variables that amp_track, or a library of its, reads."""
    of_mlflow = [name for name in _VARIABLES if name.startswith("MLFLOW")]
    names = {draw(st.sampled_from(of_mlflow)), draw(st.sampled_from([*of_mlflow, *_VARIABLES]))}
    return {name: draw(st.one_of(st.sampled_from(_VARIABLES[name]), ODD.filter(bool))) for name in sorted(names)}


VALUES = st.one_of(
    ODD, st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=3), st.complex_numbers(),
    st.sampled_from((object(), len, int, b"\xff", "\ud800", "a\0b", (), [], {}, set(), range(3), Ellipsis)),
    st.lists(st.one_of(ODD, st.integers(), st.none()), max_size=3),
    st.dictionaries(st.one_of(ODD, st.integers()), st.one_of(ODD, st.integers(), st.lists(st.integers())), max_size=2),
)  # fmt: skip
"""Python values, for keyword arguments."""
