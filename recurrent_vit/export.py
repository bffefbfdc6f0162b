"""A model as one ONNX file whose number of steps is an input, in fp32 or int8; and as a torch.export program.

    recurrent-vit export bvit bvit.onnx

    session = onnxruntime.InferenceSession("bvit.onnx")
    (logits,) = session.run(None, {"image": images, "steps": numpy.array(24)})    # float32 (B, 3, 32, 32), int64 ()

What is notable:

- The step is written once, as the body of a Loop node that counts the input `steps` down: the file is as large as the
  weights, whatever the number of steps. A solver's arithmetic is in the body.
- A graph can't raise: with `steps` of 0 or below it takes no step, and gives the logits of the initial state. There is
  no upper bound. Whoever takes the number from a stranger has to bound it.
- Inside the file, matrices are stored as they are multiplied (in x out). torch stores them transposed, and a Transpose
  between weight and product, one for each evaluation of a solver, would keep the product from being quantised.
- int8: weights per output channel, activations per tensor, at run time, where a matrix is multiplied with a weight; all
  else, the two products inside attention among it, is fp32. What the last layer of an MLP reads, in a gate a product of
  two numbers, has rare large values in few tokens, which would set the scale for all: each token is divided by its
  largest value before, and the product multiplied by it after, which in exact arithmetic changes nothing.
- The quantised products are counted, since the quantiser leaves out, without a word, those it doesn't understand.
- The file says what it is (`metadata_props`): classes, mean, std, trained horizon, solver, licence, source, versions.
"""

import copy
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop  # a prototype, without a public name in torch 2.14

from . import files, machine, weights
from .limits import bounded_horizon
from .model import RecurrentVisionTransformer, ResidualBlock, check_model

__all__ = [
    "block_to_onnx", "check_packages", "check_target", "copy_for_inference", "export_onnx", "export_program",
    "module_to_onnx",
]  # fmt: skip

SUFFIX = ".onnx"
LOCK = threading.RLock()  # held while torch traces, which only one thread of a process can
TINY = 1e-30  # keeps a token of zeros from being divided by zero
MAX_UNROLLED = 1_000  # block applications in one graph; tracing them takes time
# 7 bits for weights: on x86 without VNNI, sums of two 8-bit products saturate (onnxruntime's advice on quantisation)
INT8 = {"per_channel": True, "reduce_range": True}
BY_TOKEN = "fc2"  # the last layer of an MLP


def export_onnx(
    model: nn.Module, path: str | os.PathLike, fixed_horizon: int | None = None, int8: bool = False
) -> dict[str, str]:
    """Write a model as one ONNX file, with inputs `image` (B, in_chans, H, W) and `steps` (), and output `logits`.

    The file holds the weights in float32, whatever the model's dtype and device, takes any batch size, and runs in
    evaluation mode. The model stays as it is. Its hooks are not part of the file.

    Args:
        model: A `RecurrentVisionTransformer`.
        path: A file that ends in .onnx. It appears whole or not at all; an existing one is replaced.
        fixed_horizon: Write so many steps one after the other, without a loop and without the input `steps`, for a
            runtime that has no loops.
        int8: Quantise the products with weights, to less than a third of the size.

    Returns:
        The metadata in the file. Lists and numbers are JSON.

        - model, checkpoint, sha256: name of the architecture; the published checkpoint with these weights, or ""; of
          the weights as a safetensors file
        - input_size: channels, height, width
        - license: of that checkpoint, or ""
        - classes, mean, std, interpolation, crop_pct: as `model.pretrained_cfg` has them; classes only if there are as
          many as the model has
        - trained_horizon: steps * stages, what to give as `steps` unless something speaks for another number
        - fixed_horizon: null, or the number of steps that is built in
        - depth, solver, field, step_size, nfe_per_step, precision, versions

    Raises:
        ValueError: The model can't be exported, or an argument is out of its range.
        FileNotFoundError: The folder of `path` doesn't exist.
        OSError: The file could not be written; an existing one is as it was.
        ImportError: A package of the extra `export` is missing; says how to install it.
        RuntimeError: Not all products were quantised: a bug of ours, or a release of onnxruntime that we don't know.
    """
    check_target(path, int8)
    twin = copy_for_inference(model)
    horizon = _checked_horizon(twin, fixed_horizon)
    facts = _facts(twin, horizon, int8)
    _store_as_multiplied(twin, int8)
    proto = _to_onnx(twin, horizon)
    if int8:
        proto = _quantised(proto, _count_in_graph(twin, horizon))
    content = _finished(proto, facts)
    files.write_atomically(Path(path), lambda file: file.write(content))
    return facts


