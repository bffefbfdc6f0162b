"""Solvers on problems with known answers: contractions, expansions, closed forms; divergence is reported."""

import json
import math
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from recurrent_vit import equilibrium
from recurrent_vit.augment import normalize
from recurrent_vit.cifar import Split
from recurrent_vit.equilibrium import METHODS, adaptive, anderson, controls, fixed_point

SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10}


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Linear:
    """f(z) = A z + b - z for three images, A with the given eigenvalues: F(z) = A z + b. Counts its evaluations."""

    def __init__(self, *eigenvalues):
        basis = double(3, len(eigenvalues), len(eigenvalues)) + 3 * torch.eye(len(eigenvalues))
        self.a = basis @ torch.tensor(eigenvalues, dtype=torch.float64).diag() @ torch.linalg.inv(basis)
        self.b = double(3, len(eigenvalues))
        self.solution = torch.linalg.solve(torch.eye(len(eigenvalues)) - self.a, self.b)
        self.evaluations = 0

    def __call__(self, z):
        self.evaluations += 1
        return torch.einsum("bij,bj->bi", self.a, z) + self.b - z


def residual_of(field, z, start):
    return field(z).norm(dim=1) / field(start).norm(dim=1)


# ---- iterations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [fixed_point, anderson])
def test_a_contraction_is_solved(solver):
    field, start = Linear(0.6, -0.5, 0.3, 0.1), double(3, 4)
    found = solver(field, start, tolerance=1e-10)
    torch.testing.assert_close(found.state, field.solution, rtol=0, atol=1e-7)
    assert found.converged.tolist() == [True] * 3
    assert found.nfe == field.evaluations == len(found.residuals) == len(found.evaluations)
    assert found.evaluations == tuple(range(1, found.nfe + 1))
    torch.testing.assert_close(found.residuals[-1], residual_of(field, found.state, start))
    torch.testing.assert_close(found.residuals[0], torch.ones(3, dtype=torch.float64))
    assert (found.residuals[-1] <= 1e-10).all()
    assert (found.residuals[-2] > 1e-10).any(), "it stops as soon as it may"


def test_plain_iteration_converges_at_the_rate_of_the_spectral_radius():
    found = fixed_point(Linear(0.8, 0.2, -0.1), double(3, 3), tolerance=1e-12, max_evaluations=200)
    rate = (found.residuals[60] / found.residuals[40]) ** (1 / 20)
    assert rate.tolist() == pytest.approx([0.8] * 3, rel=1e-3)


def test_plain_iteration_is_the_recurrence(small, images):
    model = small("bvit", **SMALL)
    with torch.no_grad():
        z = start = model.initial_state(images)
        found = fixed_point(model.vector_field, start, max_evaluations=4, tolerance=1e-9)
        for _ in range(3):
            z = model.step(z)
    torch.testing.assert_close(found.state, z, rtol=1e-4, atol=1e-4)
    assert found.nfe == 4


@pytest.mark.parametrize("eigenvalues", [(0.95, -0.9, 0.5, 0.2), (1.5, -3.0, 0.5, 0.2)], ids=["slow", "expanding"])
def test_anderson_solves_a_linear_problem_in_as_many_steps_as_it_has_dimensions(eigenvalues):
    field, start = Linear(*eigenvalues), double(3, 4)
    found = anderson(field, start, memory=4, tolerance=1e-6)
    assert found.converged.all()
    assert found.nfe <= 4 + 2
    torch.testing.assert_close(found.state, field.solution, rtol=1e-2, atol=1e-2)
    plain = fixed_point(field, start, tolerance=1e-6, max_evaluations=100)
    assert not plain.converged.any()
    grows = max(map(abs, eigenvalues)) > 1
    assert (plain.residuals[-1] > 1).tolist() == [grows] * 3


