import re

from hypothesis import given
from hypothesis import strategies as st

from amp_track.records.dtypes import CAST, LOSS, DtypesReport, OperationDtypes
from amp_track.records.hardware import Hardware
from amp_track.report.dtypes import dtypes_table, layer_groups, sentence
from amp_track.report.table import render_text

DTYPES = st.sampled_from(["float16", "float32"])
OPERATIONS = st.builds(
    OperationDtypes,
    layer=st.sampled_from(["conv", "block.0.conv", "block.1.conv", "block.10.conv", "[bold]", LOSS]),
    in_pass=st.sampled_from(["forward", "loss", "backward"]),
    operation=st.sampled_from([CAST, "addmm", "add"]),
    parameter=st.sampled_from(["", "weight"]),
    inputs=st.lists(DTYPES, min_size=1, max_size=3).map(tuple),
    output=DTYPES,
    count=st.integers(1, 9),
)


def one(
    layer: str, operation: str, output: str = "float16", *, in_pass: str = "forward", count: int = 1
) -> OperationDtypes:
    return OperationDtypes(
        layer=layer, in_pass=in_pass, operation=operation, inputs=("float16", "float32", "float16"), output=output,
        count=count,
    )  # fmt: skip


def report(*operations: OperationDtypes, precision: str = "amp") -> DtypesReport:
    return DtypesReport(
        workload="experiments/digits.py", precision=precision, batch_size=2,
        hardware=Hardware(kind="cpu", name="a CPU"), operations=operations,
    )  # fmt: skip


def printed(*operations: OperationDtypes, width: int = 120) -> str:
    return render_text([dtypes_table(report(*operations))], [], width=width)


@given(st.lists(OPERATIONS, min_size=1, max_size=30).map(tuple))
def test_no_layer_and_no_operation_is_lost_and_every_row_is_printed(operations: tuple[OperationDtypes, ...]) -> None:
    groups = layer_groups(operations)
    named = [layer for group in groups for layer in group.layers]
    assert sorted(named) == sorted({operation.layer for operation in operations})
    shown = sum(row[-1] * len(group.layers) for group in groups for row in group.rows)
    assert shown == sum(operation.count for operation in operations)
    for group in groups:
        assert len({re.sub(r"\d+", "", layer) for layer in group.layers}) == 1
    text = printed(*operations)
    assert text.count("→") == sum(len(group.rows) for group in groups) + 1, "and the heading"
    assert all(layer in text for layer in ("conv", "[bold]") if layer in named)


def test_layers_alike_are_one_group_where_the_first_of_them_ran() -> None:
    blocks = [one(f"block.{number}.conv", "convolution", count=2) for number in range(12)]
    groups = layer_groups((blocks[0], one("pool", "mean"), *blocks[1:]))
    assert [group.title for group in groups] == ["block.0.conv … block.11.conv\n(12 alike)", "pool"]
    row = r"block.0.conv … block.11.conv │ forward │ convolution │ float16, float32 → float16 │ +24 │"
    assert re.search(row, printed(*blocks))
    few = one("1", "relu"), one("3", "relu"), one("5", "relu", "float32")
    assert [group.title for group in layer_groups(few)] == ["1, 3", "5"]


def test_passes_come_in_order_are_named_once_and_stay_together_on_a_narrow_terminal() -> None:
    shown = printed(one("fc", "mm", in_pass="backward"), one("fc", "addmm"), one("fc", "sum", in_pass="backward"))
    assert re.search(r"forward +│ addmm.*\n.*backward +│ mm.*\n.*│ +│ sum ", shown)
    layer = "encoder.layers.encoder_layer_0.self_attention.out_proj"
    shown = printed(one(layer, "addmm"), one(layer, "mm", in_pass="backward"), width=80)
    assert re.search(r"forward +│ addmm +│ float16, float32 → float16 │ +1 │\n.*backward +│ mm +│ float16", shown)


def test_the_sentence_names_the_operations_of_each_dtype() -> None:
    operations = (
        one("a", "convolution", count=21), one("a", CAST, count=3), one("b", "add", "float32"),
        one("b", "add"), one(LOSS, "log_softmax", "float32", in_pass="loss"), one("a", "mm", in_pass="backward"),
    )  # fmt: skip
    assert sentence(report(*operations)) == (
        "forward pass and loss: 22 operations in float16, 2 in float32, 3 casts between: "
        "convolution in float16; log_softmax in float32; add in float32 and float16"
    )
    operations = (one("a", "convolution", "float32", count=2), one(LOSS, "nll_loss", "float32", in_pass="loss"))
    said = "forward pass and loss: all 3 operations in float32: convolution, nll_loss"
    assert sentence(report(*operations, precision="fp32")) == said
    tf32 = f"{said}; float32 matrix products and convolutions are computed in TF32"
    assert sentence(report(*operations, precision="tf32")) == tf32