def export_program(model: nn.Module, fixed_horizon: int | None = None) -> torch.export.ExportedProgram:
    """The model as a torch.export program of (image, steps), or of (image) with a fixed horizon, for any batch size.

    As in the ONNX file, `steps` is an int64 tensor (), and the weights are float32, on the CPU. The model stays as it
    is.

    Args:
        model: A `RecurrentVisionTransformer`.
        fixed_horizon: As in :func:`export_onnx`.

    Raises:
        ValueError: The model can't be exported, or `fixed_horizon` is out of its range.

    Example:
        >>> import timm, recurrent_vit
        >>> program = export_program(timm.create_model("bvit", embed_dim=16, num_heads=2, num_classes=10))
        >>> program.module()(torch.randn(5, 3, 32, 32), torch.tensor(24)).shape
        torch.Size([5, 10])
    """
    twin = copy_for_inference(model)
    module, arguments, dynamic = _traceable(twin, _checked_horizon(twin, fixed_horizon))
    dynamic["image"] = {0: torch.export.Dim("batch")}
    with _plain_tracing():
        return torch.export.export(module, arguments, dynamic_shapes=dynamic)


def check_target(path: str | os.PathLike, int8: bool = False) -> None:
    """Whether :func:`export_onnx` could write there: to be asked before the model is loaded.

    Raises:
        ValueError: The name doesn't end in .onnx.
        FileNotFoundError: Its folder doesn't exist.
        IsADirectoryError: It is a folder.
        ImportError: A package of the extra `export` is missing.
    """
    if Path(path).suffix != SUFFIX:
        raise ValueError(f"file {str(path)!r} must end in {SUFFIX}")
    files.check_target(path, "file")
    check_packages("onnx", "onnxscript", *(["onnxruntime"] if int8 else []))


def check_packages(*names: str) -> None:
    """Import these packages of the extra `export`.

    Raises:
        ImportError: One is missing; says how to install it.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise ImportError(f'this needs {name}: pip install "recurrent-vit[export]"') from error


def block_to_onnx(block: ResidualBlock, residual: bool, int8: bool = False) -> bytes:
    """One block as the content of an ONNX file: `x` (B, N, C) to F(x), or to R(x) if `residual`.

    Args:
        block: A `ResidualBlock` in float32, on the CPU, in evaluation mode. It stays as it is.
        residual: Which of the two.
        int8: Quantise the products with weights.

    Raises:
        RuntimeError: As in :func:`export_onnx`.
    """
    attention: Any = block.attn
    x = torch.zeros(2, 3, attention.qkv.in_features, dtype=torch.float32)
    return module_to_onnx(_Block(block, residual), x, {0: "batch", 1: "tokens"}, int8)


def module_to_onnx(module: nn.Module, x: Tensor, dynamic: dict[int, str], int8: bool = False) -> bytes:
    """Any module of one input and one output as the content of an ONNX file, with input `x` and output `y`.

    Args:
        module: In float32, on the CPU, in evaluation mode. It stays as it is.
        x: An input to trace it with.
        dynamic: Names of the dimensions of x that may change.
        int8: Quantise the products with weights, those of layers called `fc2` token by token.

    Raises:
        RuntimeError: As in :func:`export_onnx`.
    """
    module = copy.deepcopy(module).eval()
    _store_as_multiplied(module, int8)
    proto = _trace(module, (x,), {"x": dynamic}, "y")
    if int8:
        proto = _quantised(proto, _count_products(module))
    return _finished(proto, {})


# ---- what is exported ------------------------------------------------------------------------------------------------


class _AnySteps(nn.Module):
    """Images (B, in_chans, H, W) and a number of steps () to logits."""

    def __init__(self, model: RecurrentVisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, steps: Tensor) -> Tensor:
        def is_left(remaining: Tensor, z: Tensor) -> Tensor:
            return remaining > 0

        def step(remaining: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return remaining - 1, self.model.step(z)

        z = self.model.initial_state(image)  # contiguous, as the loop's own states are, whose strides may not change
        _, z = while_loop(is_left, step, (steps, z))
        return self.model.forward_head(self.model.norm(z))


class _FixedSteps(nn.Module):
    """Images (B, in_chans, H, W) to logits, after a number of steps that is known."""

    def __init__(self, model: RecurrentVisionTransformer, horizon: int) -> None:
        super().__init__()
        self.model = model
        self.horizon = horizon

    def forward(self, image: Tensor) -> Tensor:
        z = self.model.initial_state(image)
        for _ in range(self.horizon):
            z = self.model.step(z)
        return self.model.forward_head(self.model.norm(z))


class _Block(nn.Module):
    """A block's F(x), or its R(x)."""

    def __init__(self, block: nn.Module, residual: bool) -> None:
        super().__init__()
        self.block = block
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, residual=self.residual)
        return y


