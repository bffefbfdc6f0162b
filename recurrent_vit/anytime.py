"""Early exit, image by image: what is sure of its answer leaves the batch, and the rest runs on without it.

    >>> import timm, torch, recurrent_vit
    >>> model = timm.create_model("bvit_ds").eval()
    >>> anytime = recurrent_vit.Anytime(model, criterion="confidence", threshold=0.9)
    >>> with torch.inference_mode():
    ...     logits, steps = anytime(torch.randn(3, 3, 32, 32))
    >>> logits.shape, steps.tolist()  # untrained, the model is never sure, and all images take its twelve steps
    (torch.Size([3, 100]), [12, 12, 12])

What is notable:

- A criterion is a row of a table: one number for each image at a check, and the side of the threshold that is sure.
- The horizon of the model is the most. A threshold that is never met gives what the model gives, to the bit.
- Time is saved because finished images leave the batch. A batch of another size is rounded otherwise, so logits differ
  from those of the whole batch in their last digits.
- A state that has overflowed (a mis-specified field grows without bound) is never sure, whatever its logits are.
- Which threshold is worth what is the subject of `recurrent_vit.calibration`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .evaluate import first_parameter, overflows
from .limits import LIMITS, bounded_number
from .model import RecurrentVisionTransformer, check_model

__all__ = ["COMPACT", "CRITERIA", "Anytime", "AnytimeOutput", "Criterion", "Look", "parse"]

COMPACT = 1 / 16


# ---- criteria --------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What a criterion sees of B images at a check, after s steps."""

    logits: Tensor  # (B, classes)
    streaks: Tensor  # int64 (B,): checks in a row, this one included, that gave the same answer
    z: Tensor  # (B, N, C): the state z_s
    before: Tensor  # (B, N, C): the state z_(s-1), one step earlier


def confidence(look: Look) -> Tensor:
    """max_c p_c, where p = softmax(logits): the probability of the answer.

    Reference: Huang et al., "Multi-Scale Dense Networks for Resource Efficient Image Classification" (2018),
    https://arxiv.org/abs/1703.09844

    Example:
        >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> confidence(Look(logits, *[torch.empty(0)] * 3))
        tensor([0.5000])
    """
    return wide(look.logits).softmax(-1).amax(-1)


def margin(look: Look) -> Tensor:
    """p_(1) - p_(2), where p = softmax(logits): by how much the answer is more probable than the second best.

    Reference: Schuster et al., "Confident Adaptive Language Modeling" (2022), https://arxiv.org/abs/2207.07061

    Example:
        >>> logits = torch.tensor([[0.5, 0.125, 0.375]]).log()
        >>> margin(Look(logits, *[torch.empty(0)] * 3))
        tensor([0.1250])
    """
    first, second = wide(look.logits).softmax(-1).topk(2).values.unbind(-1)
    return first - second


def stable(look: Look) -> Tensor:
    """How many checks in a row, this one included, gave the same answer argmax_c logits_c.

    Reference: Zhou et al., "BERT Loses Patience" (2020), https://arxiv.org/abs/2006.04152, whose patience is one less:
    it counts repetitions.
    """
    return look.streaks


def step_norm(look: Look) -> Tensor:
    """||z_s - z_(s-1)|| / ||z_(s-1)||, the Frobenius norm over tokens and channels: how far the last step went.

    States in bfloat16 have three digits, so that nothing much below 1e-3 can be told there.

    Reference: Bai et al., "Deep Equilibrium Models" (2019), https://arxiv.org/abs/1909.01377, whose solvers stop so.

    Example:
        >>> before, z = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 3.0]]])
        >>> step_norm(Look(torch.empty(0), torch.empty(0), z, before))
        tensor([0.2000])
    """
    z, before = wide(look.z).flatten(1), wide(look.before).flatten(1)
    return torch.linalg.vector_norm(z - before, dim=1) / torch.linalg.vector_norm(before, dim=1)


@dataclass(frozen=True)
class Criterion:
    """What says whether an image is sure of its answer: a number, and a side of the threshold.

    Args:
        name: The name a user asks for.
        measure: The number of each image, (B,).
        rising: Whether an image is sure at or above the threshold, or else at or below it.
        least: The smallest threshold.
        most: The largest.
        whole: Whether the threshold is a whole number.
    """

    name: str
    measure: Callable[[Look], Tensor]
    rising: bool = True
    least: float = 0
    most: float = 1
    whole: bool = False

    def is_met(self, scores: Tensor, threshold: float | None) -> Tensor:
        """bool, of the shape of `scores`: which of them are sure. NaN never is; at threshold None, nothing is.

        Example:
            >>> CRITERIA["step_norm"].is_met(torch.tensor([0.125, 0.25, 0.5, float("nan")]), 0.25).tolist()
            [True, True, False, False]
        """
        if threshold is None:
            return torch.zeros_like(scores, dtype=torch.bool)
        return scores >= threshold if self.rising else scores <= threshold

    def check(self, threshold: Any) -> float | None:
        """The threshold, if it is a number in the range of this criterion, or None; otherwise a ValueError."""
        if threshold is None:
            return None
        return bounded_number(f"{self.name} threshold", threshold, self.least, self.most, whole=self.whole)


