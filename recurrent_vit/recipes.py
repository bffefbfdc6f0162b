"""Training recipes as data, and the plan that a recipe and a budget of compute make for a model.

A recipe is a sequence of phases, each with its own image size and fraction of the model's block applications, and a
share of the compute. Cheap phases come first: the flow that the full model runs is learned at low resolution with few,
large steps. Compute is counted in PFLOP (1e15 floating-point operations): one multiply-accumulate is two of them, and a
training image costs three forward passes.

`paper`: the protocol of "Training Crossroads for Recurrent Vision Transformers" (2026), arXiv 2608.04879.
`short`: ours, for a budget of compute that two CPU cores spend in two hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import timm

from .augment import Augmentation
from .limits import PLAIN
from .model import RecurrentVisionTransformer

__all__ = ["RECIPES", "Leg", "Phase", "Recipe", "make_plan", "schedule_arguments"]

PFLOP = 10**15
MAX_PFLOP = 1_000_000


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one image size and one number of steps.

    Args:
        share: Of the recipe's compute.
        size: Height and width of the images in pixels.
        fraction: Of the model's block applications: 1/4 trains a model of 12 steps with 3.
        batch_size: Images in one update, over all processes.
        micro_batch: Images in one forward and backward pass.
        padding: The largest shift of the augmentation, in pixels of the 32-pixel image.
        ema: Whether to keep an exponential moving average of the weights.
    """

    share: float
    size: int
    fraction: Fraction
    batch_size: int
    micro_batch: int
    padding: int
    ema: bool = False


