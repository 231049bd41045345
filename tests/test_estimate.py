"""`amp_track.estimate`: the memory plan of a model, its optimizer and one batch, which all stay as they are."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import random
import resource
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from memory_plan.profiled import profiled_peak
from memory_plan.workloads import Layers, Wide
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import amp_track
from amp_track import BadInput, Estimate
from amp_track.config.job import Job
from amp_track.config.precisions import Precision
from amp_track.memory_plan import gpus
from amp_track.memory_plan.fake_step import FakeStep
from amp_track.memory_plan.predict import plan_precision
from amp_track.records.plan import Kernels, PlanTask
from amp_track.training.amp.tensors import tensors

SAMPLES, TOKENS, WORDS = 4, 32, 300
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": WORDS,
}
Batch = dict[str, Tensor]


def words(*, padded: bool = False, classes: bool = False) -> Batch:
    batch = {"input_ids": torch.randint(0, WORDS, (SAMPLES, TOKENS))}
    if padded:
        batch["attention_mask"] = (torch.arange(TOKENS) >= torch.arange(SAMPLES)[:, None]).long()
    return batch | {"labels": torch.zeros(SAMPLES, dtype=torch.int64) if classes else batch["input_ids"]}


def bert() -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(**SMALL)
    return transformers.BertForSequenceClassification(config), words(padded=True, classes=True)


def gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=WORDS, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    return transformers.GPT2LMHeadModel(config), words()


def llama() -> tuple[nn.Module, Batch]:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL)), words(padded=True)


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(image_size=32, patch_size=4, **{name: SMALL[name] for name in list(SMALL)[:4]})
    images = {"pixel_values": torch.randn(SAMPLES, 3, 32, 32), "labels": torch.zeros(SAMPLES, dtype=torch.int64)}
    return transformers.ViTForImageClassification(config), images


def convnext() -> tuple[nn.Module, Batch]:
    """Norms of few channels: in bf16 their float32 statistics are 1 % of all bytes."""
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1], image_size=64)
    images = {"pixel_values": torch.randn(SAMPLES, 3, 64, 64), "labels": torch.zeros(SAMPLES, dtype=torch.int64)}
    return transformers.ConvNextForImageClassification(config), images


def bart() -> tuple[nn.Module, Batch]:
    """The decoder makes a mask of ones itself, and drops it because no token is masked."""
    config = transformers.BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=WORDS,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), words()


def mixtral() -> tuple[nn.Module, Batch]:
    """Experts: each token goes to two of eight."""
    config = transformers.MixtralConfig(num_key_value_heads=2, pad_token_id=0, **SMALL)
    return transformers.MixtralForCausalLM(config), words()


def swin() -> tuple[nn.Module, Batch]:
    """The gradient that enters the backward pass of the last norm is transposed."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    images = {"pixel_values": torch.randn(SAMPLES, 3, 32, 32), "labels": torch.zeros(SAMPLES, dtype=torch.int64)}
    return transformers.SwinForImageClassification(config), images


def patchtst() -> tuple[nn.Module, Batch]:
    """A batch norm of transposed tensors."""
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=64, prediction_length=16, patch_length=8, patch_stride=8, d_model=64,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
    )  # fmt: skip
    series = {"past_values": torch.randn(SAMPLES, 64, 3), "future_values": torch.randn(SAMPLES, 16, 3)}
    return transformers.PatchTSTForPrediction(config), series


def led() -> tuple[nn.Module, Batch]:
    """Sizes are computed with tensors of known numbers."""
    config = transformers.LEDConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=WORDS, attention_window=8,
    )  # fmt: skip
    return transformers.LEDForConditionalGeneration(config), words()


