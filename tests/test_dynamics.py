"""Measures against closed forms and dense Jacobians, the pass against a loop over single images, the command's page."""

import json
import math
import re
from datetime import date
from itertools import pairwise

import pytest
import torch
from timm.models import save_for_hf
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurrent_vit import cifar, commands, dynamics, figures, files, measures, printing
from recurrent_vit.__main__ import main
from recurrent_vit.augment import normalize
from recurrent_vit.cifar import Split
from recurrent_vit.dynamics import jacobians, measure, resolve_horizon, rows
from recurrent_vit.equilibrium import controls
from recurrent_vit.measures import (
    Covariance,
    cka,
    cosine,
    entropy,
    hsic,
    orbit_growth,
    participation_ratio,
    pca,
    relative_norm,
    sigma_max,
    spectral_radius,
)

SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10}
TINY = {"embed_dim": 8, "num_heads": 2, "num_classes": 5, "patch_size": 16}  # a state of 4 x 8 numbers


@pytest.fixture
def split():
    return Split(torch.randint(256, (13, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (13,)))


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---- measures of states ----------------------------------------------------------------------------------------------


def test_norms_and_cosines_of_known_vectors():
    u = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]])
    v = torch.tensor([[[0.0, 5.0], [0.0, 0.0]], [[-2.0, -2.0], [-2.0, -2.0]]])
    assert relative_norm(u, v).tolist() == [1.0, 0.5]
    assert cosine(u, v).tolist() == pytest.approx([0.0, -1.0])
    assert cosine(u, 0 * v).isnan().all()


def test_a_norm_beyond_the_range_of_the_dtype_is_finite():
    z = torch.full((1, 4), 1e30)
    assert z.square().sum().isinf()
    assert measures.norm(z).item() == pytest.approx(2e30)


def test_entropy_of_certain_uniform_and_two_sided_predictions():
    logits = torch.tensor([[1e4, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0], [math.log(3), 0.0, -1e4, -1e4]])
    two_sided = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropy(logits).tolist() == pytest.approx([0.0, math.log(4), two_sided], abs=1e-6)


def test_participation_ratio_of_isotropic_data_is_its_dimension():
    basis = torch.linalg.qr(double(7, 7)).Q[:, :3]  # a tilted flat of three dimensions
    seen = Covariance()
    seen.add(double(20_000, 3) @ basis.T + 5)
    assert participation_ratio(seen.covariance).item() == pytest.approx(3, rel=0.01)
    assert participation_ratio(basis @ basis.T).item() == pytest.approx(3)


def test_participation_ratio_by_eigenvalues():
    x = double(50, 6)
    covariance = x.T @ x
    values = torch.linalg.eigvalsh(covariance)
    found = participation_ratio(covariance).item()
    assert found == pytest.approx((values.sum() ** 2 / values.square().sum()).item())
    assert participation_ratio(torch.outer(x[0], x[0])).item() == pytest.approx(1)
    assert participation_ratio(1e-9 * covariance).item() == pytest.approx(found)


@pytest.mark.parametrize("parts", [[40], [1, 39], [13, 13, 14], [1] * 40])
def test_covariance_in_parts_is_that_of_the_whole(parts):
    x = double(40, 5) @ double(5, 5) + 1e6  # a mean far from zero
    seen = Covariance()
    for part in x.split(parts):
        seen.add(part)
    torch.testing.assert_close(seen.mean, x.mean(0))
    torch.testing.assert_close(seen.covariance, torch.cov(x.T), rtol=1e-6, atol=1e-9)
    assert seen.count == 40


