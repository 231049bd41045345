"""Models of timm, torchvision and transformers as workloads without data: `timm:resnet50`, `transformers:CONFIG.json`.

Weights are random and nothing is downloaded. The fields of a class are the workload's options.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_track.records.errors import AmpTrackError, BadInput, BadOption, summary
from amp_track.targets import source
from amp_track.targets.base import imported
from amp_track.workload import Workload

_CLASSES = 1000
"""The classes of a model that comes without a head, such as ImageNet's."""
_SEQUENCE_LENGTH = 512
_OF_VIDEO = {"r3d_18": (16, 112), "mc3_18": (16, 112), "r2plus1d_18": (16, 112), "swin3d": (32, 224)}
"""Frames and image size of the video models, by the start of their name; 16 and 224 for the others."""
_HEADS = {
    "tokens": ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "TOKEN_CLASSIFICATION"),
    "sequence": ("SEQUENCE_CLASSIFICATION",),
    "image": ("IMAGE_CLASSIFICATION",),
}
"""The tasks of transformers whose batches are known, by what a label is for. Without `architectures`, the first task
that has the type of model is chosen."""


@dataclass(frozen=True)
class NamedModel(Workload):
    """A model with random weights. `load_named_model` makes a subclass for each name."""

    reference: ClassVar[str]
    source_file: ClassVar[Path]
    """The file that defines the model."""
    optimizer_name: Literal["sgd", "adam", "adamw", "rmsprop", "adafactor"] = "adamw"
    """sgd has momentum 0.9."""
    frozen: bool = False
    """Train only the head."""
    learning_rate = 1e-4
    batch_size = 32

    @abstractmethod
    def build(self) -> nn.Module:
        """Return a new model that trains all of its weights."""

    @abstractmethod
    def head(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Return the parameters of the head; none if it has no weights that are only its own."""

    def model(self) -> nn.Module:
        model = self.build()
        if self.frozen:
            head = {id(parameter) for parameter in self.head(model)}
            if not head:
                raise BadOption("frozen", f"{self.reference} has no head with separate weights")
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in head)
        return model

    def train_data(self) -> NoReturn:
        raise BadInput(f"{self.reference} has no data. Add --synthetic.")

    eval_data = train_data

    def score(self, output: Any, target: Tensor) -> Tensor:
        """Return zeros: without data there is no metric."""
        return torch.zeros(len(target), device=target.device)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer, fused where torch has it, as `Workload.optimizer` and transformers' Trainer choose."""
        match self.optimizer_name:
            case "adam":
                return super().optimizer(parameters, lr)
            case "adafactor":
                return torch.optim.Adafactor(parameters, lr=lr)
            case "rmsprop":
                return torch.optim.RMSprop(parameters, lr=lr)
        parameters = list(parameters)
        fused = all(parameter.device.type in ("cpu", "cuda", "xpu", "mps") for parameter in parameters)
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)
        return torch.optim.AdamW(parameters, lr=lr, fused=fused)

    def check(self) -> None:
        """Raise BadInput if an option does not apply: builds the model without memory."""
        for option in ("image_size", "sequence_length"):
            number = getattr(self, option, None)
            if number is not None and number < 1:
                raise BadOption(option, f"got {number}, expected a whole number of 1 or more")
        try:
            with torch.device("meta"):
                self.model()
        except AmpTrackError:
            raise
        except Exception as error:
            raise BadInput(f"{self.reference}: building the model raised {summary(error)}") from error

    def reject_checkpointing(self) -> BadOption:
        """Return the error of a model that cannot compute its activations again."""
        return BadOption("checkpoint_activations", f"{self.reference} does not support it")