def mamba() -> tuple[nn.Module, Batch]:
    """A loop over the tokens, each of which adds to the same gradients."""
    config = transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=WORDS, state_size=8)
    return transformers.MambaForCausalLM(config), words()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, which sees one cycle
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # transformers with torch up to 2.10
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [bert, gpt2, llama, bart, led, mixtral, vit, swin, convnext, patchtst, mamba])
def test_a_model_of_transformers_needs_what_the_profiler_sees(
    make: Callable[[], tuple[nn.Module, Batch]], precision: str
) -> None:
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, example = make()
    found = amp_track.estimate(model, example, optimizer, precision=precision, on_cuda=False)

    def run() -> None:
        model = make()[0].train()
        of_model = optimizer(model.parameters())
        for _ in range(2):
            batch = {name: tensor.clone() for name, tensor in example.items()}
            with Precision.named(precision).autocast("cpu"):
                loss = model(**batch).loss
            loss.backward()
            of_model.step()
            of_model.zero_grad()

    assert found.peak_bytes == pytest.approx(profiled_peak(run), rel=0.001)


class Module(pl.LightningModule):
    """Calls itself, logs, and configures an optimizer with a schedule."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in "abc"))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class Same(IterableDataset[Any]):
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Any:
        yield from [self.batch] * 2


def fit(module: pl.LightningModule, batch: Any, precision: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision=Precision.named(precision).in_tools["lightning"],  # type: ignore[arg-type]
    )
    trainer.fit(module, DataLoader(Same(batch), batch_size=None))


def example_of(samples: int, width: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width), torch.zeros(samples, dtype=torch.int64)


@pytest.mark.filterwarnings("ignore")  # of Lightning, for few workers, and of the profiler
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("samples", [8, 64, 512])
def test_a_lightning_module_needs_what_the_profiler_sees_of_its_trainer(samples: int, precision: str) -> None:
    """With 64 samples the peak is after the forward pass, when Lightning still holds the gradients before."""
    batch = example_of(samples)
    found = amp_track.estimate(Module, batch, None, precision=precision, on_cuda=False)
    seen_bytes = profiled_peak(lambda: fit(Module(), batch, precision)) + sum(each.nbytes for each in batch)
    assert found.peak_bytes == pytest.approx(seen_bytes, rel=0.001)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 4))


ADAM = torch.optim.Adam


class Draws(nn.Module):
    """Draws from all generators of the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        torch.default_generator.seed()
        return x * (random.random() + np.random.rand())


def test_nothing_of_the_training_changes() -> None:
    model = network().append(Draws())
    model[2].eval()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda *arguments: seen.append(arguments))
    optimizer = ADAM(model.parameters())
    optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments))
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    seen.clear()

    def state() -> list[Any]:
        numpy_state: Any = np.random.get_state(legacy=False)
        return [
            {name: tensor.clone() for name, tensor in model.state_dict().items()},
            [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None],
            [{name: value.clone() for name, value in of.items()} for of in optimizer.state_dict()["state"].values()],
            torch.get_rng_state(),
            torch.tensor(np.append(numpy_state["state"]["key"].astype(np.int64), numpy_state["state"]["pos"])),
            torch.tensor(random.getstate()[1]),
            torch.tensor([module.training for module in model.modules()]),
            torch.tensor([len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]),
            torch.tensor([torch.is_grad_enabled(), gc.isenabled()]),
        ]

    example = example_of(8)
    before = state()
    found = amp_track.estimate(model, example, optimizer, precision="amp")
    found.max_batch("64MiB")
    pairs = list(zip(tensors(before), tensors(state()), strict=True))
    assert all(type(one) is type(other) for one, other in pairs)
    assert [place for place, pair in enumerate(pairs) if not torch.equal(*pair)] == []
    assert not seen
    alive = weakref.ref(model)
    model = optimizer = None  # type: ignore[assignment]  # the last references
    gc.collect()
    assert alive() is None, "the estimate keeps the model"
    assert found.fits("64MiB")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("on_cuda", [True, False])
