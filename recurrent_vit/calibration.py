"""The threshold of early exit: what each one costs and loses on a labelled split, and which one to take.

    >>> import timm, torch, recurrent_vit
    >>> from recurrent_vit.cifar import Split
    >>> model = timm.create_model("bvit", embed_dim=16, num_heads=2, steps=3)
    >>> split = Split(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 2, 3, 4]))
    >>> threshold, row, curve = calibrate(model, split, "stable", max_lost=1.0)
    >>> threshold, row["mean_steps"], row["exits"]  # if all may be lost, the first check will do
    (1, 1.0, {'1': 4})

What is notable:

- One pass that lets no image exit (:func:`record`) tells for every criterion and threshold what it would have done.
  Choosing among all thresholds is then a sort, not a search.
- Nothing is chosen on the test images. On images that the model was trained on it is too sure of its answers, and the
  threshold comes out too lax: hold some out.
- :func:`measure` runs the real thing, with a batch that shrinks.
- Several processes don't share a pass: each makes the whole of it, and has the same rows.
"""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from . import runs, weights
from .anytime import CRITERIA, Anytime, Running, is_sound, wide
from .cifar import ROWS, Split, batches, batches_per_epoch
from .evaluate import (
    COLUMNS,
    Row,
    check_precision,
    checked,
    first_parameter,
    inference,
    paired_loss,
    progress_bar,
    standard_error,
    statistics,
    tally,
)
from .limits import bounded_number
from .machine import place

__all__ = [
    "HELD_OUT", "MAX_LOST", "Calibration", "Records",
    "at", "calibrate", "calibrated_on", "choose", "curve", "measure", "record", "uniform",
    "uniform_top1",
]  # fmt: skip

MAX_LOST = 0.005  # of accuracy, that a calibrated threshold may cost: half a point
HELD_OUT = 5000  # training images to calibrate on: those that `train --held-out 5000` sets aside


# ---- every threshold at once ---------------------------------------------------------------------------------------


class Records(NamedTuple):
    """What a criterion says of N images at each of k checks, and whether the answers are right, without any exit."""

    criterion: str
    steps: tuple[int, ...]  # the k checks and, last, the horizon
    scores: Tensor  # float64 (N, k), NaN where the state has overflowed
    right: Tensor  # bool (N, k + 1)
    about: Row  # the columns that say what ran


def record(
    model: nn.Module,
    split: Split,
    criteria: Iterable[str] = tuple(CRITERIA),
    *,
    least: int | None = None,
    every: int = 1,
    batch_size: int = 250,
    precision: str = "fp32",
    progress: bool = False,
) -> dict[str, Records]:
    """Record what criteria say at every check, in one pass over the split that lets no image exit.

    Kept are 8 bytes for each image, check and criterion, and one for each image and check; no states, no logits.

    Args:
        model: A `RecurrentVisionTransformer`.
        split: Labelled images of the model's size.
        criteria: Keys of `CRITERIA`.
        least: As in :class:`Anytime`.
        every: As in :class:`Anytime`.
        batch_size: Images in a batch.
        precision: As in :func:`measure`.
        progress: Show a bar on standard error, if that is a terminal.

    Returns:
        The records of each criterion.

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
    """
    watched = {name: Anytime(model, name, None, least=least, every=every) for name in criteria}
    if not watched:
        raise ValueError(f"criteria is empty; known criteria: {', '.join(CRITERIA)}")
    anytime, *_ = watched.values()
    checked(anytime.model, split)
    steps = anytime.checks
    scores = {name: torch.empty(len(split), len(steps) - 1, dtype=torch.float64) for name in watched}
    right = torch.empty(len(split), len(steps), dtype=torch.bool)

    def see(images: Tensor, labels: Tensor, rows: Tensor) -> None:
        run, places = Running(anytime.model.initial_state(images)), rows.cpu()
        for k, (step, look) in enumerate(anytime.looks(run)):
            sound = is_sound(look.logits, look.z)
            right[places, k] = ((run.answers == labels) & sound).cpu()
            for name in watched if step < steps[-1] else ():
                score = wide(CRITERIA[name].measure(look)).masked_fill(~sound, math.nan)
                scores[name][places, k] = score.cpu().double()

    _pass(anytime, split, see, batch_size, precision, progress)
    return {
        name: Records(name, tuple(steps), scores[name], right, _about(watched[name], precision)) for name in watched
    }


