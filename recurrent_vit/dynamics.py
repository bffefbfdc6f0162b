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

- Measures are pure functions of tensors whose first dimension counts images; norms and sums are taken in float64.
- :func:`measure` is one pass over the images. It keeps a few numbers an image and step, a covariance a step, and the
  class states of the first images for a picture; never the states.
- The Jacobian is that of the step map, dG/dz: F' for the plain recurrence, not R' = F' - 1. Three numbers say different
  things of it. Its spectral radius tells whether changes die out if the state stands still; its largest singular value,
  how much one step can stretch a change at most; the growth along the orbit, what the steps really do to one, together.
- The class state is what the head sees: with mean pooling, the mean of the tokens after the final norm.
- An image whose state is no longer finite is left out of the statistics, and is counted.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cifar import Split, batches, batches_per_epoch, normalize
from .evaluate import checked, evaluation_mode, overflows
from .limits import LIMITS, bounded_horizon
from .model import RecurrentVisionTransformer

__all__ = [
    "PCA", "Covariance", "Dynamics", "Jacobians", "accuracy", "cka", "cosine", "entropy", "hsic", "jacobians",
    "measure", "norm", "orbit_growth", "participation_ratio", "pca", "relative_norm", "resolve_horizon", "rows",
    "sigma_max", "spectral_radius",
]  # fmt: skip

Row = dict[str, Any]
Map = Callable[[Tensor], Tensor]


# ---- measures of states ----------------------------------------------------------------------------------------------


def norm(z: Tensor) -> Tensor:
    """Euclidean norm of each image's state: (B, ...) to float64 (B,)."""
    return torch.linalg.vector_norm(z.flatten(1), dim=1, dtype=torch.float64)


def relative_norm(u: Tensor, z: Tensor) -> Tensor:
    """|u| / |z| for each image: of an update the relative step norm, of the field the residual of the fixed point.

    Args:
        u: (B, ...).
        z: (B, ...).

    Returns:
        float64 (B,).

    Example:
        >>> relative_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]])).item()
        0.5
    """
    return norm(u) / norm(z)