def test_anderson_agrees_with_a_loop_over_pictures_and_lstsq():
    field, start, memory, damping = Linear(0.9, 1.2, -0.7, 0.3, 0.2, -1.1), double(3, 6), 2, 0.7
    found = anderson(
        lambda z: torch.tanh(field(z)), start, memory=memory, damping=damping, tolerance=1e-12, max_evaluations=6
    )
    for i in range(3):
        a, b = field.a[i], field.b[i]
        z, states, slopes = start[i], [], []
        for _ in range(5):
            states, slopes = [*states, z], [*slopes, torch.tanh(a @ z + b - z)]
            states, slopes = states[-memory - 1 :], slopes[-memory - 1 :]
            z = z + damping * slopes[-1]
            if len(states) > 1:
                dz = torch.stack([y - x for x, y in pairwise(states)], 1)
                ds = torch.stack([y - x for x, y in pairwise(slopes)], 1)
                z = z - (dz + damping * ds) @ torch.linalg.lstsq(ds, slopes[-1][:, None]).solution[:, 0]
        torch.testing.assert_close(found.state[i], z, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", [fixed_point, anderson])
def test_the_images_do_not_see_each_other(solver):
    field, start = Linear(0.9, 0.5, -0.4), double(3, 3)
    together = solver(field, start, max_evaluations=4, tolerance=1e-14)
    start[1] = math.inf
    beside = solver(field, start, max_evaluations=4, tolerance=1e-14)
    for i in (0, 2):
        torch.testing.assert_close(beside.state[i], together.state[i])
        torch.testing.assert_close(beside.residuals[:, i], together.residuals[:, i])
    assert beside.residuals[:, 1].isnan().all()


@pytest.mark.parametrize("solver", [fixed_point, anderson])
def test_what_has_settled_waits_for_the_others(solver):
    rates = double(3, 4).abs().clamp(0.1, 0.9)  # of 4 numbers each, since Anderson acceleration solves one at once
    start = double(3, 4)
    for i, speed in enumerate((1.0, 0.1, 0.01)):
        rates[i] *= speed
    together = solver(lambda z: -rates * z, start, tolerance=1e-3, max_evaluations=3000)
    assert together.converged.all()
    ends = []
    for i in range(3):
        alone = solver(lambda z, i=i: -rates[i : i + 1] * z, start[i : i + 1], tolerance=1e-3, max_evaluations=3000)
        torch.testing.assert_close(together.state[i], alone.state[0])
        torch.testing.assert_close(together.residuals[-1, i], alone.residuals[-1, 0])
        ends.append(alone.nfe)
    if solver is fixed_point:
        assert len(set(ends)) == 3, "they settle at different times, or the test sees nothing"


@pytest.mark.parametrize("solver", [fixed_point, anderson])
def test_divergence_is_reported_image_by_image(solver):
    rates = torch.tensor([[0.5], [1.0], [1e20]])

    def noisy(z):  # never small, whatever is combined
        return (rates - 1) * z + torch.randn_like(z)

    found = solver(noisy, torch.ones(3, 4), tolerance=1e-6, max_evaluations=40)
    assert not found.converged.any()
    assert found.nfe == 40
    found = fixed_point(lambda z: (rates[[0, 2]] - 1) * z, torch.ones(2, 4), tolerance=1e-6, max_evaluations=40)
    assert found.converged.tolist() == [True, False]
    assert found.residuals[-1, 1].isnan(), "it has overflowed"


@pytest.mark.parametrize("solver", [fixed_point, anderson])
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_field_that_is_not_finite_ends_at_once_and_raises_nothing(solver, value):
    found = solver(lambda z: z * 0 + value, torch.ones(2, 3))
    assert not found.converged.any()
    assert found.nfe <= 3


def test_what_merely_grows_has_not_converged():
    # |f| / |z| falls like 1 / t, below any tolerance; the field itself does not fall
    found = fixed_point(torch.ones_like, torch.ones(1, 3), tolerance=1e-2, max_evaluations=300)
    assert math.sqrt(3) / found.state.norm() < 1e-2
    assert not found.converged.any()
    assert found.residuals.unique().tolist() == [1]


def test_a_start_at_the_fixed_point_has_converged():
    for solver in (fixed_point, anderson):
        found = solver(torch.zeros_like, torch.ones(2, 3))
        assert (found.nfe, found.converged.tolist()) == (1, [True, True])


def test_anderson_survives_a_field_that_never_changes():
    found = anderson(torch.ones_like, torch.zeros(2, 3), max_evaluations=10)
    assert not found.converged.any()
    torch.testing.assert_close(found.state, torch.full((2, 3), 9.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_states_keep_their_shape_and_dtype(dtype):
    start = torch.ones(2, 3, 4, dtype=dtype)
    for solver in (fixed_point, anderson):
        found = solver(lambda z: 1 - z / 2, start, max_evaluations=4, tolerance=1e-9)
        assert (found.state.shape, found.state.dtype) == (start.shape, dtype)
        assert not found.state.requires_grad


@pytest.mark.parametrize(
    ("solver", "kwargs", "message"),
    [
        (fixed_point, {"tolerance": 0}, "tolerance=0 must be a number above 0"),
        (fixed_point, {"max_evaluations": 0}, "max_evaluations=0 must be a whole number from 1"),
        (anderson, {"memory": 0}, "memory=0 must be a whole number from 1"),
        (adaptive, {"time": -1.0}, r"time=-1\.0 must be a number above 0"),
        (adaptive, {"tolerance": math.nan}, "tolerance=nan must be a number above 0"),
    ],
)
def test_arguments_out_of_range_are_named(solver, kwargs, message):
    with pytest.raises(ValueError, match=message):
        solver(torch.zeros_like, torch.ones(1, 1), **kwargs)


# ---- adaptive integration --------------------------------------------------------------------------------------------


@pytest.fixture
def _torchdiffeq():
    pytest.importorskip("torchdiffeq")


def rotation(z):
    return torch.stack([-z[:, 1], z[:, 0]], 1)


@pytest.mark.usefixtures("_torchdiffeq")
@pytest.mark.parametrize("time", [0.3, 1.0, 12.0])
def test_dopri5_against_closed_forms(time):
    z = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    found = adaptive(lambda z: -z, z, time=time, tolerance=1e-8, max_evaluations=5000)
    torch.testing.assert_close(found.state, z * math.exp(-time), rtol=0, atol=1e-6)
    found = adaptive(rotation, z, time=time, tolerance=1e-8, max_evaluations=5000)
    c, s = math.cos(time), math.sin(time)
    turned = torch.tensor([[c, s], [-2 * s, 2 * c]], dtype=torch.float64)
    torch.testing.assert_close(found.state, turned, rtol=0, atol=1e-5)
    assert found.converged.tolist() == [True, True]
    torch.testing.assert_close(found.residuals, torch.ones_like(found.residuals), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("_torchdiffeq")
def test_dopri5_counts_its_evaluations_and_spends_more_for_a_smaller_error():
    counts = []

    def field(z):
        counts.append(1)
        return rotation(z)

    z, spent = double(3, 2), []
    for tolerance in (1e-3, 1e-6):
        counts.clear()
        found = adaptive(field, z, time=5.0, tolerance=tolerance)
        assert found.nfe == len(counts) == found.evaluations[-1]
        assert found.evaluations[0] == 1
        assert (found.nfe - 2) % 6 == 0, "two for the first step size, six a step"
        spent.append(found.nfe)
    assert spent[0] < spent[1]


@pytest.mark.usefixtures("_torchdiffeq")
def test_the_residuals_are_those_of_the_states_that_were_reached():
    z = double(2, 3)
    found = adaptive(lambda z: -z, z, time=3.0)
    torch.testing.assert_close(found.residuals[-1], found.state.norm(dim=1) / z.norm(dim=1))
    assert (found.residuals[1:] < found.residuals[:-1]).all()


@pytest.mark.usefixtures("_torchdiffeq")
@pytest.mark.parametrize("max_evaluations", [20, 5000])
def test_a_solution_that_blows_up_is_reported(max_evaluations):
    # dz/dt = z^2 from 1 is 1 / (1 - t)
    found = adaptive(torch.square, torch.ones(2, 1, dtype=torch.float64), time=2.0, max_evaluations=max_evaluations)
    assert found.converged.tolist() == [False, False]
    assert found.state.isfinite().all()
    assert (found.state > 1).all()
    assert found.nfe <= max_evaluations
    assert len(found.residuals) == len(found.evaluations)


@pytest.mark.usefixtures("_torchdiffeq")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_dopri5_on_a_field_that_is_not_finite_raises_nothing(value):
    found = adaptive(lambda z: z * 0 + value, torch.ones(2, 3), time=1.0)
    assert not found.converged.any()
    assert torch.equal(found.state, torch.ones(2, 3))


@pytest.mark.usefixtures("_torchdiffeq")
def test_dopri5_along_the_field_of_a_model_is_the_limit_of_small_steps(small, images):
    fine = small("bvit_ode_rk4", **SMALL, step_size=0.02)
    with torch.no_grad():
        start = z = fine.initial_state(images)
        for _ in range(100):
            z = fine.step(z)
    found = adaptive(fine.vector_field, start, time=2.0, tolerance=1e-5, max_evaluations=3000)
    assert found.converged.all()
    torch.testing.assert_close(found.state, z, rtol=1e-2, atol=1e-2)


def test_without_torchdiffeq_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r'pip install "recurrent-vit\[ode\]"'):
        adaptive(torch.zeros_like, torch.ones(1, 1))


# ---- on a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def split():
    return Split(torch.randint(256, (9, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (9,)))


@pytest.mark.usefixtures("_torchdiffeq")
def test_controls_give_a_row_for_each_method(small, split):
    model = small("bvit", **SMALL, steps=3).train()
    few = 14  # Anderson acceleration may run away from a field that has no zero, and overflow
    found = list(controls(model, split, count=7, max_evaluations=few, tolerance=1e-2, progress=True))
    assert [row["method"] for row, _ in found] == list(METHODS)
    for row, solution in found:
        logits = model.eval().forward_head(model.norm(solution.state))
        assert row["top1"] == pytest.approx((logits.argmax(1) == split.labels[:7]).double().mean().item())
        assert row["converged"] == pytest.approx(solution.converged.double().mean().item())
        assert (row["NFE"], row["count"], row["non_finite"]) == (solution.nfe, 7, 0)
        assert row["field_left"] == pytest.approx(solution.residuals[-1].median().item())
        assert row["NFE"] <= few
    assert json.loads(json.dumps([row for row, _ in found], allow_nan=False)) == [row for row, _ in found]


@pytest.mark.usefixtures("_torchdiffeq")
def test_dopri5_runs_to_the_trained_time(small, split):
    model = small("bvit_ode_rk4", **SMALL, steps=40, step_size=0.05)
    ((_, solution),) = controls(model, split, methods=["dopri5"], tolerance=1e-4, max_evaluations=3000)
    images = normalize(split.images)
    expected = model.forward_intermediates(images, indices=1, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(solution.state, expected[0].detach(), rtol=2e-2, atol=2e-2)


def test_controls_that_overflow_are_counted(small, split):
    model = small("bvit_ode_euler", **SMALL, field="black_box")
    ((row, solution),) = controls(model, split, methods=["fixed_point"], max_evaluations=200)
    assert (row["converged"], row["non_finite"], row["top1"], row["field_left"]) == (0, 9, 0, None)
    assert not solution.converged.any()


def test_the_mode_of_the_model_is_put_back(small, split):
    model = small("bvit", **SMALL, proj_drop_rate=0.5).train()
    model.patch_embed.eval()
    first, again = (next(controls(model, split, methods=["anderson"], max_evaluations=8))[1] for _ in range(2))
    assert first.state.isfinite().all()
    assert torch.equal(first.state, again.state), "dropout was on"
    assert model.training
    assert not model.patch_embed.training
    assert torch.is_grad_enabled()


def test_controls_name_what_is_wrong_at_the_call(small, split, monkeypatch):
    model = small("bvit", **SMALL)
    with pytest.raises(ValueError, match="method 'broyden' is unknown; known methods: fixed_point, anderson, dopri5"):
        controls(model, split, methods=["broyden"])
    with pytest.raises(ValueError, match="count=0 must be a whole number from 1"):
        controls(model, split, count=0)
    with pytest.raises(ValueError, match="max_evaluations=0 must be a whole number from 1"):
        controls(model, split, max_evaluations=0)
    with pytest.raises(ValueError, match="got Linear"):
        controls(nn.Linear(1, 1), split)

    def missing():
        raise ImportError("this needs torchdiffeq")

    monkeypatch.setattr(equilibrium, "import_odeint", missing)
    with pytest.raises(ImportError, match="torchdiffeq"):
        controls(model, split)
    assert next(controls(model, split, methods=["fixed_point"]))[0]["method"] == "fixed_point"


def test_a_set_of_several_blocks_gets_fewer_evaluations(small, split):
    for depth, most in ((1, 200), (4, 50)):
        model = small("bvit", **SMALL, depth=depth)
        ((row, _),) = controls(model, split, methods=["fixed_point"], tolerance=1e-12)
        assert row["NFE"] == most


@pytest.mark.parametrize("amount", [0, 2.5, 200 / 3, True, "5", float("nan"), 10**9])
def test_evaluations_are_a_whole_number(amount, small, split):
    start = torch.ones(2, 3)
    for use in (
        lambda: fixed_point(torch.randn_like, start, max_evaluations=amount),
        lambda: anderson(torch.randn_like, start, max_evaluations=amount),
        lambda: adaptive(torch.square, start, max_evaluations=amount),
        lambda: controls(small("bvit", **SMALL), split, methods=["fixed_point"], max_evaluations=amount),
    ):
        with pytest.raises(ValueError, match=r"max_evaluations=.* must be a whole number from 1 to 100000"):
            use()
