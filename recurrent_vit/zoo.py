"""The variants of the zoo, one row each, and their registration with timm.

All CIFAR rows cost twelve block applications per image, so they can be compared at equal compute. The paper fixes width
256, patch 4, SwiGLU, a final layer normalisation and the number of evaluations; the number of heads, mean pooling
without a class token and the gate width of 688 (8/3 * 256 rounded up to a multiple of 16) are choices of ours. The
ImageNet rows are sized like timm's ViT-S/16 and ViT-B/16, after the predecessor, Byra et al., "bViT: Investigating
Single-Block Recurrence in Vision Transformers for Image Recognition" (2026), https://arxiv.org/abs/2605.10661; they
have no weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import SwiGLU
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models.vision_transformer import VisionTransformer

from . import checks, weights
from .augment import MEAN, STD
from .cifar import FINE_NAMES
from .model import RecurrentVisionTransformer

__all__ = ["VARIANTS", "Variant", "default_cfgs", "describe"]  # register_model adds each name

SWIGLU = {"mlp_layer": SwiGLU, "act_layer": "silu"}  # timm's SwiGLU block gates with GELU unless told otherwise
CIFAR = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 256,
    "num_heads": 8,
    "mlp_ratio": 688 / 256,
    "class_token": False,
    "global_pool": "avg",
    "fc_norm": False,  # final norm on the tokens, before their mean
    **SWIGLU,
}
IMAGENET = {"img_size": 224, "patch_size": 16}

CIFAR_CFG = {
    "num_classes": 100,
    "input_size": (3, 32, 32),
    "fixed_input_size": True,
    "mean": MEAN,
    "std": STD,
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
}
IMAGENET_CFG = {
    **CIFAR_CFG,
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "crop_pct": 0.9,
}


@dataclass(frozen=True)
class Variant:
    """One name of the zoo.

    Args:
        name: The name for `timm.create_model`.
        summary: What it is, in one line.
        args: Arguments of `RecurrentVisionTransformer`; a user's own take precedence.
        cfg: timm's pretrained configuration, but for what a checkpoint adds.
    """

    name: str
    summary: str
    args: dict[str, Any]
    cfg: dict[str, Any] = field(default_factory=lambda: CIFAR_CFG)


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("vit_cifar", "twelve independent blocks, applied once", {**CIFAR, "depth": 12, "steps": 1}),
        Variant("bvit", "one block applied twelve times: z <- F(z)", {**CIFAR, "depth": 1, "steps": 12}),
        Variant(
            "bvit_ode_euler",
            "Euler steps along R(z) = F(z) - z; at step size 1 the same function as bvit",
            {**CIFAR, "depth": 1, "steps": 12, "solver": "euler"},
        ),
        Variant(
            "bvit_ode_heun",
            "Heun steps (explicit trapezoid) along R(z) = F(z) - z, two evaluations each",
            {**CIFAR, "depth": 1, "steps": 6, "solver": "heun2"},
        ),
        Variant(
            "bvit_ode_rk4",
            "classical Runge-Kutta steps along R(z) = F(z) - z, four evaluations each",
            {**CIFAR, "depth": 1, "steps": 3, "solver": "rk4"},
        ),
        Variant(
            "bvit_ds",
            "bvit for stage-wise deep supervision: four stages of three steps",
            {**CIFAR, "depth": 1, "steps": 3, "stages": 4},
        ),
        Variant(
            "bvit_small_patch16_224",
            "one block of ViT-S/16 applied twelve times, for ImageNet",
            {**IMAGENET, "embed_dim": 384, "num_heads": 6, "depth": 1, "steps": 12},
            IMAGENET_CFG,
        ),
        Variant(
            "bvit_base_patch16_224",
            "one block of ViT-B/16 applied twelve times, for ImageNet",
            {**IMAGENET, "embed_dim": 768, "num_heads": 12, "depth": 1, "steps": 12},
            IMAGENET_CFG,
        ),
    )
}


def _cfgs(variant: Variant) -> dict[str, dict[str, Any]]:
    """A configuration for each checkpoint, the first of which is timm's default; if there is none, one without."""
    return {row.id: {**variant.cfg, **_source(row)} for row in weights.checkpoints(variant.name)} or {
        f"{variant.name}.untrained": variant.cfg
    }


