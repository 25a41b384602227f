"""The programs behind published measurements of GPU memory: models and training loops, from a row of their table.

The table has the columns source, model, family, batch, precision, optimizer, image_or_seq, gpu, measured_mib,
measured_kind and notes. torchvision and timm are taken where they are installed; a row without its model's definition
is left out.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Row = Mapping[str, str]
SAMPLES: Final = 4096  # of the data sets of GPUMemNet's generated networks
IMAGENET: Final = 1_281_167  # images to train with
_MOST_FILTERS: Final = 2048  # of GPUMemNet's generated CNNs
_LEAST_SIDE: Final = 7  # pixels; residual networks keep the size of smaller images
_STEPS: Final = 3
# Operators that torchvision's library has in C++: a build for another torch does not load, and no model here needs one.
_OPERATORS: Final = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align"),
    *("_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
)
_ACTIVATIONS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "leaky": nn.LeakyReLU, "prelu": nn.PReLU, "elu": nn.ELU,
    "selu": nn.SELU, "tanh": nn.Tanh, "softplus": nn.Softplus, "swish": nn.SiLU, "mish": nn.Mish, "gelu": nn.GELU,
    "identity": nn.Identity,
}  # fmt: skip
_TRANSFORMERS: Final = ("bert", "xlnet", "gpt2")
# Names of tables that torchvision's own do not begin with, in small letters and without signs.
_TORCHVISION: Final = {"mobenetv3": "mobilenetv3", "efficientnet": "efficientnetb0", "inception": "inceptionv3",
                       "mobilenet": "mobilenetv2"}  # fmt: skip
_XLNET_BASE: Final = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
_LORA_RANK: Final = 8
_ALPACA_TOKENS: Final = 1304  # of litgpt's longest sample, by Llama's words
_LOSS_TOKENS: Final = 128  # of litgpt's chunks of the loss


class NoDefinitionError(Exception):
    """The model of a row is not at hand; the message says why."""


@dataclass(kw_only=True)
class Program:
    """A training loop on a GPU."""

    model: nn.Module
    batch_of: Callable[[int], tuple[Any, Tensor]]  # inputs and labels, made on the host, of a number of samples
    batches: Sequence[int]  # sizes, in order
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    evaluated: Sequence[int] = ()  # sizes of batches without gradients, at the end
    looked_at: int = 0  # samples of a first pass that shows the layers
    clears_late: bool = False  # whether gradients are cleared after the forward pass
    keeps_gradients: bool = False  # whether cleared gradients stay, as zeros
    autocast: bool = False  # of the backward pass, too
    # Whether timm's loader makes the batches, on the GPU, in a stream of its own, and cuDNN tries its algorithms in the
    # first step, which leaves nothing in the allocator's cache.
    by_timm: bool = False
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy

    def run(self) -> None:
        """Trains; a loop's names outlive its steps, and hold batch, outputs and loss until they are bound again."""
        optimizer = self.optimizer(list(self.model.parameters()))
        loaded = self._loaded() if self.by_timm else ()
        if self.looked_at:
            inputs, labels = (_moved(part) for part in self.batch_of(self.looked_at))
            self.model(inputs)
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.autocast):
            for step, size in enumerate(self.batches):
                images, labels = self.batch_of(size)
                inputs, labels = loaded[0] if loaded else _moved(images), _moved(labels)
                if not self.clears_late:
                    optimizer.zero_grad(set_to_none=not self.keeps_gradients)
                outputs = self.model(inputs)
                loss = self.loss(outputs, labels)
                if self.clears_late:
                    optimizer.zero_grad()
                loss.backward()
                if self.by_timm and step == 0:
                    torch.cuda.empty_cache()
                optimizer.step()
        self._forward(self.evaluated)

    def _loaded(self) -> Sequence[Tensor]:
        """Returns the tensors that timm's loader holds: the batch that is trained, the next one while it is scaled (a
        copy), and its images as bytes. No other stream gets this memory.
        """
        images, _ = self.batch_of(self.batches[0])
        return [*(_moved(images) for _ in range(3)), _moved(images.flatten()[: -(-images.numel() // 4)])]

    def _forward(self, sizes: Sequence[int]) -> None:
        self.model.eval()
        with torch.no_grad():
            for size in sizes:
                inputs, _ = (_moved(part) for part in self.batch_of(size))
                self.model(inputs)
        self.model.train()


def _moved(value: Any) -> Any:
    return value.to("cuda") if isinstance(value, Tensor) else {name: part.to("cuda") for name, part in value.items()}


def program_of(row: Row, batch: int | None = None) -> Program:
    """Returns the program of a row, with a batch of its own where one is given; raises NoDefinitionError."""
    size, family = batch or int(row["batch"]), row["family"]
    on_meta = {"mlp": _generated_mlp, "cnn-generated": _generated_cnn, **dict.fromkeys(_TRANSFORMERS, _transformer),
               "llm-lora": _lora}  # fmt: skip
    # Some of these models compute their own shapes with tensors, which takes values.
    with_values = {"cnn": _torchvision, "torchvision": _torchvision, "timm": _timm}
    if family in with_values:
        return with_values[family](row, size)
    if family not in on_meta:
        raise NoDefinitionError("no network of this family is defined here")
    with torch.device("meta"):
        return on_meta[family](row, size)


def _adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, foreach=True)


_KEYS: Final = "input_channels|num_classes|input_size|base_filters|input|output|depth|arch|batch|act|dropout|batchnorm"


def _settings(row: Row) -> dict[str, str]:
    """Reads `input:2302_arch:uniform_dropout:0.4_dropout:True`; of two values, the second one says whether it is on."""
    return dict(re.findall(rf"(?:^|_)({_KEYS}):(.*?)(?=_(?:{_KEYS}):|$)", row["model"]))


def _vectors(width: int, classes: int) -> Callable[[int], tuple[Any, Tensor]]:
    return lambda size: (torch.zeros(size, width), torch.zeros(size, max(classes, 1), dtype=torch.int64)[:, 0])


def _images(channels: int, side: int) -> Callable[[int], tuple[Any, Tensor]]:
    return lambda size: (torch.zeros(size, channels, side, side), torch.zeros(size, dtype=torch.int64))


def _last(samples: int, size: int) -> list[int]:
    """Returns the sizes of an epoch's last, smaller batch, and of a full one after it."""
    return [samples % size, size] if samples % size else []


def _generated_mlp(row: Row, size: int) -> Program:
    own = _settings(row)
    width, classes, depth = int(own["input"]), int(own["output"]), int(own["depth"])
    widths = list(_mlp_widths(own["arch"], width, classes, depth))
    layers: list[nn.Module] = []
    for before, after in zip([width, *widths], widths, strict=False):
        layers += _layer(nn.Linear(before, after), nn.BatchNorm1d(after), own)
    layers.append(nn.Linear([width, *widths][-1], classes))
    # The second generation of networks has activations of its own, and one at the end.
    if "act" in own:
        layers.append(nn.Softmax(dim=1))
    if classes == 1:
        raise NoDefinitionError("one output: its last layer was drawn by lot")
    return Program(
        model=nn.Sequential(*layers), batch_of=_vectors(width, classes), optimizer=_adam, looked_at=2,
        batches=[size] * _STEPS + _last(SAMPLES, size),
    )  # fmt: skip


def _mlp_widths(shape: str, width: int, classes: int, depth: int) -> Iterator[int]:
    step = (width - classes) // depth
    for _ in range(depth + (shape == "bottleneck")):
        if shape == "gradual":
            width = max(width - step, classes)
        elif shape != "uniform":
            width = max(width // 2, classes)
        yield width


def _layer(weights: nn.Module, norm: nn.Module, own: Mapping[str, str]) -> Iterator[nn.Module]:
    yield weights
    if own.get("batchnorm") == "True":
        yield norm
    yield _ACTIVATIONS[own.get("act", "relu")]()
    if own.get("dropout") == "True":
        yield nn.Dropout(0.5)


def _generated_cnn(row: Row, size: int) -> Program:
    own = _settings(row)
    channels, classes, side = int(own["input_channels"]), int(own["num_classes"]), int(own["input_size"])
    if classes == 1:
        raise NoDefinitionError("one output, with another loss")
    filters = list(_cnn_filters(own["arch"], int(own["base_filters"]), int(own["depth"])))
    layers: list[nn.Module] = []
    before, width = channels, side
    for index, after in enumerate(filters):
        if own["arch"] == "residual":
            stride = 2 if index % 2 and width > _LEAST_SIDE else 1
            layers.append(_Residual(before, after, stride, own))
            width //= stride
        else:
            layers += _convolution(before, after, 1, own)
        before = after
        if own["arch"] == "residual" and width <= _LEAST_SIDE:
            break
    head = (nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(before, classes), nn.Softmax(dim=1))
    return Program(
        model=nn.Sequential(*layers, *head), batch_of=_images(channels, side), optimizer=_adam, looked_at=2,
        batches=[size] * _STEPS + _last(SAMPLES, size),
    )  # fmt: skip


def _cnn_filters(shape: str, base: int, depth: int) -> Iterator[int]:
    """Yields the filters of each layer, or of each residual block."""

    def grown(steps: float, exponent: int) -> int:
        return int(base * ((_MOST_FILTERS / base) ** (1 / steps)) ** exponent)

    half = depth // 2
    for index in range(half if shape == "residual" else depth):
        if shape == "uniform":
            yield base
        elif shape == "gradual":
            yield min(grown(2 * depth, index), _MOST_FILTERS)
        elif shape == "bottleneck" and index == 0:
            yield 2 * base
        elif shape == "bottleneck":
            yield min(grown(depth - 1, index - 1) if depth > 2 else base * 2 ** (index - 1), _MOST_FILTERS)
        elif shape == "hourglass" and index >= half:
            yield max(grown(depth - half, depth - index - 1), base)
        else:
            yield min(grown(half if shape == "hourglass" else depth, index), _MOST_FILTERS)


def _convolution(before: int, after: int, stride: int, own: Mapping[str, str]) -> Iterator[nn.Module]:
    return _layer(nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), own)


class _Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, before: int, after: int, stride: int, own: Mapping[str, str]) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolution(before, after, stride, own), *_convolution(after, after, 1, own))
        norm = nn.BatchNorm2d(after) if own.get("batchnorm") == "True" else nn.Identity()
        is_same = before == after and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(before, after, 1, stride), norm)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [N, C, H, W] features of [N, B, H × stride, W × stride] ones."""
        residual = self.shortcut(x)
        total: Tensor = self.body(x) + residual
        return total


def _transformer(row: Row, size: int) -> Program:
    hugging = import_module("transformers")
    length, large = int(row["image_or_seq"]), "large" in row["model"]
    if row["family"] == "gpt2":
        raise NoDefinitionError("trained on several GPUs at once")
    if row["family"] == "bert":
        wide = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        words = 30522 if "uncased" in row["model"] else 28996
        model = hugging.BertForMaskedLM(hugging.BertConfig(vocab_size=words, **(wide if large else {})))
    else:
        model = hugging.XLNetForSequenceClassification(hugging.XLNetConfig(**({} if large else _XLNET_BASE)))

    def batch_of(samples: int) -> tuple[Any, Tensor]:
        words = torch.zeros(samples, length, dtype=torch.int64)
        labels = words if row["family"] == "bert" else words[:, 0]
        return {"input_ids": words, "labels": labels}, labels

    model.forward = _by_name(model.forward)
    return Program(
        model=model, batch_of=batch_of, batches=[size] * _STEPS, loss=lambda outputs, labels: outputs.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    )  # fmt: skip


def _by_name(forward: Callable[..., Any]) -> Callable[[Mapping[str, Tensor]], Any]:
    return lambda inputs: forward(**inputs)


class _Lora(nn.Module):
    """A layer that is not trained, and the product of two narrow ones beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.05)
        self.narrow = nn.Linear(layer.in_features, _LORA_RANK, bias=False, dtype=torch.bfloat16)
        self.widen = nn.Linear(_LORA_RANK, layer.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., O] features of [..., I] ones."""
        total: Tensor = self.layer(x) + self.widen(self.narrow(self.drop(x)))
        return total


def _lora(row: Row, size: int) -> Program:
    if not row["model"].startswith("Llama-2-13B"):
        raise NoDefinitionError("only Llama 2 with 13 billion weights is defined here")
    hugging = import_module("transformers")
    shape = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
    model = hugging.LlamaForCausalLM(hugging.LlamaConfig(use_cache=False, **shape)).to(torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, _Lora(getattr(layer.self_attn, name)))

    def batch_of(samples: int) -> tuple[Any, Tensor]:
        words = torch.zeros(samples, _ALPACA_TOKENS, dtype=torch.int64)
        return {"input_ids": words}, words

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        chunks = zip(outputs.logits.split(_LOSS_TOKENS, 1), labels.split(_LOSS_TOKENS, 1), strict=True)
        return torch.cat([F.cross_entropy(scores.flatten(0, 1), words.flatten(), reduction="none")
                          for scores, words in chunks]).mean()  # fmt: skip

    model.forward = _by_name(model.forward)
    return Program(
        model=model, batch_of=batch_of, batches=[size] * _STEPS, loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(filter(_is_trained, parameters), foreach=True),
    )  # fmt: skip


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _vision_network(name: str, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Returns a network by its name in a table, which writes torchvision's and timm's in ways of its own."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if plain.startswith("xception"):
        network: nn.Module = import_vision("timm").create_model("legacy_xception", num_classes=classes)
        return network
    models = import_vision("torchvision.models")
    for given, known in _TORCHVISION.items():
        if plain == given or (plain.startswith(given) and given == "mobenetv3"):
            plain = plain.replace(given, known)
    names = {re.sub(r"_", "", each): each for each in models.list_models(module=models)}
    # A family without a size: MnasNet is its network of width 1.0.
    found = names.get(plain) or names.get(f"{plain}10")
    if found is None:
        raise NoDefinitionError(name)
    network = getattr(models, found)(num_classes=classes, **(options if found.startswith("inception") else {}))
    assert isinstance(network, nn.Module)
    return network


def _torchvision(row: Row, size: int) -> Program:
    is_xmem = row["family"] == "torchvision"
    # MobileNets of xMem have as many classes as CIFAR10, all other networks 1000.
    classes = 10 if is_xmem and re.match("mobe|mobile", row["model"].lower()) else 1000
    model = _vision_network(row["model"], classes, {"aux_logits": False, "init_weights": False})
    kind = row["optimizer"].split()[0]
    return Program(
        model=model,
        batch_of=_images(3, int(row["image_or_seq"])),
        batches=[size] * _STEPS + ([] if is_xmem else _last(IMAGENET, size)),
        optimizer=lambda parameters: getattr(torch.optim, kind)(parameters, lr=1e-3, foreach=True),
        evaluated=() if is_xmem else (size, size),
        clears_late=is_xmem,
    )


def _timm(row: Row, size: int) -> Program:
    timm = import_vision("timm")
    # Names of earlier versions are not listed, and lead to the same networks.
    if not timm.is_model(row["model"]):
        raise NoDefinitionError(f"timm {timm.__version__} has no {row['model']}")
    is_benchmark = bool(row["precision"].startswith("amp"))
    # PyTorch 1.12, of the benchmark, had no fused attention.
    import_module("timm.layers").set_fused_attn(enable=not is_benchmark)
    try:
        model = timm.create_model(row["model"])
    except RuntimeError as error:
        # An earlier name may lead to weights that are no longer there.
        raise NoDefinitionError(f"timm {timm.__version__} has no {row['model']}") from error
    side = int(row["image_or_seq"]) if row["image_or_seq"].isdigit() else model.default_cfg["input_size"][-1]
    if side != model.default_cfg["input_size"][-1] and model.default_cfg.get("fixed_input_size", False):
        raise NoDefinitionError(f"{row['model']} has another input size today")
    if "channels_last" in row["notes"]:
        model = model.to(memory_format=torch.channels_last)

    def images(samples: int) -> tuple[Tensor, Tensor]:
        made, labels = _images(3, side)(samples)
        return (made.contiguous(memory_format=torch.channels_last), labels) if is_nhwc else (made, labels)

    is_nhwc = "channels_last" in row["notes"]
    # The loop of the other rows is not published; it is taken to be timm's train.py.
    return Program(
        model=model, batch_of=images, batches=[size] * _STEPS, autocast=is_benchmark, keeps_gradients=is_benchmark,
        by_timm=not is_benchmark,
        optimizer=partial(_sgd, foreach=False) if is_benchmark else _decaying_sgd,
    )  # fmt: skip


def _sgd(parameters: Any, *, foreach: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True, foreach=foreach)


def _decaying_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns SGD as timm's train.py makes it by default: biases and weights of norms do not decay."""
    kept, decaying = ([each for each in parameters if (each.ndim > 1) == decays] for decays in (False, True))
    return _sgd([{"params": kept, "weight_decay": 0.0}, {"params": decaying, "weight_decay": 2e-5}], foreach=True)


def import_vision(package: str) -> Any:
    """Imports torchvision, or a package that needs it; raises NoDefinitionError where that is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise NoDefinitionError(f"{package} is not installed") from error


def allow_foreign_torchvision() -> None:
    """Makes a torchvision that was built for another torch importable: its operators are declared, not defined."""
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)
        import_module("torchvision")


_declared: Final[list[torch.library.Library]] = []  # declarations end with their library
