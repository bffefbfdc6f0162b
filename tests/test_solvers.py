"""Laws of the Runge-Kutta methods: measured order, exactness, agreement with torchdiffeq, evaluations."""

import math
import re

import pytest
import torch

from recurrent_vit.solvers import TABLEAUS, Tableau, advance, step

METHODS = pytest.mark.parametrize("tableau", TABLEAUS.values(), ids=TABLEAUS.keys())


def integrate(f, z, time, steps, tableau):
    for _ in range(steps):
        z = step(f, z, time / steps, tableau)
    return z


def rotation(z):  # dz/dt = (-z1, z0): a linear system with solution on the unit circle
    return torch.stack([-z[1], z[0]])


def logistic(z):  # dz/dt = z (1 - z), z(0) = 1/4: nonlinear, z(t) = 1 / (1 + 3 exp(-t))
    return z * (1 - z)


def hopf(z):  # r' = r (1 - r^2), phi' = 1 in polar coordinates: nonlinear, two coupled components
    return rotation(z) + z * (1 - z.square().sum())


def hopf_at_one(r0=0.5):
    r = 1 / math.sqrt(1 + (1 / r0**2 - 1) * math.exp(-2))
    return torch.tensor([r * math.cos(1), r * math.sin(1)], dtype=torch.float64)


PROBLEMS = {
    "rotation": (rotation, [1.0, 0.0], torch.tensor([math.cos(1), math.sin(1)], dtype=torch.float64)),
    "logistic": (logistic, [0.25], torch.tensor([1 / (1 + 3 * math.exp(-1))], dtype=torch.float64)),
    "hopf": (hopf, [0.5, 0.0], hopf_at_one()),
}


@METHODS
@pytest.mark.parametrize("problem", PROBLEMS)
def test_measured_order_is_the_stated_order(tableau, problem):
    f, start, exact = PROBLEMS[problem]
    start = torch.tensor(start, dtype=torch.float64)
    coarse, fine = ((integrate(f, start, time=1.0, steps=n, tableau=tableau) - exact).norm().item() for n in (64, 128))
    order = math.log2(coarse / fine)
    assert order == pytest.approx(tableau.order, abs=0.1), f"{tableau.name} on {problem}: order {order:.3f}"


@METHODS
def test_linear_step_is_the_taylor_polynomial(tableau):
    # with as many evaluations as its order, a method has no freedom left on dz/dt = lambda z
    if tableau.evaluations != tableau.order:
        pytest.fail(f"{tableau.name}: choose another law for a method with spare evaluations")
    h, rate = 0.7, -1.3
    one = torch.ones((), dtype=torch.float64)
    expected = sum((h * rate) ** k / math.factorial(k) for k in range(tableau.order + 1))
    assert step(lambda z: rate * z, one, h, tableau).item() == pytest.approx(expected, abs=1e-14)


@METHODS
def test_field_is_evaluated_at_the_points_of_the_tableau(tableau):
    points = []

    def f(z):  # slope 1, so that the point of evaluation i is z + h c_i
        points.append(z.item())
        return torch.ones_like(z)

    end = step(f, torch.tensor(2.0, dtype=torch.float64), 0.5, tableau).item()
    assert points == pytest.approx([2.0 + 0.5 * c for c in tableau.c])
    assert len(points) == tableau.evaluations
    assert end == pytest.approx(2.5)


@METHODS
def test_a_step_back_undoes_a_small_step(tableau):
    start = torch.tensor([1.0, 0.5], dtype=torch.float64)

    def error(h):
        there = step(hopf, start, h, tableau)
        assert (there - start).norm() > h / 2
        return (step(hopf, there, -h, tableau) - start).norm().item()

    assert error(0.02) / error(0.01) > 0.8 * 2 ** (tableau.order + 1)  # the local error is of order p + 1


@pytest.mark.parametrize(("ours", "theirs"), [("euler", "euler"), ("midpoint", "midpoint"), ("heun2", "heun2"),
                                              ("heun3", "heun3"), ("rk4_38", "rk4")])  # fmt: skip