@dataclass(frozen=True)
class TimmModel(NamedModel):
    """A model of timm that classifies images."""

    name: ClassVar[str]
    input_size: ClassVar[tuple[int, int, int]]
    classes: ClassVar[int]
    image_size: int | None = None
    """Height and width; the model's own by default."""
    checkpoint_activations: bool = False

    def build(self) -> nn.Module:
        import timm

        create = partial(timm.create_model, self.name, pretrained=False, num_classes=self.classes)
        model: Any = sized(create, "img_size", self.image_size)
        if self.checkpoint_activations:
            try:
                model.set_grad_checkpointing()
            except (AttributeError, AssertionError):
                raise self.reject_checkpointing() from None
        return model  # type: ignore[no-any-return]

    def head(self, model: Any) -> Iterable[nn.Parameter]:
        classifier = model.get_classifier()
        heads = classifier if isinstance(classifier, tuple) else (classifier,)  # a distilled model has two
        return nn.ModuleList(heads).parameters()

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        channels, *size = self.input_size
        size = [self.image_size] * 2 if self.image_size is not None else size
        return torch.zeros(batch_size, channels, *size), torch.zeros(batch_size, dtype=torch.int64)


@dataclass(frozen=True)
class TorchvisionModel(NamedModel):
    """A model of torchvision that classifies images, their pixels, or videos."""

    name: ClassVar[str]
    frames: ClassVar[tuple[int, ...]] = ()
    """The number of frames of a video."""
    own_size: ClassVar[int]
    has_pixel_labels: ClassVar[bool] = False
    image_size: int | None = None
    """Height and width; by default those of torchvision's training recipe."""

    def build(self) -> nn.Module:
        import torchvision

        more: dict[str, Any] = {}
        if self.has_pixel_labels:
            more = {"weights_backbone": None}  # or it would be downloaded
        elif self.name in ("inception_v3", "googlenet"):
            more = {"init_weights": False}  # their own initialization is slow, and warns unless it is chosen
        create = partial(torchvision.models.get_model, self.name, weights=None, **more)
        return sized(create, "image_size", self.image_size)

    def head(self, model: nn.Module) -> Iterable[nn.Parameter]:
        *_, last = (child for child in model.children() if any(True for _ in child.parameters()))
        return last.parameters()

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the cross entropy, with that of auxiliary classifiers weighted as in their papers."""
        logits, *auxiliary = output if isinstance(output, tuple) else (output,)
        loss = functional.cross_entropy(logits["out"] if self.has_pixel_labels else logits, target)
        weight = 0.4 if len(auxiliary) == 1 else 0.3  # Inception v3, GoogLeNet
        return loss + weight * sum(functional.cross_entropy(each, target) for each in auxiliary) if auxiliary else loss

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        size = (self.image_size or self.own_size,) * 2
        target = torch.zeros(batch_size, *(size if self.has_pixel_labels else ()), dtype=torch.int64)
        return torch.zeros(batch_size, 3, *self.frames, *size), target


@dataclass(frozen=True)
class TransformersModel(NamedModel):
    """A model of transformers that computes its own loss."""

    config: ClassVar[Any]
    model_class: ClassVar[Any]
    label_of: ClassVar[str]
    """A key of `_HEADS`."""
    checkpoint_activations: bool = False
    batch_size = 8

    def own_config(self) -> Any:
        """Return a copy of the configuration, with the settings of transformers' Trainer."""
        config = copy.deepcopy(self.config)
        config.use_cache = False
        return config

    def build(self) -> nn.Module:
        model = self.model_class(self.own_config())
        if self.checkpoint_activations:
            if not model.supports_gradient_checkpointing:
                raise self.reject_checkpointing()
            # transformers 5.24 has renamed it.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    def head(self, model: Any) -> Iterable[nn.Parameter]:
        """Return the parameters outside the base model: not those of an output layer that shares the embedding."""
        base = {id(parameter) for parameter in model.base_model.parameters()}
        return [parameter for parameter in model.parameters() if id(parameter) not in base]

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return output.loss  # type: ignore[no-any-return]

    def with_labels(self, batch_size: int, **input: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the batch whose labels are part of the model's input."""
        shape = input["input_ids"].shape if self.label_of == "tokens" else (batch_size,)
        is_regression = self.label_of == "sequence" and self.config.num_labels == 1
        labels = torch.zeros(shape, dtype=torch.float32 if is_regression else torch.int64)
        return {**input, "labels": labels}, labels


@dataclass(frozen=True)
class TransformersText(TransformersModel):
    """A language model, or a classifier of texts or tokens."""

    sequence_length: int | None = None
    """Tokens per sample: 512 by default, or the model's largest number if that is less."""

    def check(self) -> None:
        most = getattr(self.config, "max_position_embeddings", None)
        if self.sequence_length is not None and most is not None and self.sequence_length > most:
            problem = f"got {self.sequence_length}, expected at most the model's max_position_embeddings, {most}"
            raise BadOption("sequence_length", problem)
        super().check()

    def own_config(self) -> Any:
        config = super().own_config()
        if self.label_of == "sequence" and config.pad_token_id is None:
            config.pad_token_id = 0  # a classifier finds the last token of a text by it
        return config

    def example(self, batch_size: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return a padded batch: without padding, transformers would skip the attention mask."""
        most = getattr(self.config, "max_position_embeddings", None) or _SEQUENCE_LENGTH
        length = self.sequence_length or min(most, _SEQUENCE_LENGTH)
        tokens = torch.arange(batch_size * length).view(batch_size, length) % self.config.vocab_size
        attention_mask = torch.ones_like(tokens)
        attention_mask[:, -1:] = 0
        return self.with_labels(batch_size, input_ids=tokens, attention_mask=attention_mask)


@dataclass(frozen=True)
class TransformersImages(TransformersModel):
    """A classifier of images."""

    image_size: int | None = None
    """Height and width; the configuration's by default."""

    def own_config(self) -> Any:
        config = super().own_config()
        if self.image_size is not None and hasattr(config, "image_size"):
            config.image_size = self.image_size
        return config

    def example(self, batch_size: int) -> tuple[dict[str, Tensor], Tensor]:
        size = self.image_size or getattr(self.config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(self.config, "num_channels", 3)
        return self.with_labels(batch_size, pixel_values=torch.zeros(batch_size, channels, height, width))


def load_named_model(reference: str) -> type[NamedModel]:
    """Return the workload class of a reference. Raises BadInput for an unknown name or an unsupported model."""
    library, _, name = reference.partition(":")
    find = {"timm": _timm_model, "torchvision": _torchvision_model, "transformers": _transformers_model}[library]
    base, class_name, attributes = find(reference, name, imported(reference))
    return type(class_name, (base,), {"__module__": __name__, "reference": reference, **attributes})


_Found = tuple[type[NamedModel], str, dict[str, Any]]
"""The base class of a workload class, its name and its attributes."""


def _timm_model(reference: str, name: str, timm: ModuleType) -> _Found:
    name = timm.models.get_deprecated_models().get(name, name) or name  # an older name of a model
    if not timm.is_model(name):
        raise _unknown(reference, name, timm.list_models())
    architecture, _, tag = name.partition(".")
    if tag and reference.partition(":")[2] != name and not timm.models.is_model_pretrained(name):
        name = architecture  # timm has renamed the weights since
    try:
        own = timm.get_pretrained_cfg(name)
    except RuntimeError:
        raise _unknown(reference, name, timm.list_models(f"{architecture}.*", pretrained=True)) from None
    file = Path(inspect.getfile(timm.model_entrypoint(name)))
    classes = own.num_classes or _CLASSES  # 0: it comes without a head
    return TimmModel, name, {"name": name, "source_file": file, "input_size": own.input_size, "classes": classes}


def _torchvision_model(reference: str, name: str, torchvision: ModuleType) -> _Found:
    if name not in torchvision.models.list_models():
        raise _unknown(reference, name, torchvision.models.list_models())
    builder = torchvision.models.get_model_builder(name)
    *_, task, _ = builder.__module__.split(".")  # torchvision.models.segmentation.fcn, torchvision.models.resnet
    if task not in ("models", "segmentation", "video"):
        kind = {"quantization": "quantized"}.get(task, task.replace("_", " "))
        fix = "Write a Workload with its loss"
        fix += ", and measure it: the step depends on values, so it has no plan." if task == "detection" else "."
        raise BadInput(f"{reference}: {kind} models are not supported by name. {fix}")
    found = {"name": name, "source_file": Path(inspect.getfile(builder)), "has_pixel_labels": task == "segmentation"}
    size = {"models": 299 if name == "inception_v3" else 224, "segmentation": 480}.get(task)
    if size is None:
        frames, size = next((shape for start, shape in _OF_VIDEO.items() if name.startswith(start)), (16, 224))
        found["frames"] = (frames,)
    return TorchvisionModel, name, found | {"own_size": size}


def _transformers_model(reference: str, path: str, transformers: ModuleType) -> _Found:
    transformers.logging.set_verbosity_error()  # it warns about settings that matter only for generation
    file = source.config_file(path)
    config = _config(reference, file, transformers)
    model_class, label_of = _head_of(reference, config, transformers)
    base = TransformersImages if label_of == "image" else TransformersText
    found = {"config": config, "source_file": file, "model_class": model_class, "label_of": label_of}
    return base, model_class.__name__, found


def _config(reference: str, file: Path, transformers: ModuleType) -> Any:
    """Return the configuration in a file, without looking for anything on a hub. Raises BadInput if it is invalid."""
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{reference}: not a JSON file: {summary(error)}") from None
    model_type = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(model_type, str):
        raise BadInput(f"{reference}: the file has no model_type. Name a config.json of a transformers model.")
    if model_type not in transformers.CONFIG_MAPPING:
        near = _near(model_type, transformers.CONFIG_MAPPING)
        raise BadInput(f"{reference}: transformers has no model_type {model_type!r}. {near}")
    if "quantization_config" in data:
        raise BadInput(f"{reference}: quantized models are not supported. Remove quantization_config from the file.")
    # The one that transformers chooses; the file's might be a kernel on a hub.
    own = {key: value for key, value in data.items() if key not in ("attn_implementation", "_attn_implementation")}
    try:
        return transformers.CONFIG_MAPPING[model_type].from_dict(own)
    except Exception as error:
        raise BadInput(f"{reference}: transformers rejects the configuration: {summary(error)}") from error


def _head_of(reference: str, config: Any, transformers: ModuleType) -> tuple[Any, str]:
    """Return the model class, and what its label is for."""
    from transformers.models.auto import modeling_auto

    architecture = next(iter(config.architectures or ()), None)
    named = getattr(transformers, str(architecture), None)
    known = inspect.isclass(named) and issubclass(named, transformers.PreTrainedModel)
    for label_of, tasks in _HEADS.items():
        for task in tasks:
            by_type = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
            is_half = config.is_encoder_decoder and task != "SEQ_TO_SEQ_CAUSAL_LM"  # a decoder without its encoder
            if not known and not is_half and config.model_type in by_type:
                found = by_type[config.model_type]
                return getattr(transformers, found if isinstance(found, str) else found[0]), label_of
            names = [each for found in by_type.values() for each in ((found,) if isinstance(found, str) else found)]
            if known and architecture in names:
                return named, label_of
    raise BadInput(
        f"{reference}: {architecture or config.model_type} has no head whose loss is known. Set architectures in the "
        "file to a class for language modeling or for the classification of texts, tokens or images."
    )


def sized(create: Callable[..., nn.Module], argument: str, image_size: int | None) -> nn.Module:
    """Return the model for an image size, if `create` takes one by that argument: others accept any image."""
    if image_size is None:
        return create()
    try:
        return create(**{argument: image_size})
    except TypeError as error:
        if argument not in str(error):
            raise
        return create()


def _unknown(reference: str, name: str, names: Iterable[str]) -> BadInput:
    library = reference.partition(":")[0]
    return BadInput(f"{reference}: {library} has no model {name!r}. {_near(name, names)}")


def _near(name: str, names: Iterable[str]) -> str:
    by_lower = {each.lower(): each for each in names}
    wanted = name.lower().rpartition("/")[2]  # hf-hub:timm/resnet18.a1_in1k
    near = [by_lower[each] for each in difflib.get_close_matches(wanted, by_lower, n=3)]
    return f"Names like it: {', '.join(near)}." if near else "Check its name."