def naive_hsic(k, m):
    """The estimator as Song et al. write it, with matrices."""
    n = len(k)
    k, m, one = k - k.diag().diag(), m - m.diag().diag(), torch.ones(n, dtype=k.dtype)
    product = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return ((k @ m).trace() + product - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


def test_hsic_is_the_estimator_of_song_et_al():
    grams = torch.stack([x @ x.T for x in (double(9, 3) + 2, double(9, 4), double(9, 20))])
    expected = torch.stack([torch.stack([naive_hsic(k, m) for m in grams]) for k in grams])
    torch.testing.assert_close(hsic(grams), expected)
    with pytest.raises(ValueError, match="kernels of 3 images: an unbiased HSIC needs at least 4"):
        hsic(grams[:, :3, :3])


def similarity(x, y):
    return cka(hsic(torch.stack([x @ x.T, y @ y.T])))[0, 1].item()


def test_cka_is_one_under_rotation_scale_and_shift_and_small_for_noise():
    x = double(100, 30)
    rotation = torch.linalg.qr(double(30, 30)).Q
    assert similarity(x, 3 * x @ rotation + 7) == pytest.approx(1)
    assert abs(similarity(x, double(100, 30))) < 0.1
    assert 0.3 < similarity(x, x + double(100, 30)) < 0.9
    stretched = x * torch.logspace(0, 3, 30, dtype=torch.float64)
    assert similarity(x, stretched) < 0.9, "alike only up to rotation and scale"


def test_minibatches_estimate_the_cka_of_all():
    x = double(2000, 5) @ double(5, 40)
    y = x + 2 * double(2000, 40)
    grams = (torch.stack([a @ a.T, b @ b.T]) for a, b in zip(x.split(20), y.split(20)))
    mean = sum(hsic(gram) for gram in grams)
    assert cka(mean)[0, 1].item() == pytest.approx(similarity(x, y), abs=0.1)


def test_pca_finds_the_plane_and_its_shares():
    axes = torch.linalg.qr(double(6, 6)).Q[:, :2]
    x = (double(500, 2) * torch.tensor([3.0, 1.0])) @ axes.T + 4
    found = pca(x)
    u, s, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    torch.testing.assert_close(found.explained, (s.square() / s.square().sum())[:2])
    assert (found.axes * v[:2].T).sum(0).abs().tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(found.project(x).abs(), (u * s)[:, :2].abs())
    torch.testing.assert_close(found.project(x) @ found.axes.T + found.mean, x)


# ---- measures of a map: closed forms ---------------------------------------------------------------------------------

SHEAR = torch.tensor([[0.9, 5.0], [0.0, 0.5]], dtype=torch.float64)  # not normal: eigenvalues 0.9, 0.5
SPIRAL = 1.1 * torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)  # a complex pair of modulus 1.1
SKEWED = torch.tensor([[1.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
TWISTED = SKEWED @ SPIRAL @ torch.linalg.inv(SKEWED)  # the same pair, and not normal
MATRICES = torch.stack([SHEAR, SPIRAL, TWISTED])


def affine(z):
    """A map with another matrix for each of three images: z <- A z + 1."""
    return torch.einsum("bij,bj->bi", MATRICES, z) + 1


def closed_sigma(a):
    square, determinant = a.square().sum(), torch.det(a)
    return ((square + (square.square() - 4 * determinant.square()).clamp_min(0).sqrt()) / 2).sqrt().item()


def test_sigma_max_of_known_matrices():
    found = sigma_max(affine, double(3, 2)).tolist()
    assert found == pytest.approx([closed_sigma(a) for a in MATRICES], rel=1e-6)
    assert found[0] > 5


def test_a_single_iteration_is_a_bound_from_below():
    for iterations in (1, 2):
        found = sigma_max(affine, double(3, 2), iterations=iterations).tolist()
        assert all(0 < value <= closed_sigma(a) + 1e-9 for value, a in zip(found, MATRICES))
    for estimate in (sigma_max, spectral_radius):
        with pytest.raises(ValueError, match="iterations=0 must be at least 1"):
            estimate(affine, double(3, 2), iterations=0)


def test_sigma_max_in_single_precision():
    matrices = MATRICES.float()
    found = sigma_max(lambda z: torch.einsum("bij,bj->bi", matrices, z), double(3, 2).float())
    assert found.tolist() == pytest.approx([closed_sigma(a) for a in MATRICES], rel=1e-5)


def test_spectral_radius_of_known_matrices():
    found = spectral_radius(affine, double(3, 2), iterations=1000)
    assert found.tolist() == pytest.approx([0.9, 1.1, 1.1], rel=0.02)


def test_a_rayleigh_quotient_would_not_do():
    v = double(2)
    for _ in range(100):
        v = SPIRAL @ v / v.norm()
    assert (v @ SPIRAL @ v / (v @ v)).item() < 0.7
    assert spectral_radius(lambda z: z @ SPIRAL.T, double(1, 2)).item() == pytest.approx(1.1)


def test_growth_along_the_orbit_of_a_linear_map():
    start = double(3, 2)
    orbit = list(orbit_growth(affine, start, steps=1000))
    assert len(orbit) == 1000
    torch.testing.assert_close(orbit[0][0], affine(start))
    torch.testing.assert_close(orbit[1][0], affine(affine(start)))
    growth = torch.stack([factor for _, factor in orbit])
    assert growth[500:].log().mean(0).exp().tolist() == pytest.approx([0.9, 1.1, 1.1], rel=0.02)
    for most, a in zip(growth.amax(0).tolist(), MATRICES):
        assert most <= closed_sigma(a) + 1e-9


def test_growth_is_taken_where_the_orbit_is():
    # the logistic map z <- 4 z (1 - z): derivative 4 - 8 z, Lyapunov exponent ln 2
    factors = []
    before = start = torch.full((1, 1), 0.3, dtype=torch.float64)
    for z, factor in orbit_growth(lambda z: 4 * z * (1 - z), start, steps=2000):
        assert factor.item() == pytest.approx(abs(4 - 8 * before.item()))
        before = z
        factors.append(factor.item())
    assert sum(map(math.log, factors)) / len(factors) == pytest.approx(math.log(2), abs=0.1)


def test_a_constant_map_has_a_jacobian_of_zero():
    z = double(2, 3)
    assert sigma_max(lambda z: 0 * z + 1, z).tolist() == [0, 0]
    assert spectral_radius(lambda z: 0 * z + 1, z).tolist() == [0, 0]


def test_a_state_that_is_not_finite_raises_nothing():
    z = double(3, 2)
    z[1] = math.nan
    for estimate in (sigma_max, spectral_radius):
        found = estimate(lambda z: torch.tanh(affine(z)), z)
        assert found.isfinite().tolist() == [True, False, True]


# ---- measures of a map: dense Jacobians ------------------------------------------------------------------------------


def dense(function, z):
    """The Jacobian of each image, row by row: (B, D, D)."""
    with sdpa_kernel(SDPBackend.MATH):
        blocks = [torch.func.jacrev(lambda y: function(y[None])[0], chunk_size=1)(y) for y in z]
    return torch.stack([block.reshape(y.numel(), y.numel()) for block, y in zip(blocks, z)]).detach()


@pytest.fixture(params=[("bvit", {}), ("bvit", {"depth": 2, "steps": 2}), ("bvit_ode_rk4", {"step_size": 0.5})])
def tiny(request, small):
    name, kwargs = request.param
    return small(name, **TINY, **kwargs).double()


def test_estimates_agree_with_dense_jacobians_of_a_model(tiny):
    with torch.no_grad():
        z = tiny.step(tiny.initial_state(double(3, 3, 32, 32)))
    blocks = dense(tiny.step, z)
    largest = torch.linalg.matrix_norm(blocks, 2)
    radius = torch.linalg.eigvals(blocks).abs().amax(-1)
    found = sigma_max(tiny.step, z)
    assert found.tolist() == pytest.approx(largest.tolist(), rel=1e-6)
    assert (found <= largest * (1 + 1e-9)).all(), "from below"
    assert spectral_radius(tiny.step, z, iterations=400).tolist() == pytest.approx(radius.tolist(), rel=0.03)
    assert spectral_radius(tiny.step, z).tolist() == pytest.approx(radius.tolist(), rel=0.2)  # as it is reported
    assert all(parameter.grad is None for parameter in tiny.parameters())


def test_growth_along_the_orbit_is_the_product_of_dense_jacobians(tiny):
    with torch.no_grad():
        z = tiny.initial_state(double(2, 3, 32, 32))
    v = measures._direction(z, seed=5).flatten(1)
    total = torch.ones(2, dtype=torch.float64)
    for after, factor in orbit_growth(tiny.step, z, steps=3, seed=5):
        v = (dense(tiny.step, z) @ v[..., None])[..., 0]
        total = total * factor
        torch.testing.assert_close(total, v.norm(dim=1))
        torch.testing.assert_close(after, tiny.step(z).detach())
        z = after


def test_it_is_the_step_that_is_linearised_not_the_field(small):
    # where all residual branches are zero, a step is the identity: its Jacobian is 1, that of the field 0
    model = small("bvit", **TINY).double()
    with torch.no_grad():
        for part in (model.blocks[0].attn.proj, model.blocks[0].mlp.fc2):
            part.weight.zero_()
    z = double(2, 4, 8)
    assert sigma_max(model.step, z).tolist() == pytest.approx([1, 1])
    assert spectral_radius(model.step, z).tolist() == pytest.approx([1, 1])
    assert sigma_max(model.vector_field, z).tolist() == pytest.approx([0, 0])


# ---- the pass over images --------------------------------------------------------------------------------------------


@torch.no_grad()
def naive(model, split, horizon):
    """Columns (H + 1, n) and class states (H + 1, n, C) from one image at a time, all states of it at hand."""
    columns = {name: [] for name in dynamics.COLUMNS}
    class_states, all_states = [], []
    for image, label in zip(split.images, split.labels.tolist()):
        states = [model.initial_state(normalize(image[None]))]
        for _ in range(horizon):
            states.append(model.step(states[-1]))
        z = [state.double().flatten() for state in states]
        u = [None] + [b - a for a, b in pairwise(z)]
        heads = [model.norm(state).mean(1) for state in states]
        p = [model.head(head)[0].double().softmax(-1) for head in heads]
        no = math.nan
        columns["rms"].append([x.square().mean().sqrt().item() for x in z])
        columns["step_norm"].append([no] + [(u[t].norm() / z[t - 1].norm()).item() for t in range(1, horizon + 1)])
        columns["residual"].append([(model.vector_field(s).norm() / s.norm()).item() for s in states])
        columns["cosine"].append(
            [no, no] + [(u[t] @ u[t - 1] / u[t].norm() / u[t - 1].norm()).item() for t in range(2, horizon + 1)]
        )
        columns["entropy"].append([-(q * q.log()).sum().item() for q in p])
        columns["correct"].append([float(q.argmax().item() == label) for q in p])
        columns["finite"].append([1.0] * (horizon + 1))
        class_states.append(torch.cat(heads))
        all_states.append(torch.cat(states))
    tables = {name: torch.tensor(values, dtype=torch.float64).T for name, values in columns.items()}
    return tables, torch.stack(class_states, 1), torch.stack(all_states, 1)


def test_every_name_agrees_with_a_loop_over_pictures(name, small, split):
    model = small(name, **SMALL, **({"depth": 2} if name == "vit_cifar" else {}))
    nn.init.normal_(model.head.weight)
    seen = measure(model, split, horizon=4, batch_size=5, progress=True)
    columns, class_states, states = naive(model, split, 4)
    assert list(seen.images) == list(dynamics.COLUMNS)
    for column, values in seen.images.items():
        torch.testing.assert_close(values, columns[column], rtol=1e-3, atol=1e-4, equal_nan=True, msg=column)
    torch.testing.assert_close(seen.class_states, class_states, rtol=1e-3, atol=1e-4)
    vectors = {"tokens": states.flatten(1, 2), "class": class_states}
    for what, found in (("tokens", seen.participation_tokens), ("class", seen.participation_class)):
        expected = [participation_ratio(torch.cov(x.double().T)).item() for x in vectors[what]]
        assert found.tolist() == pytest.approx(expected, rel=1e-3), what
    assert (seen.trained_horizon, seen.horizon, seen.num_classes) == (model.steps * model.stages, 4, 10)
    assert seen.evaluations_per_step == model.evaluations_per_step


def test_the_class_state_is_what_the_head_sees(small, split):
    model = small("bvit", **SMALL, class_token=True, global_pool="token")
    seen = measure(model, split, horizon=2)
    model.set_horizon(2)
    features = model.forward_features(normalize(split.images))
    torch.testing.assert_close(seen.class_states[2], features[:, 0].detach())


def test_cka_is_that_of_whole_states(small, split):
    model = small("bvit", **SMALL)
    seen = measure(model, split, horizon=3, batch_size=13)
    _, _, states = naive(model, split, 3)
    x = states.double().flatten(2)
    torch.testing.assert_close(seen.cka, cka(hsic(x @ x.mT)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.cka.diagonal(), torch.ones(4, dtype=torch.float64))


def test_batches_too_small_for_cka_are_left_out(small, split):
    model = small("bvit", **SMALL)
    ten = measure(model, split[:10], horizon=2)
    torch.testing.assert_close(measure(model, split, horizon=2, batch_size=10).cka, ten.cka)
    assert measure(model, split[:3], horizon=2).cka.isnan().all()
    row = rows(measure(model, split[:1], horizon=1))[1]
    assert (row["cka_previous"], row["participation_class"], row["count"]) == (None, None, 1)


def test_each_step_is_taken_once_and_no_states_are_kept(small, split, monkeypatch):
    model, calls = small("bvit", **SMALL), []
    step = model.step
    monkeypatch.setattr(model, "step", lambda z: calls.append(len(z)) or step(z))
    seen = measure(model, split, horizon=6, batch_size=10, keep=4)
    assert calls == [10] * 6 + [3] * 6
    state = 64 * 16
    kept = [*seen.images.values(), seen.cka, seen.participation_tokens, seen.participation_class, seen.class_states]
    assert sum(tensor.numel() for tensor in kept) < len(split) * state
    assert seen.class_states.shape == (7, 4, 16)


def test_the_default_horizon_is_four_times_the_trained_one(small, split):
    assert resolve_horizon(small("bvit")) == 48
    assert resolve_horizon(small("bvit_ds", steps=2, stages=3)) == 24
    assert resolve_horizon(small("bvit", steps=900)) == 1000
    assert measure(small("bvit", **SMALL, steps=2), split).horizon == 8
    with pytest.raises(ValueError, match="horizon=0 must be an integer from 1"):
        resolve_horizon(small("bvit"), 0)
    with pytest.raises(ValueError, match="horizon=1001 must be at most 1000"):
        resolve_horizon(small("bvit"), 1001)
    with pytest.raises(ValueError, match="must be a RecurrentVisionTransformer, not wrapped in another; got Linear"):
        resolve_horizon(nn.Linear(1, 1))


def test_models_whose_states_say_nothing_are_refused(small, split):
    for model, message in (
        (small("bvit").bfloat16(), r"is in torch\.bfloat16"),
        (small("bvit", global_pool="", class_token=True), "global_pool=''"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(model, split)
        with pytest.raises(ValueError, match=message):
            jacobians(model, split)


def test_the_model_is_left_as_it_was(small, split):
    model = small("bvit", **SMALL, drop_rate=0.5, proj_drop_rate=0.5).train()
    model.patch_embed.eval()
    modes, weights = [part.training for part in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    first, again = (measure(model, split, horizon=3) for _ in range(2))
    assert torch.equal(first.images["rms"], again.images["rms"]), "dropout was on"
    jacobians(model, split, horizon=2, count=2)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert model.horizon == 12
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_a_field_that_overflows_is_counted_and_leaves_gaps(small, split):
    model = small("bvit_ode_rk4", **SMALL, field="black_box")
    seen = measure(model, split, horizon=150)
    found = jacobians(model, split, horizon=150, steps=[0, 150], count=2)
    first, *_, last = rows(seen, found)
    assert (first["non_finite"], last["non_finite"]) == (0, len(split))
    assert first["residual"] > 0
    gaps = ("entropy", "rms", "step_norm", "residual", "cosine", "participation_tokens", "participation_class")
    assert [last[name] for name in gaps] == [None] * len(gaps)
    assert (last["top1"], last["cka_previous"], last["cka"][0]) == (0, None, None)
    json.dumps([first, last], allow_nan=False)


def test_rows_hold_the_numbers_of_the_pass(small, split):
    model = small("bvit_ode_heun", **SMALL, steps=2)
    seen, found = measure(model, split, horizon=5), jacobians(model, split, horizon=5, steps=[4, 1], count=3)
    table = rows(seen, found)
    assert [row["step"] for row in table] == list(range(6))
    assert [row["NFE"] for row in table] == [0, 2, 4, 6, 8, 10]
    row = table[4]
    assert row["top1"] == pytest.approx(seen.images["correct"][4].mean().item())
    assert row["entropy"] == pytest.approx(seen.images["entropy"][4].mean().item())
    assert row["residual"] == pytest.approx(sorted(seen.images["residual"][4].tolist())[6])
    assert row["cka"] == seen.cka[4].tolist()
    assert (row["cka_previous"], row["cka_trained"]) == (row["cka"][3], row["cka"][2])
    assert row["growth"] == pytest.approx(math.prod(found.growth[3].tolist()) ** (1 / 3))
    assert row["sigma_max"] == pytest.approx(found.sigma_max[1].median().item())
    assert found.steps == (1, 4)
    assert [row["spectral_radius"] is not None for row in table] == [False, True, False, False, True, False]
    assert table[0]["growth"] is None
    assert list(rows(seen)[0]) == list(table[0])
    assert json.loads(json.dumps(table, allow_nan=False)) == table


def test_where_jacobians_are_taken(small, split):
    model = small("bvit", **TINY, steps=4)
    five = Split(split.images, split.labels % 5)
    found = jacobians(model, five, count=2)
    assert found.steps == (0, 2, 4, 8, 16)
    assert found.growth.shape == (16, 2)
    assert found.sigma_max.shape == found.spectral_radius.shape == (5, 2)
    assert (found.sigma_max > 0).all()
    assert jacobians(model, five, horizon=3, count=1).steps == (0, 2, 3)
    with pytest.raises(ValueError, match=r"steps=\(2, 9\) must be from 0 to the horizon, 3"):
        jacobians(model, five, horizon=3, steps=[9, 2])
    with pytest.raises(ValueError, match="count=0 must be a whole number from 1"):
        jacobians(model, five, count=0)


# ---- pictures and the command ----------------------------------------------------------------------------------------


@pytest.fixture
def findings(small, split):
    model = small("bvit", **SMALL, steps=2)
    solved = {row["method"]: found for row, found in controls(model, split, methods=["fixed_point"], max_evaluations=9)}
    return figures.Findings("a title", measure(model, split), jacobians(model, split, count=3), solved)


@pytest.mark.parametrize("picture", figures.PICTURES, ids=[picture.file for picture in figures.PICTURES])
def test_each_picture_is_drawn_with_its_caption(findings, picture):
    pytest.importorskip("matplotlib")
    figure = figures.draw(picture, findings)
    texts = [text.get_text().replace("\n", " ") for text in figure.texts]
    assert picture.caption in texts
    assert "a title" in texts
    assert all(axes.get_xlabel() or axes.get_label() == "<colorbar>" for axes in figure.axes)


def test_pictures_show_the_numbers(findings):
    pytest.importorskip("matplotlib")
    by_file = {picture.file: figures.draw(picture, findings) for picture in figures.PICTURES}
    accuracy = by_file["decision.png"].axes[0].lines[0]
    assert list(accuracy.get_ydata()) == pytest.approx((100 * findings.seen.images["correct"].mean(1)).tolist())
    residual = by_file["motion.png"].axes[0].lines[1]
    assert list(residual.get_ydata()) == pytest.approx([row["residual"] for row in rows(findings.seen)])
    (image,) = by_file["similarity.png"].axes[0].images
    torch.testing.assert_close(torch.tensor(image.get_array()), findings.seen.cka.clamp(0, 1))
    growth = by_file["growth.png"].axes[0].lines[0]
    assert list(growth.get_ydata()) == pytest.approx(findings.jacobians.growth.nanquantile(0.5, dim=1).tolist())
    solution = findings.controls["fixed_point"]
    assert list(by_file["controls.png"].axes[0].lines[0].get_xdata()) == list(solution.evaluations)
    before, beyond, _ = by_file["trajectories.png"].axes
    assert len(before.collections) == len(beyond.collections) == 13
    assert [len(path.get_segments()) for path in (before.collections[0], beyond.collections[0])] == [2, 6]


def test_a_page_is_written_whole_or_not_at_all(findings, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    written = figures.write(tmp_path, findings, {"A table": "| a |"})
    assert sorted(tmp_path.iterdir()) == sorted(written)
    page = (tmp_path / "dynamics.md").read_text()
    assert "## A table\n\n| a |" in page
    assert re.findall(r"!\[.*\]\((.*)\)", page) == [picture.file for picture in figures.PICTURES]
    assert all(picture.caption in page for picture in figures.PICTURES)
    before = {path: path.read_bytes() for path in written}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        figures.write(tmp_path, findings, {})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pictures_of_states_that_overflow(small, split, tmp_path):
    pytest.importorskip("matplotlib")
    model = small("bvit_ode_rk4", **SMALL, field="black_box")
    seen, found = measure(model, split, horizon=150), jacobians(model, split, horizon=150, steps=[0, 150], count=2)
    solved = {row["method"]: one for row, one in controls(model, split, methods=["fixed_point", "anderson"])}
    figures.write(tmp_path, figures.Findings("overflows", seen, found, solved), {})
    assert len(list(tmp_path.iterdir())) == 1 + len(figures.PICTURES)


def test_jacobians_of_a_model_with_gradient_checkpointing(small, split):
    model = small("bvit", **SMALL, steps=2)
    expected = jacobians(model, split, steps=[0], count=2)
    model.set_grad_checkpointing(True)
    found = jacobians(model, split, steps=[0], count=2)
    torch.testing.assert_close(found.sigma_max, expected.sigma_max)
    torch.testing.assert_close(found.growth, expected.growth)
    assert model.blocks[0].grad_checkpointing
    for steps in ([0, 1.5], ["1"]):
        with pytest.raises(TypeError):
            jacobians(model, split, steps=steps, count=2)


def test_the_command_writes_a_page_and_rows(small, split, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("torchdiffeq")
    hundred = Split(split.images, split.labels * 9)
    monkeypatch.setattr(cifar, "load", lambda root, split="train": {"test": hundred}[split])
    model = small("bvit", embed_dim=16, num_heads=2, num_classes=100, steps=2)
    save_for_hf(model, tmp_path / "model", safe_serialization=True)
    out = tmp_path / "deep" / "out"
    command = ["dynamics", f"local-dir:{tmp_path / 'model'}", "--out", str(out), "--limit", "9"]
    assert main([*command, "--batch-size", "5"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:6]] == ["steps", "0", "1", "2", "4", "8"]
    assert [line.split()[0] for line in shown[-3:]] == ["fixed_point", "anderson", "dopri5"]
    names = {"dynamics.md", "steps.jsonl", "controls.jsonl", *(picture.file for picture in figures.PICTURES)}
    assert {path.name for path in out.iterdir()} == names
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(9))
    assert all(row["count"] == 9 for row in steps)
    solvers = [json.loads(line) for line in (out / "controls.jsonl").read_text().splitlines()]
    assert [row["method"] for row in solvers] == ["fixed_point", "anderson", "dopri5"]
    page = (out / "dynamics.md").read_text()
    assert "8 steps (made for 2)" in page
    assert printing.STEPS in page
    assert printing.CONTROLS in page
    assert f"--horizon 8 --limit 9 --batch-size 5 --device cpu`, {date.today().isoformat()}; " in page
    assert main([*command, "--horizon", "3"]) == 0
    assert len((out / "steps.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bvitt"], "'bvitt' is neither a folder nor a name of the zoo"),
        (["bvit", "--limit", "0"], "limit=0 must be at least 1"),
        (["bvit", "--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["bvit", "--device", "gpu"], "--device gpu: Expected one of cpu, cuda,"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(arguments, message, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["dynamics", *arguments, "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_torchdiffeq_the_other_controls_are_run(small, split, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert commands._available_methods() == ["fixed_point", "anderson"]
    monkeypatch.setattr(commands, "_available_methods", lambda: ["fixed_point", "anderson"])
    hundred = Split(split.images, split.labels * 9)
    monkeypatch.setattr(cifar, "load", lambda root, split="train": {"test": hundred}[split])
    save_for_hf(
        small("bvit", embed_dim=16, num_heads=2, num_classes=100, steps=2), tmp_path / "model", safe_serialization=True
    )
    out = tmp_path / "out"
    assert main(["dynamics", f"local-dir:{tmp_path / 'model'}", "--out", str(out), "--limit", "9"]) == 0
    shown = capsys.readouterr()
    assert 'recurrent-vit: dopri5 is not run; it needs pip install "recurrent-vit[ode]"\n' in shown.err
    assert shown.out.splitlines()[-1].split() == ["dopri5", *["not", "run"] * 6]
    assert "| dopri5 " in (out / "dynamics.md").read_text()
    assert [json.loads(line)["method"] for line in (out / "controls.jsonl").read_text().splitlines()] == [
        "fixed_point",
        "anderson",
    ]
