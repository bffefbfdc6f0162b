"""What the state of a recurrent model does from step to step, and what becomes of a small change of it.

    >>> import timm, torch, recurrent_vit
    >>> from recurrent_vit.cifar import Split
    >>> split = Split(torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8))
    >>> seen = measure(timm.create_model("bvit", embed_dim=16, num_heads=2), split, horizon=2)
    >>> [(row["step"], row["NFE"], row["cosine"] is None) for row in rows(seen)]
    [(0, 0, True), (1, 1, True), (2, 2, False)]

Notation: z_t is the state after t steps, G the step map (`model.step`), z_(t+1) = G(z_t), u_t = z_t - z_(t-1) an
update, and R the field (`model.vector_field`), F(z) - z unless the model is the black-box control. B counts images, N
tokens, C is embed_dim, H the horizon. What is notable:

- What is measured of states and maps is in `recurrent_vit.measures`; here a model and its images go through it.
- :func:`measure` is one pass over the images. It keeps a few numbers an image and step, a covariance a step, and the
  class states of the first images for a picture; never the states.
- The Jacobian is that of the step map, dG/dz: F' for the plain recurrence, not R' = F' - 1. Three numbers say different
  things of it. Its spectral radius tells whether changes die out if the state stands still; its largest singular value,
  how much one step can stretch a change at most; the growth along the orbit, what the steps really do to one, together.
- The class state is what the head sees: with mean pooling, the mean of the tokens after the final norm.
- An image whose state is no longer finite is left out of the medians and means, and is counted. CKA and participation
  ratio speak of all images, so they are NaN from that step on.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .augment import normalize
from .cifar import Split, batches, batches_per_epoch
from .evaluate import checked, evaluation_mode, first_parameter, overflows, progress_bar, standard_error
from .limits import bounded_horizon, bounded_number
from .measures import (
    Covariance,
    cka,
    cosine,
    entropy,
    hsic,
    norm,
    orbit_growth,
    participation_ratio,
    relative_norm,
    sigma_max,
    spectral_radius,
)
from .model import RecurrentVisionTransformer, check_model

__all__ = ["Dynamics", "Jacobians", "accuracy", "jacobians", "measure", "resolve_horizon", "rows"]

Row = dict[str, Any]
MAX_HORIZON = 1_000
MAX_IMAGES = 1_000_000


# ---- a pass over images ----------------------------------------------------------------------------------------------

COLUMNS = ("rms", "step_norm", "residual", "cosine", "entropy", "correct", "finite")


class Dynamics(NamedTuple):
    """What :func:`measure` saw of n images from step 0 to H.

    The columns of `images`, NaN where a state is not finite or has no such number (no update leads to step 0):

    - rms: root mean square of the numbers in the state, |z_t| / sqrt(N C)
    - step_norm: |u_t| / |z_(t-1)|
    - residual: |R(z_t)| / |z_t|, zero at a fixed point; a state that grows without bound has a small one too
    - cosine: between u_t and u_(t-1)
    - entropy: of the prediction, in nats
    - correct, finite: 0 or 1; what isn't finite isn't correct
    """

    trained_horizon: int  # the steps the model was made for
    evaluations_per_step: int
    num_classes: int
    images: dict[str, Tensor]  # by COLUMNS: float64 (H + 1, n)
    cka: Tensor  # float64 (H + 1, H + 1): between whole states, all tokens of an image
    participation_tokens: Tensor  # float64 (H + 1,): of the tokens of all images
    participation_class: Tensor  # float64 (H + 1,): of the class states of all images
    class_states: Tensor  # (H + 1, m, C): of the first m images

    @property
    def horizon(self) -> int:
        """H, the last step."""
        return len(self.cka) - 1


def resolve_horizon(model: nn.Module, horizon: int | None = None) -> int:
    """The steps to look at: those asked for, or four times the number that the model was made for.

    Raises:
        ValueError: It is no integer from 1 to 1000, or the model isn't one whose states can be watched: of ours, in
            float32 or float64, with pooling and classes.
    """
    model = check_model(model)
    dtype = first_parameter(model).dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"model is in {dtype}: updates are differences of states, so it must be in float32 or float64")
    if not model.global_pool or model.num_classes < 1:
        raise ValueError(
            f"model has global_pool={model.global_pool!r}, num_classes={model.num_classes}: the class state is what "
            "the head sees of an image, so it must have both"
        )
    if horizon is None:
        horizon = min(4 * model.trained_horizon, MAX_HORIZON)
    horizon = bounded_horizon(horizon, model.depth)
    if horizon > MAX_HORIZON:
        raise ValueError(f"horizon={horizon} must be at most {MAX_HORIZON}: two covariances are kept for every step")
    return horizon


def measure(
    model: nn.Module,
    split: Split,
    *,
    horizon: int | None = None,
    batch_size: int = 64,
    keep: int = 256,
    progress: bool = False,
) -> Dynamics:
    """Watch the states of a model over a split, in one pass, on the model's device and in the dtype of its parameters.

    A step costs its own evaluations of the block set and one more, for the residual.

    Args:
        model: A `RecurrentVisionTransformer`; in float32 or float64, since updates are differences of states.
        split: Labelled images of the model's size.
        horizon: H; default four times the trained number of steps.
        batch_size: Images in a batch. CKA is averaged over batches; one of fewer than 4 images has no part in it.
        keep: Number of images whose class states are kept.
        progress: Show a bar on standard error, if that is a terminal.

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
    """
    model, horizon = checked(model, split), resolve_horizon(model, horizon)
    parts = batches(split.to(first_parameter(model).device), batch_size, shuffle=False)
    tokens, classes = ([Covariance() for _ in range(horizon + 1)] for _ in range(2))
    columns, kept, similarity = [], [], torch.zeros(horizon + 1, horizon + 1, dtype=torch.float64)
    with evaluation_mode(model), torch.no_grad():
        shown = progress_bar(parts, "states", batches_per_epoch(len(split), batch_size), progress)
        for images, labels, indices in shown:
            values, kernels, class_states = _watch(model, images, labels, horizon, tokens, classes)
            columns.append(values)
            kept.append(class_states[:, indices.cpu() < keep])
            if len(images) >= 4:
                similarity += len(images) * hsic(kernels).cpu()
    by_name = dict(zip(COLUMNS, torch.cat(columns, -1).unbind(1)))
    finite = by_name["finite"].all(1)  # what is said of all images needs all of them
    return Dynamics(
        trained_horizon=model.trained_horizon,
        evaluations_per_step=model.evaluations_per_step,
        num_classes=model.num_classes,
        images=by_name,
        cka=cka(similarity).where(finite[:, None] & finite, math.nan),
        participation_tokens=_participation(tokens).where(finite, math.nan),
        participation_class=_participation(classes).where(finite, math.nan),
        class_states=torch.cat(kept, 1),
    )


def _watch(
    model: RecurrentVisionTransformer,
    images: Tensor,
    labels: Tensor,
    horizon: int,
    tokens: Sequence[Covariance],
    classes: Sequence[Covariance],
) -> tuple[Tensor, Tensor, Tensor]:
    """One batch: values (H + 1, COLUMNS, B), kernels (H + 1, B, B), class states (H + 1, B, C); adds to covariances."""
    values, kernels, class_states = [], [], []
    z = model.initial_state(images.to(first_parameter(model).dtype))
    before = update_before = torch.full_like(z, math.nan)
    for t in range(horizon + 1):
        update = z - before
        class_state = model.forward_head(model.norm(z), pre_logits=True)
        logits = model.head(class_state).double()
        finite = logits.isfinite().all(-1) & ~overflows(z)
        measured = (
            norm(z) / math.sqrt(z[0].numel()),
            relative_norm(update, before),
            relative_norm(model.vector_field(z), z),
            cosine(update, update_before),
            entropy(logits),
        )
        correct = (logits.argmax(-1) == labels) & finite
        column = [*(number.where(finite, math.nan) for number in measured), correct.double(), finite.double()]
        values.append(torch.stack(column).cpu())
        kernels.append(_gram(z))
        class_states.append(class_state.cpu())
        tokens[t].add(z.flatten(0, 1))
        classes[t].add(class_state)
        if t < horizon:
            before, update_before, z = z, update, model.step(z)
    return torch.stack(values), torch.stack(kernels), torch.stack(class_states)


def _gram(z: Tensor) -> Tensor:
    """Linear kernel of whole states: float64 (B, B). Taking the mean away changes no HSIC, and saves digits."""
    x = z.flatten(1).double()
    x = x - x.mean(0)
    return x @ x.T


def _participation(seen: Iterable[Covariance]) -> Tensor:
    return torch.stack([participation_ratio(one.covariance) for one in seen]).cpu()


# ---- Jacobians of the step map ---------------------------------------------------------------------------------------


class Jacobians(NamedTuple):
    """What :func:`jacobians` found for n images: of dG/dz, the Jacobian of the step map."""

    growth: Tensor  # float64 (H, n): by which step t + 1 stretched the change that the t steps before it had made
    steps: tuple[int, ...]  # the states z_t that the other two are taken at
    sigma_max: Tensor  # float64 (len(steps), n)
    spectral_radius: Tensor  # float64 (len(steps), n)


def jacobians(
    model: nn.Module,
    split: Split,
    *,
    horizon: int | None = None,
    steps: Iterable[int] | None = None,
    count: int | None = None,
    progress: bool = False,
) -> Jacobians:
    """Growth along the orbit at every step, sigma_max and spectral radius at some, of the first images.

    Args:
        model: A `RecurrentVisionTransformer`.
        split: Labelled images of the model's size.
        horizon: H; default four times the trained number of steps.
        steps: Where to take sigma_max and spectral radius; default 0, half, once and twice the trained number, and H.
        count: Number of images; default 16, or fewer, but 4, if a step is more than one application of a block.
        progress: Show a bar on standard error, if that is a terminal.

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
    """
    model, horizon = checked(model, split), resolve_horizon(model, horizon)
    if count is None:
        count = max(4, 16 // (model.depth * model.evaluations_per_step))
    at = _linearised(model.trained_horizon, horizon) if steps is None else tuple(sorted(set(map(index, steps))))
    if not at or at[0] < 0 or at[-1] > horizon:
        raise ValueError(f"steps={at} must be from 0 to the horizon, {horizon}")
    count = bounded_number("count", count, 1, MAX_IMAGES, whole=True)
    growth, largest, radii = [], [], []
    images = normalize(split.images[:count]).to(first_parameter(model))
    with evaluation_mode(model), _without_recomputation(model):
        with torch.no_grad():
            z = model.initial_state(images)
        orbit = chain([(z, None)], orbit_growth(model.step, z, horizon))
        for t, (z, factor) in enumerate(progress_bar(orbit, "Jacobians", horizon + 1, progress, unit="step")):
            if factor is not None:
                growth.append(factor.cpu())
            if t in at:
                largest.append(sigma_max(model.step, z).cpu())
                radii.append(spectral_radius(model.step, z).cpu())
    return Jacobians(torch.stack(growth), at, torch.stack(largest), torch.stack(radii))


@contextmanager
def _without_recomputation(model: RecurrentVisionTransformer) -> Iterator[None]:
    """Gradient checkpointing, whose hooks torch.func doesn't know, is off while entered."""
    blocks: list[Any] = [block for block in model.blocks if getattr(block, "grad_checkpointing", False)]
    for block in blocks:
        block.grad_checkpointing = False
    try:
        yield
    finally:
        for block in blocks:
            block.grad_checkpointing = True