@dataclass(frozen=True)
class Recipe:
    """How to train, with what it rests on and what it gave.

    Args:
        name: For `recurrent-vit train --recipe`.
        source: Where it comes from, and what of it is our choice.
        expected: The accuracy measured with it, or "not run".
        time: The time that it took, and where; or "not run".
        command: The command that runs it.
        phases: In order; the shares add up to 1.
        pflop: Compute in units of 1e15 FLOP; None where `epochs` says it.
        epochs: Passes over the training set in the last phase's configuration; None where `pflop` says it.
        muon_lr: Learning rate of Muon on the matrices of the blocks; 0 leaves everything to AdamW.
        adamw_lr: Learning rate of AdamW on all else.
        betas: Of AdamW.
        weight_decay: Decoupled, on matrices only.
        clip: Largest norm of AdamW's gradients when Muon does the rest; None for no clipping.
        warmup: Fraction of the compute in which the learning rate rises to its value.
        hold: Fraction of the compute from which on it falls to 0.
        decay: The form of the fall, "linear" or "cosine".
        label_smoothing: Of the cross-entropy.
        dropout: After the attention projection, the gate, and the last linear layer (timm's proj_drop_rate).
        flip: As in `augment.Augmentation`.
        ema_decay: Of the moving average.
        ema_warmup: Whether its decay starts at 0 and rises as t / (10 + t), t counting updates.
        publish: Which weights are kept as the result, "raw" or "ema"; decided beforehand.
        whiten: Whether the patch embedding starts as a whitening of training patches.
        head_scale: Factor on the initial weights of the classifier.
    """

    name: str
    source: str
    expected: str
    time: str
    command: str
    phases: tuple[Phase, ...]
    pflop: float | None = None
    epochs: float | None = None
    muon_lr: float = 0.0
    adamw_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.05
    clip: float | None = None
    warmup: float = 0.0
    hold: float = 0.0
    decay: str = "linear"
    label_smoothing: float = 0.0
    dropout: float = 0.0
    flip: str = "random"
    ema_decay: float = 0.999
    ema_warmup: bool = False
    publish: str = "raw"
    whiten: bool = False
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        if abs(sum(phase.share for phase in self.phases) - 1) > 1e-9:
            raise ValueError(f"recipe {self.name!r}: the shares of its phases must add up to 1")
        if (self.pflop is None) == (self.epochs is None):
            raise ValueError(f"recipe {self.name!r}: give pflop or epochs, one of them")
        if self.publish == "ema" and not self.phases[-1].ema:
            raise ValueError(f"recipe {self.name!r}: publish='ema' needs an average in the last phase")

    def learning_rate(self, progress: float) -> float:
        """Factor on the learning rates when `progress` (0 to 1) of the compute is spent.

        Example:
            >>> [round(RECIPES["short"].learning_rate(p), 3) for p in (0.0, 0.015, 0.03, 0.45, 0.725, 1.0)]
            [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
        """
        if progress < self.warmup:
            return progress / self.warmup
        if progress < self.hold:
            return 1.0
        left = (1 - progress) / (1 - max(self.hold, self.warmup))
        return left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2

    @property
    def settings(self) -> str:
        """The fields that training depends on, as text; those that only describe are left out."""
        return repr(replace(self, source="", expected="", time="", command=""))

    def augmentation(self, phase: Phase) -> Augmentation:
        """What the phase does to its images."""
        return Augmentation(padding=phase.padding, flip=self.flip, size=phase.size)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="paper",
            source="that of arXiv 2608.04879: 200 epochs, AdamW 1e-3, weight decay 0.05, batch 128, dropout 0.1, "
            "EMA 0.999, cross-entropy, three runs. Open there and ours: cosine decay to 0 after 5 epochs of warm-up, "
            "random crop with padding 4 and flip, no decay on biases, norms and positions, dropout after the attention "
            "projection, the gate and the last linear layer of a block, the average published. Other than there: the "
            "accuracy of the last epoch is reported, not the best on the test images.",
            expected="not run",
            time="not run; 38 PFLOP a model",
            command="recurrent-vit train bvit --recipe paper --data DATA --out runs/bvit.paper --seed 0  # and 1, 2",
            phases=(Phase(1.0, 32, Fraction(1), batch_size=128, micro_batch=64, padding=4, ema=True),),
            epochs=200,
            warmup=5 / 200,
            decay="cosine",
            dropout=0.1,
            publish="ema",
        ),
        Recipe(
            name="short",
            source="ours: resolution and step schedules, Muon on the block's matrices (Jordan 2024, "
            "https://kellerjordan.github.io/posts/muon/), alternating flip, whitened patch embedding "
            "(Jordan 2024, https://arxiv.org/abs/2404.00498), learning rate by compute.",
            expected="top-1 on the test images in per cent: bvit 59.88 ± 0.49, bvit_ode_heun 60.39 ± 0.49, "
            "bvit_ode_rk4 60.71 ± 0.49, bvit_ds 56.71 ± 0.50; seed 0, one run each",
            time="2 hours a model for 1 PFLOP on 2 cores (AMD EPYC), fp32, without the times that a run was suspended",
            command="recurrent-vit train bvit --recipe short --data DATA --out runs/bvit --seed 0",
            phases=(
                Phase(0.15, 16, Fraction(1, 4), batch_size=256, micro_batch=128, padding=2),
                Phase(0.30, 20, Fraction(1, 4), batch_size=256, micro_batch=128, padding=2),
                Phase(0.25, 24, Fraction(1, 2), batch_size=256, micro_batch=128, padding=2),
                Phase(0.30, 32, Fraction(1), batch_size=128, micro_batch=64, padding=4, ema=True),
            ),
            pflop=1.0,
            muon_lr=3e-3,
            adamw_lr=2e-3,
            betas=(0.9, 0.95),
            clip=1.0,
            warmup=0.03,
            hold=0.45,
            label_smoothing=0.1,
            flip="alternating",
            ema_decay=0.99,
            ema_warmup=True,
            whiten=True,
            head_scale=0.1,
        ),
    )
}