def at(records: Records, threshold: float | None) -> Row:
    """What early exit at that threshold would have done on the images of the records.

    Args:
        records: Of one criterion.
        threshold: In the range of the criterion, or None: never.

    Returns:
        A row, as :func:`measure` gives it, without top5, loss, non_finite and seconds (images that are not finite count
        as wrong), and with

        - lost: the accuracy after all steps minus that with exits
        - lost_stderr: its standard error; both are of the same images, so it is much smaller than top1_stderr
    """
    criterion = CRITERIA[records.criterion]
    threshold = criterion.check(threshold)
    met = criterion.is_met(records.scores, threshold)
    met = torch.cat([met, torch.ones(len(met), 1, dtype=torch.bool)], dim=1)
    return _row(records, met.int().argmax(1), records.criterion, threshold)  # the first check that is met


def uniform(records: Records) -> list[Row]:
    """What to compare early exit with: rows as of :func:`at` for stopping all images after the same number of steps.

    Their criterion is "uniform", their threshold that number: the checks of the records.
    """
    count = len(records.right)
    return [_row(records, torch.full((count,), k), "uniform", step) for k, step in enumerate(records.steps)]


def uniform_top1(records: Records, mean_steps: float) -> float:
    """The accuracy of stopping all images after the same number of steps, interpolated between the checks.

    Example:
        >>> right = torch.tensor([[False, True], [False, True]])
        >>> uniform_top1(Records("margin", (2, 6), torch.empty(2, 1), right, {}), 5)
        0.75
    """
    return float(np.interp(mean_steps, records.steps, records.right.double().mean(0)))


def _row(records: Records, exits: Tensor, criterion: str, threshold: float | None) -> Row:
    """The row of images that leave at these checks: int64 (N,), k for the horizon."""
    right = records.right.gather(1, exits[:, None])[:, 0]
    p, count = right.double().mean().item(), len(right)
    return {
        **records.about,
        "criterion": criterion,
        "threshold": threshold,
        "top1": p,
        "top1_stderr": standard_error(p, count),
        **paired_loss(right, records.right[:, -1]),
        "count": count,
        **_cost(torch.tensor(records.steps)[exits], records.about),
    }


class _Sweep(NamedTuple):
    """All thresholds that differ in what they do, from the one that is never met to the one that is met first."""

    thresholds: Tensor  # float64 (T,); infinite in the first place
    lost: Tensor  # float64 (T,): accuracy after all steps minus that with exits
    steps: Tensor  # float64 (T,): the mean over images; strictly descending


def _sweep(records: Records) -> _Sweep:
    """An image exits at check j when the threshold is at most m_j = max(score_1..score_j) and above m_(j-1).

    So as the threshold falls past m_j, the image moves from check j + 1 to check j. Sorted by m, the sums of all such
    moves give every threshold at once, in O(N k log(N k)).
    """
    criterion = CRITERIA[records.criterion]
    sign = 1 if criterion.rising else -1
    surest = (sign * records.scores).masked_fill(records.scores.isnan(), -math.inf).cummax(dim=1).values  # (N, k)
    possible = (criterion.least <= sign * surest) & (sign * surest <= criterion.most)
    right, steps = records.right.double(), torch.tensor(records.steps, dtype=torch.float64)
    moves = torch.stack([right[:, 1:] - right[:, :-1], (steps[:-1] - steps[1:]).expand_as(surest)], dim=-1)  # (N, k, 2)

    values, order = surest[possible].sort(descending=True)
    sums = moves[possible][order].cumsum(0)
    last = torch.ones_like(values, dtype=torch.bool)  # of those that are equal
    last[:-1] = values[1:] != values[:-1]

    never = torch.tensor([[0, records.steps[-1] * len(right)]], dtype=torch.float64)
    lost, mean_steps = (torch.cat([never, never + sums[last]]) / len(right)).T.contiguous()
    infinite = torch.tensor([math.inf], dtype=torch.float64)
    return _Sweep(sign * torch.cat([infinite, values[last]]), lost, mean_steps)