@pytest.mark.parametrize("settings", [{}, {"grad_accum": 3, "max_grad_norm": 1.0, "channels_last": True}])
def test_it_is_the_plan_of_the_same_workload(precision: str, on_cuda: bool, settings: dict[str, Any]) -> None:
    class Planned(Wide):
        def optimizer(self, parameters, lr):
            return ADAM(parameters)

    workload = Planned(width=64, depth=3)
    job = Job(workload="any", batch_size=16, learning_rate=1e-3, **settings)
    kernels = gpus.USUAL_KERNELS if on_cuda else Kernels()
    task = PlanTask(precisions=(), batch_size=16, targets=(), kernels=kernels, on_cuda=on_cuda)
    name = Precision.named(precision).name
    planned = plan_precision(FakeStep(job, workload, workload.example(2), as_cuda=on_cuda), name, task)
    found = amp_track.estimate(
        workload.model(), workload.example(16), ADAM, precision=precision, on_cuda=on_cuda, **settings
    )
    assert (found.precision, found.batch_size) == (name, 16)
    assert found.peak_bytes == planned.peak.reserved_bytes
    assert found.peak_allocated_bytes == planned.peak.allocated_bytes
    assert found.by_kind == {str(category): size for category, size in planned.peak.by_category}


def test_every_form_of_the_arguments_is_the_same_estimate() -> None:
    model, (inputs, targets) = network(), example_of(16)
    first, *others = [
        amp_track.estimate(model, (inputs, targets), ADAM),
        amp_track.estimate(model, [inputs, targets], ADAM(model.parameters())),
        amp_track.estimate(network().to("meta"), (inputs.to("meta"), targets), functools.partial(ADAM, lr=0.1)),
        amp_track.estimate(network, (inputs, targets), ADAM),
        amp_track.estimate(network, (inputs, targets), ADAM, loss=nn.CrossEntropyLoss()),
    ]
    assert all(other == first for other in others)


def test_groups_and_settings_of_an_optimizer_are_kept() -> None:
    model = network()
    one_group = ADAM(model.parameters(), amsgrad=True)
    only_last = torch.optim.AdamW([{"params": model[4].weight, "lr": 1.0, "fused": True}], fused=True)
    sizes = [
        amp_track.estimate(model, example_of(4), optimizer, on_cuda=False).by_kind["optimizer state"]
        for optimizer in (one_group, only_last)
    ]
    parameters = [parameter.nbytes for parameter in model.parameters()]
    assert sizes == [3 * sum(parameters) + 4 * len(parameters), 2 * model[4].weight.nbytes + 4]


def test_all_layers_are_listed_largest_first() -> None:
    found = amp_track.estimate(Layers(32, 30, "relu"), example_of(64, 32), ADAM)
    assert len(found.by_layer) > 30
    for sizes in (found.by_layer, found.by_kind):
        assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert sum(found.by_layer.values()) == sum(found.by_kind.values())
    assert sum(found.by_kind.values()) <= found.peak_allocated_bytes <= found.peak_bytes
    assert {"layers.0", "(optimizer)", "(workspaces)", "(batch)"} <= set(found.by_layer)


def test_the_max_batch_fits_and_one_sample_more_does_not() -> None:
    model = network()
    found = amp_track.estimate(model, example_of(8), ADAM, precision="bf16")
    limit = found.max_batch("48MiB")
    numbers = f"{limit.batch_size} (safe {limit.safe_batch_size}, at most {limit.most_batch_size})"
    assert (str(limit), "Holding" in repr(limit)) == (numbers, False)
    assert limit.bound == "memory"
    at_most, above = (
        amp_track.estimate(model, example_of(samples), ADAM, precision="bf16")
        for samples in (limit.batch_size, limit.batch_size + 1)
    )
    assert at_most.fits("48MiB")
    assert at_most.fits(48 * 2**20)
    assert not above.fits("48MiB")
    assert above.max_batch(np.int64(48 * 2**20)).batch_size == limit.batch_size
    assert found.max_batch("4090").target == "GeForce RTX 4090"
    assert found.max_batch("RTX 4090").batch_size > 100 * limit.batch_size


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("RTX 4091", "^device: got 'RTX 4091', expected a GPU such as GeForce RTX 4090.* For any other GPU give "),
        ("T4", r"^bf16 needs compute capability 8\.0 or newer; Tesla T4 has 7\.5"),
        (0, "^device: got 0, expected the name of a GPU, a size such as 6GiB, or a number of bytes, at least 1 MiB$"),
        (True, "^device: got True, expected"),
        (b"6GiB", "^device: got b'6GiB', expected"),
        (None, "^device: got None, expected"),
    ],
)
def test_an_unknown_device_is_bad_input(device: Any, message: str) -> None:
    found = amp_track.estimate(network, example_of(4), ADAM, precision="bf16")
    for method in (found.fits, found.max_batch):
        with pytest.raises(BadInput, match=message):
            method(device)


