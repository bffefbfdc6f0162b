"""Accuracy of a model after any numbers of steps, on a labelled split, with what it costs and how sure it is.

    >>> import timm, torch, recurrent_vit
    >>> from recurrent_vit.cifar import Split
    >>> split = Split(torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.arange(8))
    >>> for row in evaluate(timm.create_model("bvit"), split, horizons=[1, 2]):
    ...     print(row["horizon"], row["NFE"], f"{row['MACs']:,}", row["count"], row["non_finite"])
    1 1 53,502,976 8 0
    2 2 106,193,920 8 0

What is notable:

- One pass serves all horizons: the state runs to the largest, and logits are taken on the way. No states are kept.
- The model is left as it was. Its horizon isn't touched, and its mode is put back when the pass is over or has failed.
- Logits that aren't all finite (a mis-specified field grows without bound) count as wrong, and are reported.
- Several processes (torchrun) share the images out without padding, and every one gets the same rows.
- One checkpoint runs under any solver, field and step size, since the parameters are the same: :func:`rebuild`.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models import get_model_args
from torch import Tensor, nn

from . import machine
from .cifar import Batch, Split, batches, batches_per_epoch
from .limits import bounded_horizon, bounded_int
from .model import RecurrentVisionTransformer, check_model

__all__ = [
    "COLUMNS", "PRECISIONS", "check_precision", "checked", "evaluate", "evaluation_mode", "first_parameter",
    "inference", "logits_after", "overflows", "paired_loss", "parse_horizons", "progress_bar", "rebuild",
    "standard_error", "statistics", "tally",
]  # fmt: skip

PRECISIONS = ("fp32", "bf16")

Row = dict[str, Any]
T = TypeVar("T")


# ---- accuracy --------------------------------------------------------------------------------------------------------


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    horizons: Iterable[int] | None = None,
    batch_size: int = 250,
    precision: str = "fp32",
    progress: bool = False,
) -> Iterator[Row]:
    """Evaluate a model after each of some numbers of steps, in one pass over the split, on the model's device.

    Args:
        model: A `RecurrentVisionTransformer`.
        split: Labelled images of the model's size; the same in all processes.
        horizons: Numbers of steps, in any order; without them the model's own horizon.
        batch_size: Images in a batch, in each process.
        precision: "fp32" computes in the dtype of the parameters, "bf16" under bfloat16 autocast. Whether products in
            fp32 may run in TF32 is torch's setting.
        progress: Show a bar on standard error, if that is a terminal.

    Returns:
        An iterator of rows, one for each horizon, ascending:

        - horizon, and trained_horizon, the number of steps the model was made for (steps * stages)
        - solver, field, step_size, precision: what ran
        - top1, top5: fractions of the images
        - top1_stderr: standard error of top1 = p over n images, sqrt(p (1 - p) / n)
        - loss: cross-entropy in nats, the mean over images with finite logits; None if there are none
        - non_finite: images with some logit that is infinite or NaN; they count as wrong
        - count: images
        - NFE, MACs, parameters: evaluations of the block set and multiply-accumulates for one image; size
        - seconds: of the whole pass, which is shared by all horizons; of the slowest process

        The pass runs when the first is asked for.

    Raises:
        ValueError: At the call, for a model or split that doesn't fit, or an argument out of range.
    """
    model, device = checked(model, split), first_parameter(model).device
    steps = _ascending([model.horizon] if horizons is None else horizons)
    bounded_horizon(steps[-1], model.depth)
    check_precision(precision)
    rank, world_size = machine.place()
    size = batch_size * world_size
    parts = batches(split.to(device), size, shuffle=False, rank=rank, world_size=world_size)
    shown = progress_bar(parts, "evaluate", batches_per_epoch(len(split), size), progress and rank == 0)
    return _rows(model, shown, steps, precision)


def _rows(
    model: RecurrentVisionTransformer, parts: Iterable[Batch], horizons: list[int], precision: str
) -> Iterator[Row]:
    start = perf_counter()
    totals = torch.zeros(len(horizons), len(COLUMNS), dtype=torch.float64)
    with inference(model, precision):
        for images, labels, _ in parts:
            if len(images):  # a process may have no part in the last batch, and not every kernel takes an empty one
                totals += tally(logits_after(model, images, horizons).cpu(), labels.cpu())
    device = first_parameter(model).device
    totals = _over_processes(totals, dist.ReduceOp.SUM, device)
    seconds = _over_processes(torch.tensor(perf_counter() - start), dist.ReduceOp.MAX, device).item()
    for horizon, row in zip(horizons, totals.tolist()):
        yield {
            "horizon": horizon,
            "trained_horizon": model.trained_horizon,
            "solver": model.solver,
            "field": model.field,
            "step_size": model.step_size,
            "precision": precision,
            **statistics(**dict(zip(COLUMNS, row))),
            **_costs(model, horizon),
            "seconds": seconds,
        }


def logits_after(model: RecurrentVisionTransformer, images: Tensor, horizons: list[int]) -> Tensor:
    """Logits (horizons, B, classes) after the steps asked for, ascending; NaN where the state has overflowed."""
    z = model.initial_state(images.to(first_parameter(model).dtype))
    logits = []
    for step in range(1, horizons[-1] + 1):
        z = model.step(z)
        if step in horizons:
            logits.append(model.forward_head(model.norm(z)).masked_fill(overflows(z)[:, None], math.nan))
    return torch.stack(logits)


def overflows(z: Tensor) -> Tensor:
    """bool (B,): whether the square of a token is beyond the range of its dtype; z is (B, ..., C).

    What LayerNorm makes of that depends on its kernel: NaN, or its bias, finite and alike for every image.
    """
    return ~z.square().mean(-1, keepdim=True).isfinite().flatten(1).all(1)


COLUMNS = ("count", "finite", "top1", "top5", "loss")


def tally(logits: Tensor, labels: Tensor) -> Tensor:
    """Sums over the images: float64 (horizons, COLUMNS), from logits (horizons, B, classes) and labels (B,)."""
    logits = logits.double()  # the loss of finite logits is finite, and sums don't depend on the batches
    finite = logits.isfinite().all(-1)
    best = logits.topk(min(5, logits.shape[-1])).indices
    top1 = (logits.argmax(-1) == labels) & finite  # of equal logits, as bfloat16 has, the first; topk takes any
    top5 = (best == labels[:, None]).any(-1) & finite
    losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none").view_as(finite)
    columns = (torch.ones_like(finite), finite, top1, top5, losses.where(finite, 0))
    return torch.stack([column.double().sum(-1) for column in columns], dim=-1)


def statistics(count: float, finite: float, top1: float, top5: float, loss: float) -> Row:
    """The columns of a row that come from the sums of :func:`tally`."""
    p = top1 / count
    return {
        "top1": p,
        "top1_stderr": standard_error(p, count),
        "top5": top5 / count,
        "loss": loss / finite if finite else None,
        "non_finite": int(count - finite),
        "count": int(count),
    }


def standard_error(p: float, count: float) -> float:
    """Of a fraction p of `count` images: sqrt(p (1 - p) / count)."""
    return (p * (1 - p) / count) ** 0.5


def paired_loss(right: Tensor, reference: Tensor) -> Row:
    """What is lost against a reference, image by image: the differences d of right answers are -1, 0 or 1.

    Args:
        right: bool (N,).
        reference: bool (N,), of the same images.

    Returns:
        - lost: the reference's accuracy minus this one's, the mean of d
        - lost_stderr: its standard error, sqrt(var(d) / N); small where both are right on the same images

    Example:
        >>> paired_loss(torch.tensor([True, False, True]), torch.tensor([True, True, True]))["lost"]
        0.3333333333333333
    """
    lost = reference.double() - right.double()
    return {"lost": lost.mean().item(), "lost_stderr": (lost.var(correction=0).item() / len(lost)) ** 0.5}


def _costs(model: RecurrentVisionTransformer, horizon: int) -> Row:
    return {
        "NFE": horizon * model.evaluations_per_step,
        "MACs": model.count_macs(horizon),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


@contextmanager
def inference(model: nn.Module, precision: str) -> Iterator[None]:
    """Evaluation mode, no gradients, the precision."""
    # No cache: inside an autocast of the caller's, older torch would give weights that were cast here, without a
    # gradient, to a training step there (fixed by https://github.com/pytorch/pytorch/pull/165068)
    autocast = torch.autocast(
        first_parameter(model).device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )
    with evaluation_mode(model), torch.inference_mode(), autocast:
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while entered; every module's own mode is put back at the end."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def checked(model: nn.Module, split: Split) -> RecurrentVisionTransformer:
    """The model, if it can be run to any horizon on these images."""
    model = check_model(model)
    if not len(split):
        raise ValueError("split is empty: it has no images")
    expected, found = (model.in_chans, *model.patch_embed.img_size), tuple(split.images.shape[1:])
    if found != expected and (model.patch_embed.strict_img_size or found[0] != expected[0]):
        raise ValueError(f"split has images of shape {found}, the model takes {expected}")
    least, most = split.labels.min().item(), split.labels.max().item()
    if least < 0 or most >= model.num_classes:
        raise ValueError(f"split has labels from {least} to {most}, the model num_classes={model.num_classes}")
    return model


def check_precision(precision: str) -> str:
    """The precision, if it is one of `PRECISIONS`; otherwise a ValueError that names them."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; known precisions: {', '.join(PRECISIONS)}")
    return precision


