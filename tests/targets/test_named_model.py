"""Models of timm, torchvision and transformers by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_plan.profiled import profiled_training
from memory_plan.test_fake_step import fake_step, job
from torch import nn
from torch.nn import functional

from amp_track.config import job as config_job
from amp_track.config.job import Job
from amp_track.memory_plan.replay import most_alive_bytes, predict_peak
from amp_track.records.errors import BadInput
from amp_track.records.plan import Category
from amp_track.targets import source
from amp_track.targets.base import load_target
from amp_track.targets.workload import load_workload
from amp_track.training.amp.tensors import tensors

SMALL: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 24,
    },
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99},
    "llama": {
        "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 99,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64,
        "d_kv": 16, "vocab_size": 99, "decoder_start_token_id": 0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    },
}  # fmt: skip
SLOW = pytest.mark.nightly
Written = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Written:
    """Return a function that writes the configuration of a small model, and returns its reference."""

    def write(model_type: str, /, **changes: Any) -> str:
        file = tmp_path / f"{model_type}.json"
        file.write_text(json.dumps({"model_type": model_type, **SMALL.get(model_type, {}), **changes}))
        return f"transformers:{file}"

    return write


def activation_bytes(reference: str, **options: Any) -> int:
    workload = load_workload(reference, [(name, str(value)) for name, value in options.items()])
    return dict(predict_peak(fake_step(job(), workload).trace("fp32", 8)).by_category)[Category.ACTIVATIONS]


@pytest.mark.parametrize("precision", ["fp32", *(pytest.param(name, marks=SLOW) for name in ("amp", "bf16"))])
@pytest.mark.parametrize(
    "name",
    [
        "timm:test_vit", "torchvision:squeezenet1_1", *SMALL,
        *(pytest.param(f"timm:{name}", marks=SLOW) for name in (
            "vit_base_patch16_224", "resnet50", "swin_tiny_patch4_window7_224", "convnext_tiny",
        )),
        *(pytest.param(f"torchvision:{name}", marks=SLOW) for name in (
            "resnet50", "inception_v3", "googlenet", "lraspp_mobilenet_v3_large", "r3d_18", "vit_b_16",
        )),
    ],
)  # fmt: skip
def test_every_kind_of_model_is_planned(config: Written, name: str, precision: str) -> None:
    workload = load_workload(name if ":" in name else config(name))
    workload.check()
    trace = fake_step(job(), workload).trace(precision, 4).with_next_step()
    with torch.device("meta"):
        model = workload.model()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert sum(each.size_bytes for each in trace.storages if each.category is Category.PARAMETERS) == held
    batch = sum(tensor.nbytes for tensor in tensors(workload.example(4)))
    assert batch <= sum(each.size_bytes for each in trace.storages if each.category is Category.BATCH) <= 4 * batch
    assert trace.values_read == ()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=SLOW) for name in ("gpt2", "llama", "t5"))])
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, which sees one cycle
def test_as_many_bytes_are_alive_as_the_profiler_sees(config: Written, name: str, precision: str) -> None:
    length = 24 if name == "bert" else 64
    workload = load_workload(config(name), [("sequence_length", str(length))])
    trace = fake_step(job(), workload, as_cuda=False).trace(precision, 8).with_next_step()
    assert most_alive_bytes(trace, trace.sizes) == pytest.approx(profiled_training(workload, precision, 8), rel=0.001)


@pytest.mark.parametrize(
    ("name", "input", "target"),
    [
        ("timm:test_vit", (2, 3, 160, 160), (2,)),
        ("timm:resnet18", (2, 3, 224, 224), (2,)),
        ("torchvision:inception_v3", (2, 3, 299, 299), (2,)),
        ("torchvision:fcn_resnet50", (2, 3, 480, 480), (2, 480, 480)),
        ("torchvision:mc3_18", (2, 3, 16, 112, 112), (2,)),
        ("torchvision:swin3d_t", (2, 3, 32, 224, 224), (2,)),
    ],
)
def test_an_example_has_the_shapes_of_the_model(name: str, input: tuple[int, ...], target: tuple[int, ...]) -> None:
    images, labels = load_workload(name).example(2)
    assert (images.shape, labels.shape, labels.dtype) == (input, target, torch.int64)


@pytest.mark.parametrize(
    ("architecture", "changes", "shape", "dtype"),
    [
        ("BertForMaskedLM", {}, (2, 24), torch.int64),
        ("BertForTokenClassification", {}, (2, 24), torch.int64),
        ("BertForSequenceClassification", {}, (2,), torch.int64),
        ("BertForSequenceClassification", {"num_labels": 1}, (2,), torch.float32),
    ],
)
def test_labels_are_those_of_the_head(
    config: Written, architecture: str, changes: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    workload = load_workload(config("bert", architectures=[architecture], **changes))
    inputs, labels = workload.example(2)
    assert type(workload).__name__ == architecture
    assert (labels.shape, labels.dtype) == (shape, dtype)
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items() if name != "labels"} == {
        "input_ids": (2, 24), "attention_mask": (2, 24),
    }  # fmt: skip
    model = workload.model()
    assert workload.loss(model(**inputs), labels).isfinite()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_config_without_architectures_gets_a_head(config: Written) -> None:
    heads = {name: type(load_workload(config(name, architectures=None))).__name__ for name in SMALL}
    assert heads == {name: of_config["architectures"][0] for name, of_config in SMALL.items()}


def test_a_classifier_without_padding_token_trains(config: Written) -> None:
    workload = load_workload(config("gpt2", architectures=["GPT2ForSequenceClassification"], pad_token_id=None))
    inputs, labels = workload.example(2)
    assert workload.loss(workload.model()(**inputs), labels).isfinite()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("rmsprop", torch.optim.RMSprop),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_every_optimizer_is_torchs_and_can_be_planned(name: str, kind: type[torch.optim.Optimizer]) -> None:
    workload = load_workload("timm:test_vit", [("optimizer_name", name)])
    optimizer = workload.optimizer(nn.Linear(2, 2).parameters(), 1e-3)
    assert type(optimizer) is kind
    assert optimizer.defaults.get("momentum", 0) == (0.9 if name == "sgd" else 0)
    state = dict(predict_peak(fake_step(job(), workload).trace("fp32", 2).with_next_step()).by_category)
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in workload.model().parameters())
    if name == "adafactor":  # a number for each row and each column
        assert 0 < state[Category.OPTIMIZER_STATE] < 0.1 * weights
    else:
        copies = 2 if name.startswith("adam") else 1
        assert state[Category.OPTIMIZER_STATE] == pytest.approx(copies * weights, rel=0.02)


@pytest.mark.parametrize(
    ("name", "of_position", "sizes"),
    [
        ("timm:test_vit", "pos_embed", {"None": 1 + 10 * 10, "64": 1 + 4 * 4}),
        ("torchvision:vit_b_16", "encoder.pos_embedding", {"None": 1 + 14 * 14, "64": 1 + 4 * 4}),
    ],
)
def test_a_model_with_positions_is_built_for_the_image_size(name: str, of_position: str, sizes: dict[str, int]) -> None:
    for text, count in sizes.items():
        workload = load_workload(name, [("image_size", text)])
        with torch.device("meta"):
            assert workload.model().get_parameter(of_position).shape[1] == count


def test_other_models_take_any_image() -> None:
    workload = load_workload("timm:test_resnet", [("image_size", "64")])
    assert workload.example(2)[0].shape == (2, 3, 64, 64)
    workload.check()


def test_a_transformer_of_images_is_built_for_the_image_size(config: Written) -> None:
    workload = load_workload(config("vit"), [("image_size", "64")])
    inputs, labels = workload.example(2)
    assert workload.loss(workload.model()(**inputs), labels).isfinite()
    assert inputs["pixel_values"].shape == (2, 3, 64, 64)


@pytest.mark.parametrize(
    ("name", "changes", "trained"),
    [
        ("timm:test_vit", {}, {"head.weight", "head.bias"}),
        ("timm:vit_base_patch14_dinov2", {}, {"head.weight", "head.bias"}),
        ("torchvision:resnet18", {}, {"fc.weight", "fc.bias"}),
        ("torchvision:squeezenet1_1", {}, {"classifier.1.weight", "classifier.1.bias"}),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, {"classifier.weight", "classifier.bias"}),
    ],
)
def test_frozen_trains_only_the_head(config: Written, name: str, changes: dict[str, Any], trained: set[str]) -> None:
    workload = load_workload(name if ":" in name else config(name, **changes), [("frozen", "True")])
    with torch.device("meta"):
        parameters = workload.model().named_parameters()
        assert {name for name, parameter in parameters if parameter.requires_grad} == trained


@pytest.mark.parametrize("name", ["timm:test_vit", *(pytest.param(name, marks=SLOW) for name in ("bert", "llama"))])
def test_checkpointing_keeps_fewer_activations(config: Written, name: str) -> None:
    reference = name if ":" in name else config(name)
    assert activation_bytes(reference, checkpoint_activations=True) < 0.8 * activation_bytes(reference)


@pytest.mark.parametrize(("auxiliary", "weight"), [(1, 0.4), (2, 0.3)])
def test_auxiliary_classifiers_count_in_part(auxiliary: int, weight: float) -> None:
    logits, target = [torch.randn(4, 5) for _ in range(1 + auxiliary)], torch.arange(4)
    main, *others = (functional.cross_entropy(each, target) for each in logits)
    workload = load_workload("torchvision:inception_v3")
    assert workload.loss(tuple(logits), target) == pytest.approx(float(main + weight * sum(others)))
    assert workload.loss(logits[0], target) == main, "an evaluation has none"


def test_an_inspection_names_model_file_and_version(config: Written) -> None:
    reference = config("bert")
    found = load_target(Job(workload=reference, synthetic=True)).inspect()
    assert (found.workload_name, found.training_samples, found.batch_size) == ("BertForMaskedLM", 0, 8)
    assert dict(found.libraries).keys() == {"transformers"}
    assert found.workload_digest == source.digest(source.workload_files(reference)[0], found.workload_imports or ())
    other = load_target(Job(workload=config("bert", vocab_size=100), synthetic=True)).inspect()
    assert other.workload_digest != found.workload_digest
    digests = {
        load_target(Job(workload=f"timm:{name}", synthetic=True)).inspect().workload_digest
        for name in ("test_resnet", "resnet18", "test_vit")
    }
    assert len(digests) == 2, "two of the models are in one file"


@pytest.mark.parametrize(
    ("reference", "short"), [("timm:vit_tiny.augreg", "vit_tiny"), ("transformers:a/bert.json", "bert")]
)
def test_a_study_is_named_after_the_model(reference: str, short: str) -> None:
    assert Job(workload=reference).short_name == short


BERT = {"architectures": ["BertForMaskedLM"]}


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("timm:resnet5", {}, {}, "timm has no model 'resnet5'. Names like it: resnet5"),
        ("timm:xqzw", {}, {}, "timm has no model 'xqzw'. Check its name."),
        ("timm:", {}, {}, "timm has no model ''. Check its name."),
        ("timm:hf-hub:timm/resnet18.a1_in1k", {}, {}, "timm has no model 'hf-hub:timm/resnet18.a1_in1k'. "),
        ("timm:vit_tiny_patch16_224.augreg", {}, {}, "timm has no model .* Names like it: vit_tiny_patch16_224.augreg"),
        ("torchvision:resnet5", {}, {}, "torchvision has no model 'resnet5'. Names like it: resnet50, "),
        ("torchvision:ssd300_vgg16", {}, {}, "detection models are not supported by name. .* and measure it"),
        ("torchvision:quantized_resnet50", {}, {}, "quantized models are not supported by name."),
        ("timm:pit_ti_224", {}, {"checkpoint_activations": True}, "timm:pit_ti_224 does not support it"),
        ("torchvision:resnet18", {}, {"checkpoint_activations": True}, "expected an option of torchvision:resnet18"),
        ("timm:test_vit", {}, {"sequence_length": 8}, "expected an option of timm:test_vit"),
        ("timm:test_vit", {}, {"optimizer_name": "lion"}, "--set optimizer_name: got 'lion'"),
        ("timm:test_vit", {}, {"image_size": 0}, "--set image_size: got 0, expected a whole number of 1 or more"),
        ("bert", {}, {"sequence_length": 25}, "got 25, expected at most the model's max_position_embeddings, 24"),
        ("gpt2", {}, {"frozen": True}, "has no head with separate weights"),
        ("bert", {"architectures": ["BertModel"]}, {}, "BertModel has no head whose loss is known. Set architectures"),
        ("clip", {"architectures": ["CLIPModel"]}, {}, "CLIPModel has no head whose loss is known. Set architectures"),
        ("bertt", {}, {}, "transformers has no model_type 'bertt'. Names like it: bert, "),
        ("bert", {"model_type": None}, {}, "the file has no model_type. Name a config.json"),
        ("bert", {"hidden_size": "wide"}, {}, "transformers rejects the configuration: "),
        ("bert", {"hidden_size": 33}, {}, "building the model raised ValueError: "),
        ("bert", {"quantization_config": {}}, {}, "quantized models are not supported. Remove quantization_config"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_its_fix(
    config: Written, name: str, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    reference = name if ":" in name else config(name, **changes)
    with pytest.raises(BadInput, match=message):
        load_workload(reference, [(option, str(value)) for option, value in options.items()]).check()


def test_a_config_is_a_json_file_or_its_folder(config: Written, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(config("bert").partition(":")[2]).read_text())
    assert load_workload(f"transformers:{tmp_path}").batch_size == 8
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not a JSON file: json"):
        load_workload(f"transformers:{tmp_path}")
    with pytest.raises(BadInput, match=r"file not found, expected a config\.json"):
        source.check_reference("transformers:bert-base-uncased")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_job, "MODEL_LIBRARIES", ("absent_library",))
    with pytest.raises(BadInput, match=r"absent_library is not installed\. Install it with pip install"):
        source.check_reference("absent_library:resnet50")


def test_without_data_it_is_synthetic() -> None:
    with pytest.raises(BadInput, match=r"timm:test_vit has no data. Add --synthetic."):
        load_target(Job(workload="timm:test_vit")).inspect()