def test_a_gpu_has_no_rules_of_a_cpu() -> None:
    found = amp_track.estimate(network, example_of(4), ADAM, on_cuda=False)
    assert found.fits("1MiB")
    with pytest.raises(
        BadInput, match=r"^device: got 'RTX 4090', expected a size such as 6GiB, or a number of bytes, "
    ):
        found.fits("RTX 4090")


def shown(model: Any = network, example: Any = None, optimizer: Any = ADAM, **settings: Any) -> Estimate:
    return amp_track.estimate(model, example_of(4) if example is None else example, optimizer, **settings)


def of_others() -> torch.optim.Optimizer:
    return ADAM(network().parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"example": (torch.randn(4, 64), object())}, "^example: got a tuple of length 2, expected one batch"),
        ({"example": "text"}, "^example: got an object of type str, expected one batch"),
        ({"example": (torch.randn(4, 64),)}, "^example: got a tuple of length 1, expected one batch"),
        ({"example": example_of(0)}, "^example: .* at least 1$"),
        ({"example": torch.tensor(1.0)}, "^example: "),
        ({"example": torch.randn(4, 64)}, "^loss: the model's output has no loss. Give loss="),
        ({"optimizer": of_others()}, "the optimizer trains parameters that are not the model's"),
        ({"optimizer": None}, "^optimizer: got None, expected an optimizer of the model or a class"),
        ({"optimizer": lambda parameters: None}, "^optimizer: it returned None, expected"),
        ({"optimizer": lambda _: of_others()}, "^optimizer: the function made one of other parameters"),
        ({"model": network().requires_grad_(False)}, "^model: no parameter requires a gradient"),
        ({"model": Module, "loss": nn.functional.cross_entropy}, "^loss: a LightningModule has its own"),
        ({"optimizer": torch.optim.LBFGS}, r"LBFGS\.step needs closure"),
        ({"model": "network"}, "^model: got an object of type str, expected"),
        ({"model": lambda: 3}, "^model: got a function that returned an object of type int, expected"),
        pytest.param(
            {"model": lambda: torch.compile(network())},
            r"^model: torch\.compile changes what a step allocates\. Give",
            marks=pytest.mark.slow,  # imports the compiler
        ),
        ({"precision": "fp8"}, "^precision: got 'fp8', expected one of fp32"),
        ({"grad_accum": 0}, "^grad_accum: got 0, expected a whole number"),
        ({"max_grad_norm": -1.0}, r"^max_grad_norm: got -1\.0, expected a number above 0$"),
        ({"channels_last": "yes"}, "^channels_last: got 'yes', expected True or False$"),
        ({"model": nn.LSTM(64, 4), "loss": lambda output, _: output[0].sum()}, r"^\(model\): cuDNN keeps more of a"),
        (
            {"model": nn.Sequential(nn.LazyLinear(4))},
            "UninitializedParameter|uninitialized|dispatch failed",
        ),  # torch 2.9
    ],
)
def test_bad_arguments_are_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        shown(**arguments)