def first_parameter(model: nn.Module) -> nn.Parameter:
    """Any parameter: what tells the model's device and dtype."""
    return next(model.parameters())


def progress_bar(parts: Iterable[T], what: str, total: int, shown: bool, unit: str = "batch") -> Iterable[T]:
    """The parts, with a bar on standard error while they are taken, if it is to be shown and that is a terminal."""
    from tqdm import tqdm

    return tqdm(parts, what, total, unit=unit, leave=False, disable=None if shown else True)


# ---- several processes -----------------------------------------------------------------------------------------------


def _over_processes(value: Tensor, operation: Any, device: torch.device) -> Tensor:
    """The sum or maximum over the processes; through the device, for a group that is of nccl alone."""
    if machine.place()[1] == 1:
        return value
    value = value.to(device)
    dist.all_reduce(value, operation)
    return value.cpu()


# ---- numbers of steps ------------------------------------------------------------------------------------------------


def parse_horizons(text: str) -> tuple[int, ...]:
    """Numbers of steps from a list with commas, ascending, each once.

    Raises:
        ValueError: Something in the list isn't a whole number from 1 to 10000.

    Example:
        >>> parse_horizons("12, 1,2,4,12")
        (1, 2, 4, 12)
        >>> parse_horizons("1,2,,4")
        Traceback (most recent call last):
        ...
        ValueError: horizon='1,2,,4': '' is not a whole number; give steps like 1,2,4,12
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal():
            raise ValueError(f"horizon={text!r}: {part!r} is not a whole number; give steps like 1,2,4,12")
    return tuple(_ascending(map(int, parts)))


def _ascending(horizons: Iterable[int]) -> list[int]:
    steps = sorted({bounded_int("horizon", horizon) for horizon in horizons})
    if not steps:
        raise ValueError("horizons is empty; give at least one number of steps")
    return steps


# ---- other solvers ---------------------------------------------------------------------------------------------------


def rebuild(
    model: RecurrentVisionTransformer,
    *,
    solver: str | None = None,
    field: str | None = None,
    step_size: float | None = None,
) -> RecurrentVisionTransformer:
    """A new model with the same architecture, arguments and weights, integrated otherwise.

    Args:
        model: A model from `timm.create_model`, of whatever source; it stays as it is.
        solver: "plain" or a Runge-Kutta method; None keeps the model's.
        field: "state_subtracted" or "black_box"; None keeps the model's.
        step_size: h; None keeps the model's.

    Returns:
        The model, with a copy of the weights, on the same device and in the same dtype and mode. It has the same steps
        and horizon, so another solver costs another number of evaluations (`nfe`).

    Raises:
        ValueError: An argument that the architecture doesn't know, or a model that can't be built again.

    Example:
        >>> import timm, recurrent_vit
        >>> model = timm.create_model("bvit", num_classes=10)
        >>> twin = rebuild(model, solver="rk4", step_size=0.5)
        >>> twin.solver, twin.horizon, twin.nfe, twin.num_classes
        ('rk4', 12, 48, 10)
    """
    model.check_whole()
    origin: Any = model  # timm's attributes on it are dynamic
    if "architecture" not in getattr(origin, "pretrained_cfg", {}):
        raise ValueError("model was not built by timm.create_model, so its name and arguments aren't known")
    changes = {"solver": solver, "field": field, "step_size": step_size}
    arguments = {
        **origin._model_args,  # timm leaves rates of dropout out of those it exports
        **get_model_args(model),
        **{name: value for name, value in changes.items() if value is not None},
    }
    cfg = origin.pretrained_cfg
    twin: Any = timm.create_model(cfg["architecture"], pretrained_cfg=cfg, **arguments)
    twin.load_state_dict(model.state_dict())
    return twin.to(first_parameter(model)).train(model.training)