CRITERIA: dict[str, Criterion] = {
    criterion.name: criterion
    for criterion in (
        Criterion("confidence", confidence),
        Criterion("margin", margin),
        Criterion("stable", stable, least=1, most=LIMITS["horizon"], whole=True),
        Criterion("step_norm", step_norm, rising=False, most=10_000),
    )
}


def parse(text: str) -> tuple[str, float | None]:
    """Criterion and threshold of CRITERION[:THRESHOLD]; the threshold is None where there is none.

    Raises:
        ValueError: The criterion is unknown, or the threshold is not in its range.

    Example:
        >>> parse("confidence:0.9"), parse("stable:3"), parse("margin")
        (('confidence', 0.9), ('stable', 3), ('margin', None))
        >>> parse("confidence:high")
        Traceback (most recent call last):
        ...
        ValueError: anytime='confidence:high': 'high' is not a number; give CRITERION:THRESHOLD, e.g. confidence:0.9
    """
    name, colon, number = text.partition(":")
    criterion = get_criterion(name)
    if not colon:
        return name, None
    try:
        threshold = float(number)
    except ValueError as error:
        raise ValueError(
            f"anytime={text!r}: {number!r} is not a number; give CRITERION:THRESHOLD, e.g. confidence:0.9"
        ) from error
    return name, criterion.check(threshold)


def get_criterion(name: Any) -> Criterion:
    if not isinstance(name, str) or name not in CRITERIA:
        raise ValueError(f"criterion={name!r} is unknown; known criteria: {', '.join(CRITERIA)}")
    return CRITERIA[name]


