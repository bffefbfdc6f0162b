"""What is in a file of weights, compared with the model that is to load it.

timm loads half a backbone without a word as soon as the classifier differs, and any dtype, and NaN. Here everything
must be there and fit, but for what timm adapts: the classifier to another number of classes, the patch embedding to
other input channels or patches, the positions to another grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor

__all__ = ["check_file", "check_state"]

POSITIONS, PATCHES = "pos_embed", "patch_embed.proj.weight"
MAX_HEADER = 4 * 2**20  # bytes; a thousand blocks of names take a fifth of it
MAX_TENSOR = 2**28  # bytes

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor: its dtype, as safetensors write it, and its shape


def check_file(path: Path, model: VisionTransformer) -> None:
    """Check the header of a safetensors file against the model, before anything is loaded.

    Raises:
        ValueError: It isn't such a file, or its tensors don't fit; names the file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, more than {MAX_HEADER:,}")
        with safetensors.safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            shapes = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        _check_shapes(shapes, model)
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from error


def check_state(state: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """Check a state dict against the model, and resample its positions to the model's grid; timm's filter function.

    Args:
        state: Parameters by name, before timm adapts classifier and input channels.
        model: Built, with its `pretrained_cfg`.

    Raises:
        ValueError: A tensor is missing, unknown, of another shape or dtype, or not finite; names where it came from.
    """
    try:
        _check_values(state, model)
    except ValueError as error:
        raise ValueError(f"{_origin(_cfg(model))}: {error}") from error
    adapted: dict[str, Tensor] = checkpoint_filter_fn(state, model)
    return adapted


def _cfg(model: VisionTransformer) -> dict[str, Any]:
    return getattr(model, "pretrained_cfg", {})


def _origin(cfg: dict[str, Any]) -> str:
    """Where timm has loaded from, by its own order."""
    if cfg.get("source") == "hf-hub":
        return str(cfg.get("hf_hub_id"))
    if cfg.get("state_dict") and cfg.get("source") != "local-dir":
        return "the state dict"
    return str(cfg.get("file") or cfg.get("hf_hub_id") or "the checkpoint")


def _check_values(state: dict[str, Tensor], model: VisionTransformer) -> None:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError("it is not a dictionary of tensors")
    _check_shapes({name: (_short(value.dtype), tuple(value.shape)) for name, value in state.items()}, model)
    doubtful = [
        name for name, value in state.items() if not value.sum().isfinite()
    ]  # a sum is quick, and passes on NaN
    if broken := [name for name in doubtful if not state[name].isfinite().all()]:
        raise ValueError(f"values are not finite in {_listed(broken)}")


def _check_shapes(found: Shapes, model: VisionTransformer) -> None:
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    architecture = _cfg(model).get("architecture", "the model")
    other_head = model.num_classes != _cfg(model).get("num_classes")
    heads = {"head.weight", "head.bias"} if other_head else set()  # timm leaves them out
    if missing := own.keys() - found.keys() - heads:
        raise ValueError(
            f"{_listed(missing)} missing; {architecture} loads whole checkpoints of its own depth and pooling"
        )
    if unknown := found.keys() - own.keys() - heads:
        raise ValueError(f"{_listed(unknown)} not known to {architecture}; is it a checkpoint of another architecture?")
    allowed = {**own, **_adapted(found, model)}
    for name, (dtype, shape) in found.items():
        if dtype != "F32":
            raise ValueError(f"{name} is of dtype {dtype}; checkpoints are float32 (F32)")
        if name not in heads and shape not in (own[name], allowed[name]):
            raise ValueError(f"{name} has shape {shape}, the model {own[name]}")
        if 4 * math.prod(shape) > MAX_TENSOR:
            raise ValueError(f"{name} has shape {shape}, of more than {MAX_TENSOR:,} bytes")


def _adapted(found: Shapes, model: VisionTransformer) -> dict[str, tuple[int, ...]]:
    """The shapes that timm adapts to the model: those of the configuration's own channels, and grid of patches."""
    channels, height, width = _cfg(model).get("input_size", (3, *model.patch_embed.img_size))
    kernel = found[PATCHES][1][2:]
    shapes = {PATCHES: (model.embed_dim, channels, *kernel)}
    if len(kernel) == 2 and model.pos_embed is not None:
        prefix = model.pos_embed.shape[1] - model.patch_embed.num_patches
        shapes[POSITIONS] = (1, prefix + (height // max(kernel[0], 1)) * (width // max(kernel[1], 1)), model.embed_dim)
    return shapes


def _short(dtype: torch.dtype) -> str:
    return "F32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def _listed(names: Iterable[str], most: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