@dataclass(frozen=True)
class Leg:
    """One phase of a plan: what to build, for how long, at what cost.

    Args:
        phase: The recipe's row.
        model_args: Arguments of `timm.create_model` that differ from the finished model's.
        updates: Optimizer steps.
        first_epoch: Number of the first epoch; every leg begins a new one.
        per_epoch: Updates in an epoch.
        flop_per_image: Of one training image: forward and backward.
        spent: FLOP spent by the legs before.
    """

    phase: Phase
    model_args: dict[str, Any]
    updates: int
    first_epoch: int
    per_epoch: int
    flop_per_image: int
    spent: int

    @property
    def flop_per_update(self) -> int:
        return self.flop_per_image * self.phase.batch_size

    @property
    def flop(self) -> int:
        return self.updates * self.flop_per_update


def schedule_arguments(model: RecurrentVisionTransformer, fraction: Fraction) -> dict[str, Any]:
    """The arguments that build `model` with about that fraction of its block applications.

    Stages keep their steps, so that their supervised times stay; without stages there are fewer steps; a model that
    runs its blocks once has fewer blocks.

    Example:
        >>> schedule_arguments(timm.create_model("bvit_ds", device="meta"), Fraction(1, 2))
        {'depth': 1, 'steps': 3, 'stages': 2}
    """
    lengths = {"depth": model.depth, "steps": model.steps, "stages": model.stages}
    key = next((key for key in ("stages", "steps") if lengths[key] > 1), "depth")
    return {**lengths, key: max(1, round(lengths[key] * fraction))}


def make_plan(name: str, recipe: Recipe, images: int, pflop: float | None = None, **model_kwargs: Any) -> list[Leg]:
    """What the recipe comes to for a model, a number of training images and a budget.

    A Runge-Kutta model covers the time of its first leg in all of them by a smaller step size, but for the last, which
    runs at the model's own.

    Args:
        name: Name for `timm.create_model`.
        recipe: A row of `RECIPES`, or another.
        images: Number of training images.
        pflop: Compute in units of 1e15 FLOP; default the recipe's own.
        model_kwargs: Other arguments of the model.

    Raises:
        ValueError: The budget is not positive, or leaves a phase without an update.

    Example:
        >>> plan = make_plan("bvit", RECIPES["short"], images=50_000, pflop=0.12)
        >>> [(leg.phase.size, leg.model_args["steps"], leg.updates) for leg in plan]
        [(16, 3, 304), (20, 3, 387), (24, 6, 111), (32, 12, 74)]
    """
    final: Any = timm.create_model(name, device="meta", **model_kwargs)
    budget = pflop if pflop is not None else recipe.pflop
    if budget is None:
        budget = (recipe.epochs or 0) * images * _flop_per_image(final, recipe.phases[-1].size) / PFLOP
    if not 0 < budget <= MAX_PFLOP:
        raise ValueError(f"pflop={budget!r} must be a number above 0, at most {MAX_PFLOP:,}")
    plan: list[Leg] = []
    for number, phase in enumerate(recipe.phases):
        args = schedule_arguments(final, phase.fraction)
        model: Any = timm.create_model(name, device="meta", **{**model_kwargs, **args})
        if final.solver != PLAIN:
            shrink = (
                1.0 if not plan or number == len(recipe.phases) - 1 else plan[0].model_args["steps"] / args["steps"]
            )
            args["step_size"] = final.step_size * shrink
        flop_per_image = _flop_per_image(model, phase.size)
        updates = round(phase.share * budget * PFLOP / (flop_per_image * phase.batch_size))
        per_epoch = images // phase.batch_size
        if min(updates, per_epoch) < 1:
            raise ValueError(
                f"pflop={budget:g}, {images} images: the phase at {phase.size} px has no whole update of "
                f"{phase.batch_size} images"
            )
        last = plan[-1] if plan else None
        plan.append(
            Leg(
                phase,
                args,
                updates,
                first_epoch=last.first_epoch + math.ceil(last.updates / last.per_epoch) if last else 0,
                per_epoch=per_epoch,
                flop_per_image=flop_per_image,
                spent=last.spent + last.flop if last else 0,
            )
        )
    return plan


def _flop_per_image(model: RecurrentVisionTransformer, size: int) -> int:
    rows, columns = (size // side for side in model.patch_embed.patch_size)
    return 3 * 2 * model.count_macs(grid_size=(rows, columns))