def wide(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- the module ------------------------------------------------------------------------------------------------------


class AnytimeOutput(NamedTuple):
    """What came of B images, in the order in which they were given."""

    logits: Tensor  # (B, classes): after the steps that the image took
    steps: Tensor  # int64 (B,): these steps, 1 to horizon; times model.evaluations_per_step they are evaluations


class Anytime(nn.Module):
    """A model that stops each image of a batch as soon as a criterion says that its answer is sure.

    An image that never is sure takes all the steps of the model (its `horizon`, which may be changed at any time), and
    has the logits of the last. A model of one step, as `vit_cifar` is, leaves nothing to save.

    In shapes, B counts images, N tokens, and C is embed_dim.

    Args:
        model: A `RecurrentVisionTransformer`, of whatever solver, field, depth and stages. It is held, not copied.
        criterion: A key of `CRITERIA`: confidence, margin, stable, step_norm.
        threshold: What the criterion must reach: a probability for confidence and margin, a number of checks in a row
            for stable, a fraction that must not be exceeded for step_norm. :func:`calibrate` finds one. None: never.
        least: The first step after which it is checked. By default the first whose answer was trained, where the model
            has several stages (`model.steps`); with one stage none but the last was, and it is 1.
        every: Check after every so many steps from there on. A check costs the final norm and the head (a tenth of a
            step of `bvit` on a CPU), but what is found to be sure a step too late costs that step: 1 by default.
        compact: Fraction of the batch, 0 to 1, that must have finished before it is removed; until then it is computed
            along, and ignored. Removal copies the states of the rest. In the CIFAR models a state is 64 KiB, and
            copying it takes (by estimate) 3 % of the time of a step, so removal pays within one step if more than 3 %
            are gone. The default is twice that, 1/16. 0 removes at every exit, 1 not before all are done.

    Nothing here needs a graph: call it under `torch.inference_mode()` or `torch.no_grad()`. Otherwise a graph is made
    through the steps that each image took; the decision has no gradient. In training mode it does the same, but dropout
    and stochastic depth make the criterion random: call `eval()` first.

    It takes steps of its own, as `evaluate` does: hooks on `model.taps` are not called.

    Where it goes on depends on the data, so it can be neither scripted nor exported, and every check waits for a GPU.
    To compile, compile the blocks, with dynamic=True: the batch shrinks.

    Raises:
        ValueError: An argument out of its range, or a model that gives no logits; names what is allowed.

    Example:
        >>> import timm, torch, recurrent_vit
        >>> model = timm.create_model("bvit", embed_dim=16, num_heads=2).eval()
        >>> anytime = Anytime(model, criterion="stable", threshold=3, least=2, every=4)
        >>> anytime.checks
        [2, 6, 10, 12]
        >>> Anytime(model, "confidence", threshold=2)
        Traceback (most recent call last):
        ...
        ValueError: confidence threshold=2 must be a number from 0 to 1
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: str = "confidence",
        threshold: float | None = 0.9,
        *,
        least: int | None = None,
        every: int = 1,
        compact: float = COMPACT,
    ) -> None:
        super().__init__()
        self.model = _with_logits(model)
        self.criterion = get_criterion(criterion).name
        self.threshold = CRITERIA[criterion].check(threshold)
        first = self.model.steps if self.model.stages > 1 else 1
        self.least: int = bounded_number("least", first if least is None else least, 1, LIMITS["horizon"], whole=True)
        self.every: int = bounded_number("every", every, 1, LIMITS["horizon"], whole=True)
        self.compact: float = bounded_number("compact", compact, 0, 1)
        self.training = model.training

    def extra_repr(self) -> str:
        """The arguments, for `print`."""
        names = ("criterion", "threshold", "least", "every", "compact")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    @property
    def checks(self) -> list[int]:
        """The steps after which the criterion is asked, and the horizon, after which it isn't; ascending."""
        horizon = self.model.horizon
        return [*range(self.least, horizon, self.every), horizon]

    def forward(self, x: Tensor) -> AnytimeOutput:
        """Images (B, in_chans, H, W), floating point, to logits (B, num_classes) and steps (B,)."""
        logits, steps, _ = self.exits(x)
        return AnytimeOutput(logits, steps)

    def exits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, num_classes), steps (B,), and, bool (B,), whether the answer means anything: see `is_sound`."""
        self.model.check_whole()
        if not len(x):  # not every kernel takes an empty batch
            none = torch.empty(0, dtype=torch.int64, device=x.device)
            return first_parameter(self).new_empty(0, self.model.num_classes), none, none.bool()
        run, horizon = Running(self.model.initial_state(x)), self.model.horizon
        parts: list[tuple[Tensor, ...]] = []
        for step, look in self.looks(run):
            sure = run.unfinished if step == horizon else run.unfinished & self._is_sure(look)
            done = sure.nonzero().flatten()
            sound = is_sound(look.logits[done], look.z[done])  # only of these, since it costs a pass over the state
            if step < horizon:
                done, sound = done[sound], sound[sound]
            parts.append((run.rows[done], look.logits[done], torch.full_like(done, step), sound))
            run.finish(done, self.compact)
            if not len(run.rows):
                break
        rows, *columns = (torch.cat(column) for column in zip(*parts))
        order = rows.argsort()
        logits, steps, sound = (column[order] for column in columns)
        return logits, steps, sound

    def looks(self, run: "Running") -> Iterator[tuple[int, Look]]:
        """(step, what there is to see) after every step that is a check; the batch may have shrunk in between."""
        checks = set(self.checks)
        for step in range(1, self.model.horizon + 1):
            run.step(self.model)
            if step in checks:
                yield step, run.look(self.model)

    def _is_sure(self, look: Look) -> Tensor:
        criterion = CRITERIA[self.criterion]
        return criterion.is_met(criterion.measure(look), self.threshold)


class Running:
    """The images that are in the batch, M of B: their states, what they answered last, where they belong."""

    def __init__(self, z: Tensor) -> None:
        self.z = self.before = z  # (M, N, C)
        self.rows = torch.arange(len(z), device=z.device)  # (M,): places in the batch that came in
        self.unfinished = torch.ones_like(self.rows, dtype=torch.bool)
        self.answers = torch.full_like(self.rows, -1)
        self.streaks = torch.zeros_like(self.rows)

    def step(self, model: RecurrentVisionTransformer) -> None:
        self.before, self.z = self.z, model.step(self.z)

    def look(self, model: RecurrentVisionTransformer) -> Look:
        logits = model.forward_head(model.norm(self.z))
        answers = logits.argmax(-1)
        self.streaks = torch.where(answers == self.answers, self.streaks + 1, torch.ones_like(self.streaks))
        self.answers = answers
        return Look(logits, self.streaks, self.z, self.before)

    def finish(self, done: Tensor, compact: float) -> None:
        """Note that these places of the M are finished, and remove all finished ones if they are enough."""
        self.unfinished[done] = False
        left, total = int(self.unfinished.sum()), len(self.rows)
        if left < total and total - left >= compact * total:
            kept = self.unfinished.nonzero().flatten()
            for name in ("z", "rows", "unfinished", "answers", "streaks"):
                setattr(self, name, getattr(self, name).index_select(0, kept))
            self.before = self.z  # the next step sets it; until then it must not hold the larger batch


def is_sound(logits: Tensor, z: Tensor) -> Tensor:
    """bool (B,): whether an answer means anything: the logits are finite, and come from a state that norms can take."""
    return logits.isfinite().all(-1) & ~overflows(z)


def _with_logits(model: nn.Module) -> RecurrentVisionTransformer:
    model = check_model(model)
    if model.num_classes < 2 or not model.global_pool:
        raise ValueError(
            f"model has num_classes={model.num_classes}, global_pool={model.global_pool!r}: exits are decided on the "
            "logits of an image, so it must have at least 2 classes, and pooling"
        )
    return model
