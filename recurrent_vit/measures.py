"""Measures of states and of maps of states: pure functions of tensors whose first dimension counts images.

    >>> states = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    >>> norm(states).tolist(), round(sigma_max(lambda z: 2 * z, states).item(), 4)
    ([5.0], 2.0)

Notation: z is a state, u and v are changes of one, J is the Jacobian of a map of states; B counts images, C is the
width of a vector. Norms and their products are taken in float64. `recurrent_vit.dynamics` applies them to a model.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = [
    "PCA", "Covariance", "cka", "cosine", "entropy", "hsic", "norm", "orbit_growth", "participation_ratio", "pca",
    "relative_norm", "sigma_max", "spectral_radius",
]  # fmt: skip

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

    By bidiagonalisation: from a random unit vector v_1, with u_0 = 0,

        alpha_k u_k = J v_k - beta_(k-1) u_(k-1),    beta_k v_(k+1) = J^T u_k - alpha_k v_k,

    a forward and a backward product each. The largest singular value of the matrix with alpha on its diagonal and beta
    above converges to that of J, much sooner than the power iteration on J^T J does from the same products.

    Reference: Golub, Kahan, "Calculating the Singular Values and Pseudo-Inverse of a Matrix" (1965),
    https://doi.org/10.1137/0702016

    Args:
        function: (B, ...) to (B, ...), image by image.
        z: The states (B, ...) to linearise at.
        iterations: Pairs of products.
        seed: Of the first direction.

    Returns:
        float64 (B,); NaN where a product is not finite.

    Raises:
        ValueError: There are no iterations.

    Example:
        >>> round(sigma_max(lambda z: z * torch.tensor([0.5, -2.0]), torch.ones(1, 2)).item(), 4)
        2.0
    """
    _check_iterations(iterations)
    v, u, beta = _direction(z, seed), torch.zeros_like(z), torch.zeros(len(z), dtype=z.dtype, device=z.device)
    alphas, betas = [], []
    with _differentiable():
        pull_back = torch.func.vjp(function, z)[1]
        for _ in range(iterations):
            stretched = torch.func.jvp(function, (z,), (v,))[1] - _per_image(beta, u)
            alpha, u = norm(stretched), _unit(stretched)
            stretched = pull_back(u)[0] - _per_image(alpha, v)
            beta, v = norm(stretched), _unit(stretched)
            alphas.append(alpha)
            betas.append(beta)
    square = torch.diag_embed(torch.stack(alphas, -1))
    bidiagonal = F.pad(square, (0, 1)) + torch.diag_embed(torch.stack(betas, -1), 1)[:, :-1]
    finite = bidiagonal.isfinite().all((-2, -1))  # of what is not, LAPACK makes an error
    return torch.linalg.matrix_norm(bidiagonal.nan_to_num(0, 0, 0), 2).where(finite, math.nan)


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
    _check_iterations(iterations)
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
            z, v = torch.func.jvp(function, (z,), (v,))[:2]
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


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"iterations={iterations} must be at least 1")


def _per_image(factor: Tensor, v: Tensor) -> Tensor:
    """factor (B,) times v (B, ...), in the dtype of v."""
    return factor.to(v.dtype).view(-1, *[1] * (v.ndim - 1)) * v


def _unit(v: Tensor) -> Tensor:
    """v at length 1 for each image; a zero stays one."""
    length = norm(v).clamp_min(torch.finfo(v.dtype).tiny)
    return (v / length.view(-1, *[1] * (v.ndim - 1))).to(v.dtype)