def choose(records: Records, max_lost: float = MAX_LOST) -> Row:
    """The row of the cheapest threshold among those that lose at most `max_lost` of the accuracy after all steps.

    Its threshold is None if none but never does. All thresholds are considered, so on N images it is met by some luck:
    on others the loss is a little larger; lost_stderr says how much is to be expected.

    Args:
        records: Of one criterion, on images that the model wasn't trained on.
        max_lost: A fraction of all images, 0 to 1.
    """
    max_lost = bounded_number("max_lost", max_lost, 0, 1)
    sweep = _sweep(records)
    cheapest = int((sweep.lost <= max_lost).nonzero()[-1])  # the steps are descending
    return at(records, _threshold(sweep, cheapest))


def curve(records: Records, points: int = 64) -> list[Row]:
    """Accuracy against cost: rows of :func:`at`, from never to the threshold that is met first, about evenly in steps.

    Args:
        records: Of one criterion.
        points: The most rows, 2 to 10000.
    """
    points = _checked_points(points)
    sweep = _sweep(records)
    wanted = torch.linspace(sweep.steps[0].item(), sweep.steps[-1].item(), points, dtype=torch.float64)
    places = torch.searchsorted(-sweep.steps, -wanted).clamp(max=len(sweep.steps) - 1).unique()
    return [at(records, _threshold(sweep, place)) for place in places.tolist()]


def _checked_points(points: int) -> int:
    number: int = bounded_number("points", points, 2, 10_000, whole=True)
    return number


def _threshold(sweep: _Sweep, place: int) -> float | None:
    return None if place == 0 else sweep.thresholds[place].item()


class Calibration(NamedTuple):
    """A threshold, and what is known of it."""

    threshold: float | None  # None: never
    row: Row  # what it does on the images that it was chosen on
    curve: list[Row]  # what others do there


def calibrate(
    model: nn.Module,
    split: Split,
    criterion: str = "confidence",
    max_lost: float = MAX_LOST,
    *,
    least: int | None = None,
    every: int = 1,
    points: int = 64,
    batch_size: int = 250,
    precision: str = "fp32",
    progress: bool = False,
) -> Calibration:
    """Choose the threshold that saves most among those that lose at most `max_lost`, in one pass over the split.

    Args:
        model: A `RecurrentVisionTransformer`.
        split: Labelled images that the model wasn't trained on: on those that it was, it is too sure. Of CIFAR-100,
            take training images that were held out (`cifar.held_out`), never the test images.
        criterion: A key of `CRITERIA`.
        max_lost: Of the accuracy after all steps, as a fraction of all images: 0.005 is half a point.
        least: As in :class:`Anytime`, and to be the same there.
        every: As in :class:`Anytime`, and to be the same there.
        points: The most rows of the curve.
        batch_size: Images in a batch.
        precision: As in :func:`measure`.
        progress: Show a bar on standard error, if that is a terminal.

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
    """
    bounded_number("max_lost", max_lost, 0, 1)
    _checked_points(points)
    found = record(
        model,
        split,
        [criterion],
        least=least,
        every=every,
        batch_size=batch_size,
        precision=precision,
        progress=progress,
    )
    records = found[criterion]
    chosen = choose(records, max_lost)
    return Calibration(chosen["threshold"], chosen, curve(records, points))


def calibrated_on(source: str | os.PathLike, count: int) -> str:
    """What a threshold was chosen on, as rows and the command line say it, when it was chosen on held-out images.

    Args:
        source: Of the model: NAME, NAME.TAG, or the folder of a run.
        count: Images that were held out, of CIFAR-100's 50,000 training images.

    Returns:
        Whether the model was trained on them, where that is known.

    Example:
        >>> calibrated_on("bvit.short_c100", 5000)
        '5000 training images that it was trained on'
    """
    trained_on = _trained_on(str(source))
    if trained_on is None:
        return f"{count} training images"
    unseen = trained_on <= ROWS["train"] - count
    return f"{count} training images {'held out' if unseen else 'that it was trained on'}"