def test_a_step_equals_torchdiffeq(ours, theirs):
    from torchdiffeq import odeint

    start = torch.tensor([1.0, 0.5], dtype=torch.float64)
    time = torch.tensor([0.0, 0.5], dtype=torch.float64)
    expected = odeint(lambda t, z: hopf(z), start, time, method=theirs, options={"step_size": 0.5})[-1]
    torch.testing.assert_close(step(hopf, start, 0.5, TABLEAUS[ours]), expected, rtol=0, atol=1e-15)


def test_the_two_fourth_order_methods_are_different():
    start = torch.tensor([1.0, 0.5], dtype=torch.float64)
    classical, three_eighths = (step(hopf, start, 0.5, TABLEAUS[name]) for name in ("rk4", "rk4_38"))
    assert 1e-7 < (classical - three_eighths).abs().max() < 1e-4


@METHODS
def test_a_step_keeps_dtype_and_lets_the_gradient_through(tableau):
    z = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
    end = step(torch.tanh, z, 0.5, tableau)
    end.sum().backward()
    assert end.dtype == z.dtype
    assert z.grad is not None
    assert z.grad.isfinite().all()


@pytest.mark.parametrize(
    ("order", "a", "b", "message"),
    [
        (4, ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 4, 1 / 4, 1 / 4, 1 / 4), "b_i c_i"),
        (4, ((), (0.5,), (0.5, 0.0), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6), "a_ij c_j"),  # only trees show it
        (1, ((),), (0.9,), "sum b_i is 0.9"),
        (1, ((0.0,),), (1.0,), "row i of a"),
        (2, ((), (0.5,)), (1.0,), "row i of a"),
        (1, (), (), "b is empty"),
        (5, ((),), (1.0,), "order must be"),
        (1, ((),), (math.nan,), "sum b_i is nan"),
    ],
)
def test_a_wrong_tableau_is_refused(order, a, b, message):
    with pytest.raises(ValueError, match=message):
        Tableau("wrong", order, a, b)


@pytest.mark.parametrize("missed", range(8))
def test_every_order_condition_is_checked_and_to_the_last_digits(missed):
    import numpy as np

    rows, columns = np.tril_indices(4, -1)

    def tableau(x):
        a = np.zeros((4, 4))
        a[rows, columns] = x[:6]
        return a, x[6:]

    def sums(x):  # the eight rooted trees, in the order of the Tableau's own table
        a, b = tableau(x)
        c = a.sum(1)
        trees = [np.ones(4), c, c**2, a @ c, c**3, c * (a @ c), a @ c**2, a @ a @ c]
        return np.array([b @ tree for tree in trees])

    target = 1 / np.array([1, 2, 3, 6, 4, 8, 12, 24])
    target[missed] *= 1 + 1e-6
    x = np.array([0.5, 0, 0.5, 0, 0, 1, 1 / 6, 1 / 3, 1 / 3, 1 / 6])  # rk4, but for one condition: Gauss-Newton
    x = x + 0.01 * np.cos(np.arange(10))  # where its Jacobian has full rank
    for _ in range(60):
        jacobian = np.array([(sums(x + 1e-6 * e) - sums(x - 1e-6 * e)) / 2e-6 for e in np.eye(10)]).T
        x = x + np.linalg.lstsq(jacobian, target - sums(x), rcond=None)[0]
    assert np.abs(sums(x) - target).max() < 1e-13
    a, b = tableau(x)
    rows_of_a = tuple(tuple(a[i, :i].tolist()) for i in range(4))
    what = ["b_i", "b_i c_i", "b_i c_i^2", "b_i a_ij c_j", "b_i c_i^3", "b_i c_i a_ij c_j", "b_i a_ij c_j^2",
            "b_i a_ij a_jk c_k"][missed]  # fmt: skip
    with pytest.raises(ValueError, match=rf"sum {re.escape(what)} is"):
        Tableau("wrong", 4, rows_of_a, tuple(b.tolist()))


def test_a_slope_without_weight_is_not_looked_at():
    z = torch.zeros(1)
    assert advance(z, [torch.tensor([math.inf]), torch.ones(1)], [0.0, 1.0], 0.5).item() == 0.5
