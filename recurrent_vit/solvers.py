"""Explicit Runge-Kutta methods as Butcher tableaus, and the one function that takes a step.

A method with coefficients a (strictly lower triangular) and b advances the autonomous equation dz/dt = f(z) by

    k_i = f(z + h * sum_{j<i} a_ij k_j),        z(t + h) ~ z + h * sum_i b_i k_i.

The field of a recurrent block does not see the time, so the nodes c_i = sum_j a_ij are used only to check the
table. Names: `heun2` is what papers call Heun (explicit trapezoid), `rk4` the classical method, and `rk4_38` the 3/8
rule, which is the one that torchdiffeq runs under the name "rk4".

Reference: Hairer, Nørsett, Wanner, "Solving Ordinary Differential Equations I" (2nd ed. 1993), chapter II.1,
https://doi.org/10.1007/978-3-540-78862-1
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TABLEAUS", "Tableau", "advance", "step"]


@dataclass(frozen=True)
class Tableau:
    """The coefficients of one explicit Runge-Kutta method.

    Args:
        name: The name a user asks for.
        order: Order of consistency p, 1 to 4: the error of one step is O(h^(p+1)).
        a: Row i holds the i weights of the earlier slopes in the i-th evaluation point; the first row is empty.
        b: Weights of the slopes in the step.

    Raises:
        ValueError: The rows do not form an explicit method, or the coefficients miss a condition of the stated order.

    Example:
        >>> Tableau("midpoint", order=2, a=((), (1 / 2,)), b=(0, 1)).evaluations
        2
        >>> Tableau("wrong", order=2, a=((), (1.0,)), b=(0, 1))
        Traceback (most recent call last):
        ...
        ValueError: tableau 'wrong' is not of order 2: sum b_i c_i is 1, not 1/2
    """

    name: str
    order: int
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.b:
            raise ValueError(f"tableau {self.name!r}: b is empty")
        if [len(row) for row in self.a] != list(range(len(self.b))):
            raise ValueError(
                f"tableau {self.name!r}: row i of a must hold i weights (0, 1, ..., {len(self.b) - 1}), "
                f"got {[len(row) for row in self.a]}"
            )
        if self.order not in (1, 2, 3, 4):
            raise ValueError(f"tableau {self.name!r}: order must be 1, 2, 3 or 4, got {self.order}")
        for order, what, value, expected in self._order_conditions():
            if order <= self.order and not math.isclose(value, 1 / expected, abs_tol=1e-12):
                raise ValueError(
                    f"tableau {self.name!r} is not of order {self.order}: sum {what} is {value:g}, not 1/{expected}"
                )

    @property
    def c(self) -> tuple[float, ...]:
        """Nodes: the fraction of the step at which each evaluation stands."""
        return tuple(sum(row) for row in self.a)

    @property
    def evaluations(self) -> int:
        """Field evaluations in one step (the "stages" of the Runge-Kutta literature)."""
        return len(self.b)

    def _order_conditions(self) -> list[tuple[int, str, float, int]]:
        """(order, sum, its value, inverse of the value it must have), one for each rooted tree up to order 4."""
        b, c = self.b, self.c
        ac = [sum(w * x for w, x in zip(row, c)) for row in self.a]
        acc = [sum(w * x * x for w, x in zip(row, c)) for row in self.a]
        aac = [sum(w * x for w, x in zip(row, ac)) for row in self.a]
        return [
            (1, "b_i", sum(b), 1),
            (2, "b_i c_i", sum(w * x for w, x in zip(b, c)), 2),
            (3, "b_i c_i^2", sum(w * x * x for w, x in zip(b, c)), 3),
            (3, "b_i a_ij c_j", sum(w * x for w, x in zip(b, ac)), 6),
            (4, "b_i c_i^3", sum(w * x**3 for w, x in zip(b, c)), 4),
            (4, "b_i c_i a_ij c_j", sum(w * x * y for w, x, y in zip(b, c, ac)), 8),
            (4, "b_i a_ij c_j^2", sum(w * x for w, x in zip(b, acc)), 12),
            (4, "b_i a_ij a_jk c_k", sum(w * x for w, x in zip(b, aac)), 24),
        ]


TABLEAUS: dict[str, Tableau] = {
    tableau.name: tableau
    for tableau in (
        Tableau("euler", 1, a=((),), b=(1.0,)),
        Tableau("midpoint", 2, a=((), (1 / 2,)), b=(0.0, 1.0)),
        Tableau("heun2", 2, a=((), (1.0,)), b=(1 / 2, 1 / 2)),
        Tableau("heun3", 3, a=((), (1 / 3,), (0.0, 2 / 3)), b=(1 / 4, 0.0, 3 / 4)),
        Tableau("rk4", 4, a=((), (1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)), b=(1 / 6, 1 / 3, 1 / 3, 1 / 6)),
        Tableau("rk4_38", 4, a=((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), b=(1 / 8, 3 / 8, 3 / 8, 1 / 8)),
    )
}


def advance(z: Tensor, slopes: list[Tensor], weights: list[float], h: float) -> Tensor:
    """z + h * sum_i w_i k_i, one scaled addition per non-zero weight; z itself when there is none."""
    for weight, slope in zip(weights, slopes):
        if weight != 0.0:
            z = torch.add(z, slope, alpha=h * weight)
    return z


def step(f: Callable[[Tensor], Tensor], z: Tensor, h: float, tableau: Tableau) -> Tensor:
    """Advance z by one step of size h along the field f.

    Args:
        f: Autonomous field; takes and returns a tensor shaped like z. Called `tableau.evaluations` times.
        z: State, any shape, floating or complex dtype.
        h: Step size, in units of time; negative integrates backwards.
        tableau: The method.

    Returns:
        The next state, shape and dtype of z.

    Example:
        One step of the classical method on dz/dt = -z is the Taylor polynomial of exp(-h) up to h^4:

        >>> z = step(lambda z: -z, torch.ones(1, dtype=torch.float64), 0.5, TABLEAUS["rk4"])
        >>> round(z.item(), 6)
        0.606771
    """
    slopes: list[Tensor] = []
    for row in tableau.a:
        slopes.append(f(advance(z, slopes, list(row), h)))
    return advance(z, slopes, list(tableau.b), h)