class _Product(nn.Module):
    """A linear layer that stores its matrix as it is multiplied: x @ weight + bias, with weight (in, out).

    By token, as m ((x / m) @ weight) + bias, with the largest |x| of the token as m.
    """

    def __init__(self, linear: nn.Linear, by_token: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.contiguous(), requires_grad=False)
        self.bias = linear.bias
        self.by_token = by_token

    def forward(self, x: Tensor) -> Tensor:
        if self.by_token:
            largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).clamp(min=TINY)
            y = largest * ((x / largest) @ self.weight)
        else:
            y = x @ self.weight
        return y if self.bias is None else y + self.bias


def copy_for_inference(model: nn.Module) -> RecurrentVisionTransformer:
    """The model in float32 on the CPU, in evaluation mode, without gradients, hooks and recomputation."""
    model = check_model(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model has no weights: it was built on the meta device")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"model has weights that are not finite: {name}")
    if not all(isinstance(block, ResidualBlock) for block in model.blocks):
        raise ValueError("model's blocks have been replaced, by recurrent_vit.optimize perhaps; give the model before")
    # what the copy finds here it doesn't copy: a hook may belong to something that cannot be copied
    no_hooks: dict[int, Any] = {
        id(value): OrderedDict()
        for module in model.modules()
        for name, value in vars(module).items()
        if "_hooks" in name and isinstance(value, dict)
    }
    twin = copy.deepcopy(model, no_hooks).cpu().float().eval().requires_grad_(False)
    twin.set_grad_checkpointing(False)
    return twin


def _checked_horizon(model: RecurrentVisionTransformer, fixed_horizon: int | None) -> int | None:
    if fixed_horizon is None:
        return None
    horizon = bounded_horizon(fixed_horizon, model.depth)
    applications = horizon * model.depth * model.evaluations_per_step
    if applications > MAX_UNROLLED:
        raise ValueError(
            f"fixed_horizon={horizon} would write {applications:,} block applications one after the other, more than "
            f"{MAX_UNROLLED:,}; without it, the number of steps is an input of the file"
        )
    return horizon


def _store_as_multiplied(model: nn.Module, int8: bool) -> None:
    """Replace the linear layers of a model."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:  # a subclass may do something else
                setattr(module, name, _Product(child, by_token=int8 and name == BY_TOKEN))


def _count_in_graph(model: RecurrentVisionTransformer, horizon: int | None) -> int:
    """Products with weights in the graph: those of the blocks once for each evaluation in it, the others once."""
    in_blocks, in_all = _count_products(model.blocks), _count_products(model)
    return in_blocks * model.evaluations_per_step * (horizon or 1) + in_all - in_blocks


def _count_products(module: nn.Module) -> int:
    return sum(isinstance(part, _Product) for part in module.modules())


def _traceable(
    model: RecurrentVisionTransformer, horizon: int | None
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module to trace, arguments to trace it with, and its dynamic shapes: none yet, one entry per argument."""
    image = torch.zeros(2, *_input_size(model), dtype=torch.float32)  # torch.export takes a batch of 1 for a constant
    if horizon is None:
        return _AnySteps(model).eval(), (image, torch.tensor(2)), {"image": None, "steps": None}
    return _FixedSteps(model, horizon).eval(), (image,), {"image": None}


def _input_size(model: Any) -> list[int]:
    """Channels, height and width of an image."""
    return [model.in_chans, *model.patch_embed.img_size]


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def _to_onnx(model: RecurrentVisionTransformer, horizon: int | None) -> Any:
    """The model as a ModelProto."""
    module, arguments, dynamic = _traceable(model, horizon)
    dynamic["image"] = {0: "batch"}
    return _trace(module, arguments, dynamic, "logits")


@contextmanager
def _plain_tracing() -> Iterator[None]:
    """Without gradients, and without the caller's autocast; one trace at a time, since torch's tracers are global."""
    with LOCK, torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _trace(module: nn.Module, arguments: tuple[Tensor, ...], dynamic: dict[str, Any], output: str) -> Any:
    """A module as a ModelProto; its inputs are called as the keys of the dynamic shapes."""
    with _plain_tracing():
        program: Any = torch.onnx.export(
            module, arguments, dynamo=True, dynamic_shapes=tuple(dynamic.values()), input_names=list(dynamic),
            output_names=[output], external_data=False, verbose=False,
        )  # fmt: skip
    proto = program.model_proto
    _strip(proto)
    return proto


def _strip(proto: Any) -> None:
    """Remove what the exporter noted for debugging: for each node a stack trace, with this machine's paths."""
    for graph in _graphs(proto.graph):
        parts = (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer)
        for part in (graph, *parts):
            part.ClearField("metadata_props")
            part.ClearField("doc_string")


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside it, such as the body of a loop."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for part in (*inner, *attribute.graphs):
                yield from _graphs(part)


def _quantised(proto: Any, expected: int) -> Any:
    """The model with int8 weights, where they are to be.

    Raises:
        RuntimeError: It hasn't `expected` quantised products.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # the exporter has optimised the graph; without this note, a warning asks for it
    onnx.helper.set_model_props(proto, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with TemporaryDirectory(prefix="recurrent-vit.") as folder:
        file = Path(folder) / "int8.onnx"
        quantize_dynamic(
            proto, file, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8,
            extra_options={"EnableSubgraph": True}, **INT8,
        )  # fmt: skip
        quantised = onnx.load(file)
    found = sum(node.op_type == "MatMulInteger" for graph in _graphs(quantised.graph) for node in graph.node)
    if found != expected:
        raise RuntimeError(
            f"{found} of {expected} products were quantised, by onnxruntime {metadata.version('onnxruntime')}; "
            "please report it"
        )
    return quantised


def _finished(proto: Any, facts: dict[str, str]) -> bytes:
    """The content of the file, with its metadata, after onnx has checked it."""
    import onnx

    onnx.helper.set_model_props(proto, facts)  # in place of what the tools left there
    onnx.checker.check_model(proto, full_check=True)
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


# ---- metadata --------------------------------------------------------------------------------------------------------


def _facts(model: RecurrentVisionTransformer, horizon: int | None, int8: bool) -> dict[str, str]:
    """What the file says of itself; see :func:`export_onnx`."""
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", {})  # absent if timm didn't build the model
    names = list(cfg.get("label_names") or [])
    facts = {
        "model": cfg.get("architecture", ""),
        **_source(model),
        "classes": names if len(names) == model.num_classes else [],
        "input_size": _input_size(model),
        **{key: cfg.get(key) for key in ("mean", "std", "interpolation", "crop_pct")},
        "trained_horizon": model.trained_horizon,
        "fixed_horizon": horizon,
        "depth": model.depth,
        "solver": model.solver,
        "field": model.field,
        "step_size": model.step_size,
        "nfe_per_step": model.evaluations_per_step,
        "precision": "int8" if int8 else "fp32",
        "versions": _versions(int8),
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}


def _source(model: RecurrentVisionTransformer) -> dict[str, str]:
    """Which weights these are. The configuration doesn't tell: an untrained or fine-tuned model has the same one."""
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    content = safetensors.torch.save(state, metadata={"format": "pt"})  # the bytes of a checkpoint's file
    sha256 = hashlib.sha256(content).hexdigest()
    name = getattr(model, "pretrained_cfg", {}).get("architecture")
    rows = [row for row in weights.checkpoints() if row.sha256 == sha256]
    row = min(rows, key=lambda row: row.name != name, default=None)  # some weights have two names
    return {
        "checkpoint": row.id if row else "",
        "sha256": sha256,
        "license": row.license if row else "",
    }


def _versions(int8: bool) -> dict[str, str]:
    packages = ("onnx", "onnxscript", *(["onnxruntime"] if int8 else []))
    return {**machine.versions(), **{name: metadata.version(name) for name in packages}}