def _trained_on(source: str) -> int | None:
    """On how many images; None if that is not known."""
    if runs.is_folder(source):
        facts = json.loads((Path(source).expanduser() / "run.json").read_text(encoding="utf-8"))
        images: int | None = facts.get("images")
        return images
    known = {name: row.images for row in reversed(weights.checkpoints()) for name in (row.id, row.name)}
    return known.get(source)


# ---- with exits -----------------------------------------------------------------------------------------------------


def measure(
    anytime: Anytime,
    split: Split,
    *,
    batch_size: int = 250,
    precision: str = "fp32",
    progress: bool = False,
) -> Row:
    """Accuracy and cost of early exit on a labelled split, on the model's device, in evaluation mode.

    Args:
        anytime: What to run.
        split: Labelled images of the model's size.
        batch_size: Images in a batch.
        precision: "fp32" computes in the dtype of the parameters, "bf16" under bfloat16 autocast.
        progress: Show a bar on standard error, if that is a terminal.

    Returns:
        A row. top1, top1_stderr, top5, loss, non_finite, count, horizon, trained_horizon, solver, field, step_size,
        precision and seconds are as in :func:`recurrent_vit.evaluate.evaluate`; besides

        - criterion, threshold (None: never), least, every: when an image exits
        - mean_steps, mean_NFE: steps and evaluations of the block set for an image, the mean over images
        - NFE: evaluations for an image that takes all steps
        - saved: the fraction of evaluations that is saved, 1 - mean_NFE / NFE
        - exits: how many images took how many steps, {"3": 812, ...}

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
    """
    checked(anytime.model, split)
    totals = torch.zeros(len(COLUMNS), dtype=torch.float64)
    taken: list[Tensor] = []

    def see(images: Tensor, labels: Tensor, _: Tensor) -> None:
        logits, steps, sound = anytime.exits(images)
        logits = logits.masked_fill(~sound[:, None], math.nan)
        totals.add_(tally(logits[None].cpu(), labels.cpu())[0])
        taken.append(steps.cpu())

    seconds = _pass(anytime, split, see, batch_size, precision, progress)
    about = _about(anytime, precision)
    return {
        **about,
        "threshold": anytime.threshold,
        **statistics(**dict(zip(COLUMNS, totals.tolist()))),
        **_cost(torch.cat(taken), about),
        "seconds": seconds,
    }


def _pass(
    module: nn.Module,
    split: Split,
    see: Callable[[Tensor, Tensor, Tensor], None],
    batch_size: int,
    precision: str,
    progress: bool,
) -> float:
    """Show (images, labels, places in the split) of every batch, in evaluation mode; the seconds that it takes."""
    check_precision(precision)
    parameter = first_parameter(module)
    parts = batches(split.to(parameter.device), batch_size, shuffle=False)
    shown = progress_bar(parts, "exits", batches_per_epoch(len(split), batch_size), progress and place()[0] == 0)
    start = perf_counter()
    with inference(module, precision):
        for images, labels, rows in shown:
            see(images.to(parameter.dtype), labels, rows)
    return perf_counter() - start


def _about(anytime: Anytime, precision: str) -> Row:
    model = anytime.model
    return {
        "horizon": model.horizon,
        "trained_horizon": model.trained_horizon,
        "solver": model.solver,
        "field": model.field,
        "step_size": model.step_size,
        "precision": precision,
        "criterion": anytime.criterion,
        "least": anytime.least,
        "every": anytime.every,
        "NFE": model.nfe,
    }


def _cost(steps: Tensor, about: Row) -> Row:
    """The columns of what images cost that took these steps, int64 (N,)."""
    mean = steps.double().mean().item()
    values, counts = steps.unique(return_counts=True)
    return {
        "mean_steps": mean,
        "mean_NFE": mean * about["NFE"] / about["horizon"],
        "saved": 1 - mean / about["horizon"],
        "exits": {str(step): images for step, images in zip(values.tolist(), counts.tolist())},
    }
