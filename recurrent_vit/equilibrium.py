"""Controls: where a trained field leads when its steps are not the trained ones.

The paper asks whether a recurrent block could be run to a fixed point z* = F(z*), as a deep equilibrium model is, and
finds such solvers divergent on it. Three ways are here, each for a field f: that of a model is `model.vector_field`,
F(z) - z (for the black-box control F itself). A fixed point is a zero of f.

    fixed_point    z <- z + f(z), the plain recurrence run until f vanishes
    anderson       the same, with each step corrected by the ones before it
    adaptive       dz/dt = f(z) up to a given time, by torchdiffeq's dopri5

None of them raises where it fails to arrive. All return a :class:`Solution`, which says for each image whether it did,
and what the field was on the way.

What counts is |f(z)| / |f(z_0)|, by how much the field has fallen since the start. The usual |f(z)| / |z| would call
arrived what merely grows: the blocks normalise what they read, so that f stays bounded while a drifting z does not.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .augment import normalize
from .cifar import Split
from .dynamics import MAX_IMAGES, accuracy
from .evaluate import checked, evaluation_mode, first_parameter, overflows, progress_bar
from .limits import MAX_STEP_SIZE, bounded_number
from .measures import norm
from .model import RecurrentVisionTransformer

__all__ = ["METHODS", "Solution", "adaptive", "anderson", "controls", "fixed_point", "import_odeint"]

MAX_EVALUATIONS = 100_000
BLOCK_APPLICATIONS = 200  # that `controls` spends on an image, a method

Field = Callable[[Tensor], Tensor]
Row = dict[str, Any]


class Solution(NamedTuple):
    """Where a solver ended, and how."""

    state: Tensor  # (B, ...), the last one that was reached
    residuals: Tensor  # float64 (T, B): |f(z)| / |f(z_0)| at the start and at each state reached, NaN if not finite
    evaluations: tuple[int, ...]  # of the field, when each of those T states was known
    converged: Tensor  # bool (B,): the last residual is small enough; for `adaptive`, the final time was reached
    nfe: int  # evaluations of the field in all, the same for every image


# ---- iterations ------------------------------------------------------------------------------------------------------


def fixed_point(field: Field, z: Tensor, *, tolerance: float = 1e-3, max_evaluations: int = 100) -> Solution:
    """Iterate z <- z + f(z) until f is small, for every image, or not finite.

    Args:
        field: f, from (B, ..., C) to the same shape, image by image.
        z: The start z_0.
        tolerance: An image has converged where |f(z)| <= tolerance |f(z_0)|.
        max_evaluations: Give up after so many evaluations.

    Returns:
        The solution; `converged` is about its `state`, whose residual is the last one.

    Raises:
        ValueError: `tolerance` or `max_evaluations` is out of range.

    Example:
        The distance to z* = 2 halves with each step of F(z) = z / 2 + 1:

        >>> found = fixed_point(lambda z: 1 - z / 2, torch.zeros(1, 1))
        >>> round(found.state.item(), 2), found.nfe, found.converged.tolist()
        (2.0, 11, [True])
    """
    return _iterate(field, z, lambda z, slope: z + slope, tolerance, max_evaluations)


def anderson(
    field: Field,
    z: Tensor,
    *,
    memory: int = 5,
    damping: float = 1.0,
    tolerance: float = 1e-3,
    max_evaluations: int = 100,
) -> Solution:
    """Anderson acceleration: step from the combination of the last states whose field, were it linear, is smallest.

    With the differences of successive states Z = [.., z_k - z_(k-1)] and of their slopes S = [.., f(z_k) - f(z_(k-1))],
    at most `memory` of each,

        c = argmin |f(z_k) - S c|,    z_(k+1) = z_k - Z c + damping (f(z_k) - S c),

    for each image by itself. If f is linear in n dimensions and memory >= n, z_(n+1) solves it, whether or not the
    plain iteration would converge.

    References: Walker, Ni, "Anderson Acceleration for Fixed-Point Iterations" (2011), https://doi.org/10.1137/10078356X;
    for deep equilibrium models Bai, Kolter, Koltun (2019), https://arxiv.org/abs/1909.01377

    Args:
        field: f, from (B, ...) to the same shape, image by image.
        z: The start z_0.
        memory: Differences to combine.
        damping: How much of the combined slope is followed.
        tolerance: As in `fixed_point`.
        max_evaluations: As in `fixed_point`.

    Returns:
        The solution, as `fixed_point` gives it.

    Raises:
        ValueError: `memory`, `tolerance` or `max_evaluations` is out of range.

    Example:
        F(z) = 3 - 2 z throws z away from its fixed point 1, twice as far in every step:

        >>> found = anderson(lambda z: 3 - 3 * z, torch.zeros(1, 1))
        >>> round(found.state.item(), 4), found.nfe
        (1.0, 3)
    """
    memory = bounded_number("memory", memory, 1, MAX_EVALUATIONS, whole=True)
    past: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory + 1)

    def advance(z: Tensor, slope: Tensor) -> Tensor:
        past.append((z, slope))
        if len(past) == 1:
            return z + damping * slope
        states, slopes = (_differences(column) for column in zip(*past))
        weights = _least_squares(slopes, slope.flatten(1))
        correction = (states + damping * slopes) @ weights[..., None]
        return z + damping * slope - correction.view_as(z)

    return _iterate(field, z, advance, tolerance, max_evaluations)


@torch.no_grad()
def _iterate(
    field: Field, z: Tensor, advance: Callable[[Tensor, Tensor], Tensor], tolerance: float, max_evaluations: int
) -> Solution:
    max_evaluations = _checked_amounts(tolerance, max_evaluations)
    trace = _Trace()
    while True:
        slope = field(z)
        residual = trace.note(z, slope, len(trace.residuals) + 1)
        converged = residual <= tolerance
        settled = converged | ~residual.isfinite()
        if settled.all() or len(trace.residuals) == max_evaluations:
            return trace.solution(z, converged, len(trace.residuals))
        place = settled.view(-1, *[1] * (z.dim() - 1))
        z = torch.where(place, z, advance(z, slope))  # what has settled waits, whatever the other images do


class _Trace:
    """The residuals of the states reached so far."""

    def __init__(self) -> None:
        self.residuals: list[Tensor] = []
        self.evaluations: list[int] = []
        self.first: Tensor | None = None

    def note(self, z: Tensor, slope: Tensor, evaluations: int) -> Tensor:
        """The residual (B,) of a state, where it and its slope are finite; otherwise NaN."""
        size = norm(slope)
        if self.first is None:
            self.first = size
        fine = ~overflows(z) & size.isfinite() & self.first.isfinite()
        residual = (size / self.first).masked_fill(size == 0, 0.0).where(fine, math.nan)
        self.residuals.append(residual)
        self.evaluations.append(evaluations)
        return residual

    def solution(self, state: Tensor, converged: Tensor, nfe: int) -> Solution:
        residuals = torch.stack(self.residuals).cpu()
        return Solution(state, residuals, tuple(self.evaluations), converged.cpu(), nfe)


def _differences(column: Iterable[Tensor]) -> Tensor:
    """Of m + 1 successive tensors (B, ...): (B, D, m)."""
    return torch.stack([after - before for before, after in pairwise(column)], -1).flatten(1, -2)


def _least_squares(a: Tensor, b: Tensor) -> Tensor:
    """argmin |b - a c| for each image, the shortest one: (B, D, m) and (B, D) to (B, m).

    By the normal equations of the columns at length 1, in float64; directions that are a millionth of the largest are
    left out. What is not finite counts as zero, so that an image that has diverged raises nothing, and takes a plain
    step.
    """
    dtype = a.dtype
    a, b = a.double(), b.double()
    length = torch.linalg.vector_norm(a, dim=1)
    a, b = torch.nan_to_num(a / length[:, None], 0, 0, 0), torch.nan_to_num(b, 0, 0, 0)
    gram = torch.linalg.pinv(a.mT @ a, rtol=1e-12, hermitian=True)
    weights = (gram @ (a.mT @ b[..., None]))[..., 0]
    return torch.nan_to_num(weights / length, 0, 0, 0).to(dtype)


def _checked_amounts(tolerance: float, max_evaluations: int) -> int:
    """The most evaluations."""
    bounded_number("tolerance", tolerance, 0, 1, above=True)
    most: int = bounded_number("max_evaluations", max_evaluations, 1, MAX_EVALUATIONS, whole=True)
    return most


# ---- adaptive integration --------------------------------------------------------------------------------------------


@torch.no_grad()
def adaptive(
    field: Field, z: Tensor, *, time: float = 1.0, tolerance: float = 1e-3, max_evaluations: int = 500
) -> Solution:
    """Integrate dz/dt = f(z) from time 0 by torchdiffeq's dopri5, which chooses its steps by an estimate of the error.

    Reference: Dormand, Prince, "A family of embedded Runge-Kutta formulae" (1980),
    https://doi.org/10.1016/0771-050X(80)90013-3

    Args:
        field: f, from (B, ...) to the same shape. The batch is one system: it has one step size, and so one NFE.
        z: The start z_0.
        time: Where to stop: steps times step size of the model that this is compared with.
        tolerance: Both relative, and absolute for each number in the state, of the error in a step.
        max_evaluations: Give up after so many evaluations.

    Returns:
        The solution; `state` is the one at `time`, or the last that was reached. Where `converged` is false, the steps
        shrank to nothing, the state ceased to be finite, or the evaluations were used up. The residuals are those at
        the ends of accepted steps.

    Raises:
        ImportError: torchdiffeq isn't installed.
        ValueError: An argument is out of range.
    """
    max_evaluations = _checked_amounts(tolerance, max_evaluations)
    time = bounded_number("time", time, 0, MAX_STEP_SIZE * MAX_EVALUATIONS, above=True)
    odeint = import_odeint()
    times = torch.tensor([0.0, time], dtype=torch.float64, device=z.device)
    watched = _Watched(field, z, max_evaluations)
    try:  # step_t: a step ends at the final time, where the state would otherwise be interpolated
        odeint(watched, z, times, rtol=tolerance, atol=tolerance, method="dopri5", options={"step_t": times[1:]})
    except _StoppedError:
        arrived = torch.zeros(len(z), dtype=torch.bool)
    else:
        arrived = ~overflows(watched.state)
    return watched.trace.solution(watched.state, arrived, watched.nfe)


class _StoppedError(Exception):
    """Ends an integration from inside."""


class _Watched:
    """A field in the form that torchdiffeq takes. It counts, keeps the trace, and ends what cannot end well.

    torchdiffeq's own checks are assertions, which a Python with -O leaves out.
    """

    def __init__(self, field: Field, start: Tensor, max_evaluations: int) -> None:
        self.field, self.state, self.max_evaluations = field, start, max_evaluations
        self.last = start, start
        self.trace = _Trace()
        self.nfe = 0

    def __call__(self, time: Tensor, z: Tensor) -> Tensor:
        if self.nfe == self.max_evaluations:
            raise _StoppedError
        slope = self.field(z)
        self.nfe += 1
        self.last = z, slope
        if self.nfe == 1:  # at the start
            self._note()
        return slope

    def callback_step(self, time: Tensor, z: Tensor, step: Tensor) -> None:
        """Before a step is tried."""
        if not (time + step > time and z.isfinite().all()):
            raise _StoppedError

    def callback_accept_step(self, *_: Tensor) -> None:
        """After a step was accepted. Its last evaluation was at the state that it leads to: dopri5 uses that again."""
        self._note()

    def _note(self) -> None:
        self.state = self.last[0]
        self.trace.note(*self.last, self.nfe)


def import_odeint() -> Any:
    """torchdiffeq's odeint.

    Raises:
        ImportError: torchdiffeq is missing; says how to install it.
    """
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise ImportError('this needs torchdiffeq: pip install "recurrent-vit[ode]"') from error
    return odeint


# ---- all of them on a model ------------------------------------------------------------------------------------------

METHODS: dict[str, Callable[..., Solution]] = {"fixed_point": fixed_point, "anderson": anderson, "dopri5": adaptive}


def controls(
    model: nn.Module,
    split: Split,
    *,
    methods: Iterable[str] = METHODS,
    count: int = 64,
    tolerance: float = 1e-3,
    max_evaluations: int | None = None,
    progress: bool = False,
) -> Iterator[tuple[Row, Solution]]:
    """Run the solvers on the first images of a split, as one batch, and classify the states where they end.

    Args:
        model: A `RecurrentVisionTransformer`; its own solver and horizon play no part, its field does.
        split: Labelled images of the model's size.
        methods: Keys of METHODS. dopri5 integrates up to the trained number of steps times the step size.
        count: Number of images.
        tolerance: Of each solver.
        max_evaluations: Of each solver; default 200 applications of a block, so fewer of a set of several.
        progress: Show a bar on standard error, if that is a terminal.

    Returns:
        An iterator of (row, solution), one for each method:

        - method, NFE, tolerance
        - converged: fraction of the images
        - field_left: median of the last |f(z)| / |f(z_0)| over the images that are finite; None if there are none
        - top1, top1_stderr: fraction of correct predictions from the last state
        - non_finite: images whose state or logits are not finite; they count as wrong
        - count: images

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
        ImportError: dopri5 is asked for, and torchdiffeq isn't installed.
    """
    model, names = checked(model, split), list(methods)
    for name in names:
        if name not in METHODS:
            raise ValueError(f"method {name!r} is unknown; known methods: {', '.join(METHODS)}")
    count = bounded_number("count", count, 1, MAX_IMAGES, whole=True)
    if max_evaluations is None:
        max_evaluations = max(1, BLOCK_APPLICATIONS // model.depth)
    max_evaluations = _checked_amounts(tolerance, max_evaluations)
    if "dopri5" in names:
        import_odeint()
    return _run(model, split[:count], names, tolerance, max_evaluations, progress)


def _run(
    model: RecurrentVisionTransformer,
    split: Split,
    methods: list[str],
    tolerance: float,
    max_evaluations: int,
    progress: bool,
) -> Iterator[tuple[Row, Solution]]:
    options: dict[str, Any] = {"tolerance": tolerance, "max_evaluations": max_evaluations}
    images = normalize(split.images).to(first_parameter(model))
    for name in progress_bar(methods, "controls", len(methods), progress, unit="method"):
        with evaluation_mode(model), torch.no_grad():
            more = {"time": model.trained_time} if name == "dopri5" else {}
            solution = METHODS[name](model.vector_field, model.initial_state(images), **options, **more)
            logits = model.forward_head(model.norm(solution.state)).double()
        finite = (logits.isfinite().all(-1) & ~overflows(solution.state)).cpu()
        correct = (logits.argmax(-1).cpu() == split.labels.cpu()) & finite
        left = torch.nanquantile(solution.residuals[-1], 0.5).item()
        row = {
            "method": name,
            "NFE": solution.nfe,
            "tolerance": tolerance,
            "converged": solution.converged.double().mean().item(),
            "field_left": left if math.isfinite(left) else None,
            **accuracy(correct, finite),
        }
        yield row, solution