def test_a_loss_per_sample_is_rejected_as_in_a_workload() -> None:
    with pytest.raises(amp_track.TargetFailed, match=r"loss\(\) returned a tensor of shape \(4,\); it must return"):
        shown(loss=nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("act", ["numpy", "mask", "trim", "wrong"])
def test_the_line_that_cannot_be_planned_is_named(act: str) -> None:
    with pytest.raises(BadInput, match=r"tests.memory_plan.workloads\.py:\d+ \(return x .*without values"):
        shown(Layers(64, 2, act))


def test_a_loss_that_is_no_function_is_rejected() -> None:
    with pytest.raises(BadInput, match="loss: got 'mse', expected a function of output and target"):
        shown(loss="mse")


def test_a_number_that_is_read_is_noted() -> None:
    found = shown(Layers(64, 2, "item"))
    assert found.notes == ("(model): reads a number from a tensor; the plan assumes 1.",)
    assert found.notes[0] in str(found)


def test_it_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = dataclasses.replace(gpus.USUAL_KERNELS, blas_lt_workspace_bytes=0)  # depends on the release of torch
    monkeypatch.setattr(gpus, "USUAL_KERNELS", kernels)
    found = shown()
    first, *others = str(found).splitlines()
    assert first == "Predicted peak of fp32 at batch 4: 22 MiB reserved, 16.6 MiB allocated"
    assert others[0].startswith("  workspaces 16.2 MiB, ")
    assert others[1].startswith("  largest layers: (workspaces) 16.2 MiB, ")
    assert "optimizer state" in (found._repr_html_() or "")
    assert found.as_json()["peak_bytes"] == found.peak_bytes == 22 * 2**20


def test_a_recurrent_layer_is_planned_for_a_cpu() -> None:
    model = nn.LSTM(64, 4, batch_first=True)
    found = shown(model, torch.randn(2, 3, 64), loss=lambda output, target: output[0].sum(), on_cuda=False)
    assert found.by_kind["parameters"] == sum(parameter.nbytes for parameter in model.parameters())


def test_a_weight_that_a_hook_of_torch_computes_is_trained() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 4)), nn.Tanh())
    found = shown(model, on_cuda=False)
    trained = sum(parameter.nbytes for parameter in model.parameters())
    assert found.by_kind["optimizer state"] == 2 * trained + 4 * 3


def test_the_context_of_the_caller_does_not_matter() -> None:
    expected = shown()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert shown() == expected
    with torch.inference_mode():
        assert shown() == expected


def test_cuda_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer asks whether its step is captured, which takes memory of the GPU if there is one."""

    def initialized() -> None:
        raise AssertionError("this would initialize CUDA")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", initialized)  # torch 2.11
    with pytest.raises(AssertionError, match="this would initialize CUDA"):
        ADAM([nn.Parameter(torch.zeros(1))]).step()
    assert shown().fits("RTX 4090")
    assert torch.cuda.is_available()


def test_billions_of_parameters_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = amp_track.estimate(lambda: Layers(16384, 26, "relu"), example_of(64, 16384), ADAM, precision="bf16")
    assert found.by_kind["parameters"] > 4 * 6.9e9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 100 * 2**20


class WithLoss(nn.Module):
    """Returns a mapping with its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 1000)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_an_output_is_freed_where_the_model_computes_its_loss() -> None:
    """As with `model(**example).loss`: the logits do not live in the backward pass, unless the loss is the user's."""
    example = dict(zip(("x", "labels"), example_of(512), strict=True))
    sizes = [
        shown(WithLoss, example, loss=loss, on_cuda=False).peak_bytes
        for loss in (None, lambda output, _: output["loss"])
    ]
    assert sizes[1] - sizes[0] == 512 * 1000 * 4


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReadsItsTrainer(Module):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0) / self.trainer.max_epochs


class Several(Module):
    def configure_optimizers(self) -> Any:
        return [ADAM(self.net[0].parameters()), ADAM(self.net[1].parameters())]


class Dictionary(Module):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return {"loss": super().training_step(batch, 0)}

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.AdamW(self.parameters()), "monitor": "train_loss"}


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1 / (self.trainer.max_epochs or 1))


def test_a_lightning_module_brings_its_loss_and_its_optimizer() -> None:
    module, batch = Module(), example_of(8)
    first = shown(module, batch, None)
    assert shown(module, batch, module.configure_optimizers()[0][0]) == first
    assert shown(Dictionary, batch, None) == first
    assert module.log.__func__ is pl.LightningModule.log  # type: ignore[attr-defined]
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "it steps its optimizers itself"),
        (Several, r"configure_optimizers\(\) does not return a single"),
        (ReadsItsTrainer, r"not attached to a `Trainer`, as in a plan\. Skip what needs one if self\._trainer is None"),
        (Scheduled, r"not attached to a `Trainer`\. Pass the optimizer, such as torch\.optim\.AdamW, instead of None"),
    ],
)
def test_a_lightning_module_with_several_updates_is_rejected(module: type[Module], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        shown(module, example_of(8), None)