def cosine(u: Tensor, v: Tensor) -> Tensor:
    """u . v / (|u| |v|) for each image: between successive updates 1 is straight on, -1 back and forth.

    An update is a difference of states, so near a fixed point its direction is lost in rounding.

    Args:
        u: (B, ...).
        v: (B, ...), like u.

    Returns:
        float64 (B,); NaN where one of the two is zero.

    Example:
        >>> cosine(torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, 0.0]])).item()
        -1.0
    """
    product = (u.flatten(1).double() * v.flatten(1).double()).sum(1)
    return product / (norm(u) * norm(v))


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax in nats: -sum_k p_k ln p_k. (..., classes) to (...).

    Example:
        >>> round(entropy(torch.zeros(2)).item(), 4)
        0.6931
    """
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def participation_ratio(covariance: Tensor) -> Tensor:
    """How many directions the variance is spread over: (sum_i l_i)^2 / sum_i l_i^2 with the eigenvalues l_i.

    It is 1 if all variance lies on a line, and C if it is the same in all C directions. No eigenvalue is computed: the
    sums are the trace and the squared Frobenius norm.

    Reference: Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement" (2017),
    https://doi.org/10.1101/214262

    Args:
        covariance: (..., C, C), symmetric; its scale plays no part.

    Returns:
        (...); NaN where there is no variance.

    Example:
        >>> participation_ratio(torch.diag(torch.tensor([2.0, 2.0, 2.0, 0.0]))).item()
        3.0
    """
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace.square() / covariance.square().sum((-2, -1))


class Covariance:
    """Mean and covariance, in float64, of vectors that come in parts.

    Two parts of n and m vectors are joined by mean and scatter S = sum (x - mean) (x - mean)^T:

        S = S_1 + S_2 + n m / (n + m) d d^T,    d = mean_2 - mean_1,

    which loses no digits to a large mean. Reference: Chan, Golub, LeVeque, "Algorithms for Computing the Sample
    Variance" (1983), https://doi.org/10.1080/00031305.1983.10483115

    Example:
        >>> seen = Covariance()
        >>> seen.add(torch.tensor([[1.0], [3.0]]))
        >>> seen.add(torch.tensor([[5.0]]))
        >>> seen.mean.item(), seen.covariance.item()
        (3.0, 4.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.scatter: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """Take in the vectors x (n, C)."""
        x, count = x.double(), self.count + len(x)
        mean = x.mean(0)
        centred, shift = x - mean, mean - self.mean
        self.scatter = self.scatter + centred.T @ centred + torch.outer(shift, shift) * (self.count * len(x) / count)
        self.mean = self.mean + shift * (len(x) / count)
        self.count = count

    @property
    def covariance(self) -> Tensor:
        """(C, C), with the divisor n - 1; NaN for a single vector."""
        return torch.as_tensor(self.scatter) / (self.count - 1 or math.nan)


def hsic(kernels: Tensor) -> Tensor:
    """Unbiased Hilbert-Schmidt independence criterion between each two of S representations of the same n images.

    With the kernel matrix K of a representation, k_i = sum_(j != i) K_ij and k = sum_i k_i,

        U(K)_ij = K_ij - (k_i + k_j) / (n - 2) + k / ((n - 1) (n - 2)),    i != j,
        HSIC(K, L) = sum_(i != j) U(K)_ij U(L)_ij / (n (n - 3)).

    Reference: Song et al., "Feature Selection via Dependence Maximization" (2012),
    https://jmlr.org/papers/v13/song12a.html; in this form Székely, Rizzo, "Partial distance correlation with methods
    for dissimilarities" (2014), https://doi.org/10.1214/14-AOS1255

    Args:
        kernels: (S, n, n), symmetric; for a linear kernel K_ij = x_i . x_j.

    Returns:
        (S, S). Its mean over minibatches of images is as unbiased as the value of all of them at once.

    Raises:
        ValueError: There are fewer than four images.
    """
    n = kernels.shape[-1]
    if n < 4:
        raise ValueError(f"kernels of {n} images: an unbiased HSIC needs at least 4")
    apart = 1 - torch.eye(n, dtype=kernels.dtype, device=kernels.device)
    k = kernels * apart
    rows = k.sum(-1)
    shift = (rows[:, :, None] + rows[:, None, :]) / (n - 2) - rows.sum(-1)[:, None, None] / ((n - 1) * (n - 2))
    centred = ((k - shift) * apart).flatten(1)
    return centred @ centred.T / (n * (n - 3))


def cka(hsic: Tensor) -> Tensor:
    """Centred kernel alignment: HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)).

    1 for representations that are equal up to rotation, scale and shift; around 0 for independent ones, since the HSIC
    is the unbiased one (with the usual one, 512 images of independent noise in 256 dimensions would have 1/3).

    References: Kornblith et al., "Similarity of Neural Network Representations Revisited" (2019),
    https://arxiv.org/abs/1905.00414; over minibatches Nguyen, Raghu, Kornblith (2021), https://arxiv.org/abs/2010.15327

    Args:
        hsic: (S, S), from :func:`hsic` or its mean over minibatches.

    Returns:
        (S, S); NaN for a representation without variance.

    Example:
        >>> x = torch.tensor([[1.0], [0.0], [-2.0], [3.0], [5.0]]) * torch.tensor([1.0, 2.0])
        >>> gram = x @ x.T
        >>> [[round(value, 4) for value in row] for row in cka(hsic(torch.stack([gram, 7 * gram]))).tolist()]
        [[1.0, 1.0], [1.0, 1.0]]
    """
    scale = hsic.diagonal().sqrt()
    return hsic / scale[:, None] / scale


class PCA(NamedTuple):
    """The plane, or flat of more dimensions, of largest variance."""

    mean: Tensor  # float64 (C,)
    axes: Tensor  # float64 (C, k), orthonormal, by descending variance
    explained: Tensor  # float64 (k,): fractions of the variance

    def project(self, x: Tensor) -> Tensor:
        """Coordinates (..., k) of x (..., C)."""
        return (x.double() - self.mean) @ self.axes


def pca(x: Tensor, components: int = 2) -> PCA:
    """Principal components of the vectors x (n, C), n >= 2, all finite.

    Example:
        >>> found = pca(torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 1.0], [4.0, 0.0, 1.0]]), components=1)
        >>> found.axes.abs().flatten().tolist(), found.explained.tolist()
        ([1.0, 0.0, 0.0], [1.0])
    """
    seen = Covariance()
    seen.add(x)
    variances, axes = torch.linalg.eigh(seen.covariance)  # ascending
    explained = (variances / variances.sum()).flip(0)[:components]
    return PCA(torch.as_tensor(seen.mean), axes.flip(1)[:, :components], explained)


# ---- measures of a map -----------------------------------------------------------------------------------------------
# Each takes a map of states in which images don't see each other: its Jacobian has a block J for each image, one
# product with it serves them all, and what is returned is a number for each.


def sigma_max(function: Map, z: Tensor, iterations: int = 30, seed: int = 0) -> Tensor:
    """Largest singular value of the Jacobian J at z: max |J v| over |v| = 1, approached from below.

    Power iteration on J^T J, v <- J^T J v / |J^T J v|, by a forward and a backward product each; the error shrinks with
    (sigma_2 / sigma_1)^(4 iterations).

    Args:
        function: (B, ...) to (B, ...), image by image.
        z: The states (B, ...) to linearise at.
        iterations: Products with J^T J.
        seed: Of the first direction.

    Returns:
        float64 (B,).

    Example:
        >>> sigma_max(lambda z: z * torch.tensor([0.5, -2.0]), torch.ones(1, 2)).item()
        2.0
    """
    v = _direction(z, seed)
    with _differentiable():
        _, pull_back = torch.func.vjp(function, z)
        for _ in range(iterations):
            stretched = torch.func.jvp(function, (z,), (v,))[1]
            v = _unit(pull_back(stretched)[0])
    return norm(stretched)


def spectral_radius(function: Map, z: Tensor, iterations: int = 60, seed: int = 0) -> Tensor:
    """Largest modulus of an eigenvalue of the Jacobian J at z, as the growth rate of |J^k v| in the long run.

        rho = lim |J^k v|^(1/k),

    the geometric mean of the growth over the second half of the iterations; the first half lets other directions die
    out. A Rayleigh quotient would not do: J is not symmetric, and its largest eigenvalues may be a complex pair, under
    which the growth of an iteration swings around rho. The error falls with 1 / iterations.

    Args:
        function: (B, ...) to (B, ...), image by image.
        z: The states (B, ...) to linearise at; J stays that of z.
        iterations: Products with J.
        seed: Of the first direction.

    Returns:
        float64 (B,). Below 1, small changes die out at a fixed point z.

    Example:
        >>> quarter_turn = torch.tensor([[0.0, -3.0], [3.0, 0.0]])
        >>> round(spectral_radius(lambda z: z @ quarter_turn, torch.ones(1, 2)).item(), 4)
        3.0
    """
    v, logs = _direction(z, seed), []
    with _differentiable():
        for _ in range(iterations):
            v = torch.func.jvp(function, (z,), (v,))[1]
            logs.append(norm(v).log())
            v = _unit(v)
    return torch.stack(logs[iterations // 2 :]).mean(0).exp()


def orbit_growth(function: Map, z: Tensor, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Follow the orbit of z and a small change of its start, v_(t+1) = J(z_t) v_t, scaled to length 1 after each step.

    The mean of ln |v_(t+1)| / |v_t| over many steps is the largest Lyapunov exponent: above 0 nearby states part.
    Reference: Benettin et al., "Lyapunov Characteristic Exponents for smooth dynamical systems" (1980),
    https://doi.org/10.1007/BF02128236

    Args:
        function: The step map, (B, ...) to (B, ...), image by image.
        z: The states (B, ...) to start from.
        steps: How many to take.
        seed: Of the direction of the change.

    Returns:
        An iterator of (next state, growth |v_(t+1)| / |v_t| as float64 (B,)), one for each step.

    Example:
        >>> for z, growth in orbit_growth(lambda z: z * z, torch.full((1, 1), 1.5), steps=2):
        ...     print(z.item(), round(growth.item(), 4))  # the derivative is 2 z
        2.25 3.0
        5.0625 4.5
    """
    v = _direction(z, seed)
    for _ in range(steps):
        with _differentiable():
            z, v = torch.func.jvp(function, (z,), (v,))
        yield z, norm(v)
        v = _unit(v)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Products with Jacobians in a state alone; attention by its formula, since the fused CPU kernel has no jvp."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        warnings.filterwarnings("ignore", "`torch.jit.script` is")  # torch's own use of it, at the first jvp
        yield


def _direction(z: Tensor, seed: int) -> Tensor:
    """A random one for each image, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return _unit(torch.randn(z.shape, generator=generator).to(z))


def _unit(v: Tensor) -> Tensor:
    """v at length 1 for each image; a zero stays one."""
    length = norm(v).clamp_min(torch.finfo(v.dtype).tiny)
    return (v / length.view(-1, *[1] * (v.ndim - 1))).to(v.dtype)


# ---- a pass over images ----------------------------------------------------------------------------------------------

COLUMNS = ("norm", "relative_step", "residual", "cosine", "entropy", "correct", "finite")


class Dynamics(NamedTuple):
    """What :func:`measure` saw of n images from step 0 to H.

    The columns of `images`, NaN where a state is not finite or has no such number (no update leads to step 0):

    - norm: root mean square of the numbers in the state, |z_t| / sqrt(N C)
    - relative_step: |u_t| / |z_(t-1)|
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
        ValueError: It is no integer from 1 to 10000, or the model is none of ours.
    """
    if not isinstance(model, RecurrentVisionTransformer):
        raise ValueError(f"model must be a RecurrentVisionTransformer; got {type(model).__name__}")
    if horizon is None:
        horizon = min(4 * model.steps * model.stages, LIMITS["horizon"])
    return bounded_horizon(horizon, model.depth)


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
    parts = batches(split.to(_first_parameter(model).device), batch_size, shuffle=False)
    tokens, classes = ([Covariance() for _ in range(horizon + 1)] for _ in range(2))
    columns, kept, similarity = [], [], torch.zeros(horizon + 1, horizon + 1, dtype=torch.float64)
    with evaluation_mode(model), torch.no_grad():
        for images, labels, indices in _bar(parts, "states", batches_per_epoch(len(split), batch_size), progress):
            values, kernels, class_states = _watch(model, images, labels, horizon, tokens, classes)
            columns.append(values)
            kept.append(class_states[:, indices.cpu() < keep])
            if len(images) >= 4:
                similarity += len(images) * hsic(kernels).cpu()
    by_name = dict(zip(COLUMNS, torch.cat(columns, -1).unbind(1)))
    finite = by_name["finite"].all(1)  # what is said of all images needs all of them
    return Dynamics(
        trained_horizon=model.steps * model.stages,
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
    z = model.initial_state(images.to(_first_parameter(model).dtype))
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


def _first_parameter(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _bar(parts: Iterable[Any], what: str, total: int, shown: bool) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(parts, what, total, leave=False, disable=None if shown else True)


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
    count: int = 16,
    progress: bool = False,
) -> Jacobians:
    """Growth along the orbit at every step, sigma_max and spectral radius at some, of the first images.

    Args:
        model: A `RecurrentVisionTransformer`.
        split: Labelled images of the model's size.
        horizon: H; default four times the trained number of steps.
        steps: Where to take sigma_max and spectral radius; default 0, half, once and twice the trained number, and H.
        count: Number of images.
        progress: Show a bar on standard error, if that is a terminal.

    Raises:
        ValueError: A model or split that doesn't fit, or an argument out of range.
    """
    model, horizon = checked(model, split), resolve_horizon(model, horizon)
    at = _linearised(model.steps * model.stages, horizon) if steps is None else tuple(sorted(set(steps)))
    if not at or at[0] < 0 or at[-1] > horizon:
        raise ValueError(f"steps={at} must be from 0 to the horizon, {horizon}")
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    growth, largest, radii = [], [], []
    images = normalize(split.images[:count]).to(_first_parameter(model))
    with evaluation_mode(model):
        with torch.no_grad():
            z = model.initial_state(images)
        orbit = chain([(z, None)], orbit_growth(model.step, z, horizon))
        for t, (z, factor) in enumerate(_bar(orbit, "Jacobians", horizon + 1, progress)):
            if factor is not None:
                growth.append(factor.cpu())
            if t in at:
                largest.append(sigma_max(model.step, z).cpu())
                radii.append(spectral_radius(model.step, z).cpu())
    return Jacobians(torch.stack(growth), at, torch.stack(largest), torch.stack(radii))


def _linearised(trained: int, horizon: int) -> tuple[int, ...]:
    return tuple(sorted(t for t in {0, trained // 2, trained, 2 * trained, horizon} if t <= horizon))


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows(seen: Dynamics, found: Jacobians | None = None) -> list[Row]:
    """One row for each step, 0 to H, of numbers that JSON knows: None stands where there is none.

    - step, NFE, count, non_finite
    - top1, top1_stderr, entropy: means over the images (a prediction that isn't finite is wrong, and has no entropy)
    - norm, relative_step, residual, cosine: medians over the images that are finite
    - participation_tokens, participation_class
    - cka_previous, cka_trained, cka: with the step before, with the trained step, with each step
    - growth: of the step that leads here, geometric mean; sigma_max, spectral_radius: at this state, medians
    """
    medians = {name: _median(seen.images[name]) for name in ("norm", "relative_step", "residual", "cosine")}
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
        "top1_stderr": (p * (1 - p) / count) ** 0.5,
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