def _linearised(trained: int, horizon: int) -> tuple[int, ...]:
    return tuple(sorted(t for t in {0, trained // 2, trained, 2 * trained, horizon} if t <= horizon))


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows(seen: Dynamics, found: Jacobians | None = None) -> list[Row]:
    """One row for each step, 0 to H, of numbers that JSON knows: None stands where there is none.

    - step, NFE, count, non_finite
    - top1, top1_stderr, entropy: means over the images (a prediction that isn't finite is wrong, and has no entropy)
    - rms, step_norm, residual, cosine: medians over the images that are finite
    - participation_tokens, participation_class
    - cka_previous, cka_trained, cka: with the step before, with the trained step, with each step
    - growth: of the step that leads here, geometric mean; sigma_max, spectral_radius: at this state, medians
    """
    medians = {name: _median(seen.images[name]) for name in ("rms", "step_norm", "residual", "cosine")}
    entropies = seen.images["entropy"].nanmean(1)
    jacobian = _jacobian_columns(found)
    return [
        {
            "step": t,
            "NFE": t * seen.evaluations_per_step,
            **accuracy(seen.images["correct"][t], seen.images["finite"][t]),
            "entropy": _number(entropies[t]),
            **{name: _number(values[t]) for name, values in medians.items()},
            "participation_tokens": _number(seen.participation_tokens[t]),
            "participation_class": _number(seen.participation_class[t]),
            "cka_previous": _number(seen.cka[t, t - 1]) if t else None,
            "cka_trained": _number(seen.cka[t, seen.trained_horizon]) if seen.trained_horizon <= seen.horizon else None,
            "cka": [_number(value) for value in seen.cka[t]],
            **{name: values.get(t) for name, values in jacobian.items()},
        }
        for t in range(seen.horizon + 1)
    ]


def accuracy(correct: Tensor, finite: Tensor) -> Row:
    """top1, top1_stderr, count and non_finite of n images, from 0 and 1 for each (n,)."""
    count, p = len(correct), correct.double().mean().item()
    return {
        "top1": p,
        "top1_stderr": standard_error(p, count),
        "count": count,
        "non_finite": count - int(finite.sum()),
    }


def _jacobian_columns(found: Jacobians | None) -> dict[str, dict[int, float | None]]:
    """By name, then by step."""
    if found is None:
        return {"growth": {}, "sigma_max": {}, "spectral_radius": {}}
    growth = found.growth.log().nanmean(1).exp()
    return {
        "growth": {t: _number(value) for t, value in enumerate(growth, start=1)},
        "sigma_max": {t: _number(value) for t, value in zip(found.steps, _median(found.sigma_max))},
        "spectral_radius": {t: _number(value) for t, value in zip(found.steps, _median(found.spectral_radius))},
    }


def _median(values: Tensor) -> Tensor:
    """Over the images (T, n) that have a number; NaN for a step where none has."""
    return torch.nanquantile(values, 0.5, dim=1)


def _number(value: Tensor) -> float | None:
    number = value.item()
    return number if math.isfinite(number) else None