def _source(row: weights.Checkpoint) -> dict[str, Any]:
    """Where timm finds the weights: the file comes before the Hub."""
    hub_id = f"{row.repo}@{row.commit}" if row.commit else None
    return {"file": str(row.path), "hf_hub_id": hub_id, "license": row.license, "label_names": FINE_NAMES}


default_cfgs = generate_default_cfgs({tag: cfg for variant in VARIANTS.values() for tag, cfg in _cfgs(variant).items()})


def describe(name: str) -> dict[str, Any]:
    """Size and cost of a variant with its default arguments, without building its weights.

    Args:
        name: A key of `VARIANTS`.

    Returns:
        The row of that name in the zoo table: numbers of blocks, steps and evaluations, `parameters`, `MACs`
        (multiply-accumulates per image, `RecurrentVisionTransformer.macs`), and the tags of its `weights`.

    Example:
        >>> describe("bvit_ode_rk4")["NFE"]
        12
    """
    model = timm.create_model(name, device="meta")
    return {
        "name": name,
        "depth": model.depth,
        "steps": model.steps,
        "stages": model.stages,
        "solver": model.solver,
        "NFE": model.nfe,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "MACs": model.macs,
        "weights": ", ".join(row.tag for row in weights.checkpoints(name)),
    }


MODEL_ARGS = {
    name for cls in (RecurrentVisionTransformer, VisionTransformer) for name in signature(cls.__init__).parameters
} - {"self", "kwargs", "device", "dtype"}


def _create(variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> RecurrentVisionTransformer:
    if alien := (kwargs.get("pretrained_model_args") or {}).keys() - MODEL_ARGS:  # from a config.json
        raise ValueError(f"config.json of {variant.name}: model_args has {sorted(alien)}, which no model takes")
    if pretrained:
        kwargs = {**kwargs, "pretrained_cfg_overlay": _checked_source(variant, kwargs)}
        if "num_classes" not in kwargs and not kwargs.get("features_only"):
            return _without_initial_weights(variant, kwargs)
    return _build(variant, pretrained, kwargs)


def _without_initial_weights(variant: Variant, kwargs: dict[str, Any]) -> RecurrentVisionTransformer:
    """A pretrained model, built in two thirds of the time: the checkpoint replaces all values anyway."""
    model = _build(variant, True, {"weight_init": "skip", **kwargs})
    if "weight_init" not in kwargs:
        model.weight_init_mode = ""  # timm's default, for whoever calls init_weights later
    return model


def _build(variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> RecurrentVisionTransformer:
    return build_model_with_cfg(
        RecurrentVisionTransformer,
        variant.name,
        pretrained,
        pretrained_filter_fn=checks.check_state,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **{**variant.args, **kwargs},
    )


def _checked_source(variant: Variant, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What makes timm load the one file that was found and checked; added to the caller's own entries."""
    overlay = dict(kwargs.get("pretrained_cfg_overlay") or {})
    if overlay.get("hf_hub_id") or overlay.get("url"):
        overlay.setdefault("file", None)  # a source of the caller's own stands before the package's file
    cfg = resolve_pretrained_cfg(variant.name, kwargs.get("pretrained_cfg"), overlay)
    path, pinned, entries = weights.locate(cfg, kwargs.get("cache_dir"))
    if path is not None and not pinned:
        whole = {key: value for key, value in kwargs.items() if key not in ("features_only", "feature_cls")}
        checks.check_file(path, _build(variant, False, {**whole, "device": "meta"}))
    # no loading code, and no layers to be left out, but our own: what a config.json says of them is not asked
    own = {"custom_load": False, **{key: variant.cfg[key] for key in ("classifier", "first_conv")}}
    return {**overlay, **entries, **own}


def _entrypoint(variant: Variant) -> Callable[..., RecurrentVisionTransformer]:
    """The entry point that timm registers for a row, named after it."""

    def create(pretrained: bool = False, **kwargs: Any) -> RecurrentVisionTransformer:
        return _create(variant, pretrained, kwargs)

    create.__name__ = create.__qualname__ = variant.name
    create.__doc__ = variant.summary
    return create


for _variant in VARIANTS.values():
    globals()[_variant.name] = register_model(_entrypoint(_variant))
