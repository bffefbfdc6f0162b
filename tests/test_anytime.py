"""Early exit against a loop over single images; thresholds against a search by brute force; the command line."""

import copy
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import benchmarks.anytime as benchmark
import recurrent_vit
from benchmarks import rows as benchmark_rows
from benchmarks import tables as benchmark_tables
from recurrent_vit import calibration, cifar
from recurrent_vit.__main__ import main
from recurrent_vit.anytime import CRITERIA, Anytime, Look, is_sound, parse
from recurrent_vit.augment import normalize
from recurrent_vit.calibration import Records, at, calibrate, choose, curve, measure, plot_curve, record, uniform
from recurrent_vit.cifar import Split
from recurrent_vit.evaluate import evaluate
from recurrent_vit.limits import PLAIN

SOLVERS = [PLAIN, *recurrent_vit.TABLEAUS]
SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10}


@pytest.fixture
def images():
    return torch.randn(12, 3, 32, 32)


@pytest.fixture
def sharp(small):
    """Build a model whose logits differ much between images and steps."""

    def build(name="bvit", **kwargs):
        model = small(name, **{**SMALL, "steps": 5, **kwargs})
        nn.init.normal_(model.head.weight)
        return model

    return build


@pytest.fixture
def split():
    return Split(torch.randint(256, (17, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (17,)))


@torch.no_grad()
def run(anytime, images):
    return anytime(images)


def assert_agree(row, expected):
    """Equal in all columns that both have, but for the time and the rounding of fractions."""
    for key in row.keys() & expected.keys() - {"seconds"}:
        rounded = isinstance(expected[key], float)
        assert row[key] == (pytest.approx(expected[key]) if rounded else expected[key]), key


def always(criterion):
    """The threshold that the first check meets."""
    return CRITERIA[criterion].least if CRITERIA[criterion].rising else CRITERIA[criterion].most


# ---- a loop over single images ---------------------------------------------------------------------------------------


@torch.no_grad()
def looks(model, image, least=1, every=1):
    """(step, scores by criterion, logits) at every check and after the last step, of one image, in Python's floats."""
    z, answer, streak, found = model.initial_state(image[None]), None, 0, []
    for step in range(1, model.horizon + 1):
        before, z = z, model.step(z)
        if step < model.horizon and (step < least or (step - least) % every):
            continue
        logits = model.forward_head(model.norm(z))[0]
        y = logits.tolist()
        streak = streak + 1 if y.index(max(y)) == answer else 1
        answer = y.index(max(y))
        parts = [math.exp(value - max(y)) for value in y]
        p = sorted((part / math.fsum(parts) for part in parts), reverse=True)
        here, there = z.flatten().tolist(), before.flatten().tolist()
        scores = {
            "confidence": p[0],
            "margin": p[0] - p[1],
            "stable": streak,
            "step_norm": math.dist(here, there) / math.hypot(*there),
        }
        found.append((step, scores, logits))
    return found


def exit_of(found, criterion, threshold):
    """(step, logits) of the first of these looks that is sure, or else of the last."""
    for step, scores, logits in found[:-1]:
        if scores[criterion] >= threshold if criterion != "step_norm" else scores[criterion] <= threshold:
            return step, logits
    return found[-1][0], found[-1][2]


def dividing(criterion, found):
    """A threshold that about half of the images meet at the first check, in the widest gap between two scores."""
    if criterion == "stable":
        return 2
    scores = sorted(look[0][1][criterion] for look in found)
    middle = range(len(scores) // 4, 3 * len(scores) // 4)
    place = max(middle, key=lambda i: scores[i + 1] - scores[i])
    assert scores[place + 1] - scores[place] > 1e-5, "rounding would decide"
    return (scores[place] + scores[place + 1]) / 2


def assert_is_the_loop(model, images, criterion, **checks):
    found = [looks(model, image, **checks) for image in images]
    threshold = dividing(criterion, found)
    steps, logits = zip(*(exit_of(of_one, criterion, threshold) for of_one in found))
    out = run(Anytime(model, criterion, threshold, **{"least": 1, **checks}), images)
    assert out.steps.tolist() == list(steps)
    torch.testing.assert_close(out.logits, torch.stack(logits), rtol=1e-3, atol=1e-3)
    assert len(set(steps)) > 1 or criterion == "stable", "all exit at once, and the test sees nothing"


def test_stable_counts_checks_with_the_same_answer(small):
    """Images that are told apart by hand-made answers: the head reads which answers come from the state's first row."""
    model = small("bvit", **SMALL, steps=6)
    answers = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 0]])
    model.initial_state = lambda x: x.new_zeros(len(x), 1, 16) + torch.arange(len(x)).view(-1, 1, 1) * 100.0
    model.step = lambda z: z + 1
    model.norm = nn.Identity()

    def head(z):
        image, step = z[:, 0, 0].long() // 100, z[:, 0, 0].long() % 100
        return nn.functional.one_hot(answers[image, step - 1], 10).float()

    model.forward_head = head
    out = run(Anytime(model, "stable", 3), torch.zeros(4, 3, 32, 32))
    assert out.steps.tolist() == [3, 4, 6, 5]
    assert out.logits.argmax(-1).tolist() == [1, 1, 1, 1]


def test_the_loop_knows_every_criterion(sharp, images):
    assert set(looks(sharp(), images[0])[0][1]) == set(CRITERIA)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_and_criterion_agrees_with_a_loop_over_images(solver, criterion, sharp, images):
    assert_is_the_loop(sharp(solver=solver), images, criterion)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("kwargs", [{"depth": 2}, {"name": "bvit_ds", "steps": 2, "stages": 3}, {"class_token": True}])
def test_other_models_agree_with_a_loop_over_images(kwargs, criterion, sharp, images):
    if "class_token" in kwargs:
        kwargs = {**kwargs, "global_pool": "token"}
    assert_is_the_loop(sharp(**kwargs), images, criterion)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("least", "every"), [(2, 1), (1, 2), (2, 3), (4, 9)])
def test_where_it_is_checked_agrees_with_a_loop_over_images(least, every, criterion, sharp, images):
    assert_is_the_loop(sharp(), images, criterion, least=least, every=every)


@pytest.mark.parametrize(
    ("least", "every", "horizon", "checks"),
    [
        (1, 1, 4, [1, 2, 3, 4]),
        (2, 2, 5, [2, 4, 5]),
        (2, 2, 6, [2, 4, 6]),
        (7, 1, 5, [5]),
        (1, 1, 1, [1]),
    ],
)
def test_the_checks_follow_the_horizon(least, every, horizon, checks, small):
    model = small("bvit", **SMALL)
    anytime = Anytime(model, least=least, every=every)
    model.set_horizon(horizon)
    assert anytime.checks == checks


def test_by_default_the_first_check_is_the_first_answer_that_was_trained(small):
    assert Anytime(small("bvit_ds", **SMALL)).checks == list(range(3, 13))
    assert Anytime(small("bvit", **SMALL)).checks == list(range(1, 13))
    assert Anytime(small("vit_cifar", **SMALL, depth=2)).checks == [1]


# ---- never and always ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
def test_never_is_the_model_to_the_bit(name, criterion, small, images):
    model = small(name, **SMALL, **({"depth": 2} if name == "vit_cifar" else {}))
    out = run(Anytime(model, criterion, None), images)
    with torch.no_grad():
        assert torch.equal(out.logits, model(images))
    assert out.steps.tolist() == [model.horizon] * len(images)


def test_a_threshold_that_is_not_met_is_never(small, images):
    model = small("bvit", **SMALL)
    with torch.no_grad():
        expected = model(images)
    for criterion, threshold in (("stable", 10_000), ("step_norm", 0), ("confidence", 1), ("margin", 1)):
        out = run(Anytime(model, criterion, threshold), images)
        assert torch.equal(out.logits, expected), criterion


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_always_is_the_first_check(criterion, least, sharp, images, monkeypatch):
    model, taken = sharp(), []
    with torch.no_grad():
        expected = model.forward_steps(images)[least - 1]
    step = model.step
    monkeypatch.setattr(model, "step", lambda z: taken.append(len(z)) or step(z))
    out = run(Anytime(model, criterion, always(criterion), least=least), images)
    assert torch.equal(out.logits, expected)
    assert out.steps.tolist() == [least] * len(images)
    assert taken == [len(images)] * least, "nothing is left to compute"


@pytest.mark.parametrize("criterion", CRITERIA)
def test_no_image_and_one(criterion, sharp, images):
    anytime = Anytime(sharp(), criterion, always(criterion))
    out = run(anytime, images[:0])
    assert (out.logits.shape, out.steps.shape, out.steps.dtype) == ((0, 10), (0,), torch.int64)
    out = run(anytime, images[:1])
    assert (out.logits.shape, out.steps.tolist()) == ((1, 10), [1])


# ---- the batch that shrinks ------------------------------------------------------------------------------------------


@pytest.fixture
def exits(sharp):
    """A model, images and a threshold of confidence at which they exit after different numbers of steps."""
    model, images = sharp(steps=8), torch.randn(48, 3, 32, 32)
    threshold = dividing("confidence", [looks(model, image) for image in images])
    return model, images, threshold


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("compact", [0, 1 / 16, 0.5])
def test_removal_changes_nothing(criterion, compact, sharp, images):
    model = sharp()
    threshold = dividing(criterion, [looks(model, image) for image in images])
    kept = run(Anytime(model, criterion, threshold, compact=1), images)
    removed = run(Anytime(model, criterion, threshold, compact=compact), images)
    assert torch.equal(removed.steps, kept.steps)
    torch.testing.assert_close(removed.logits, kept.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compact", [0, 1 / 16, 0.3, 1])
def test_what_is_finished_is_computed_no_more(compact, exits, monkeypatch):
    model, images, threshold = exits
    sizes, step = [], model.step
    monkeypatch.setattr(model, "step", lambda z: sizes.append(len(z)) or step(z))
    out = run(Anytime(model, "confidence", threshold, compact=compact), images)
    assert len(set(out.steps.tolist())) > 1
    assert len(sizes) == out.steps.max()
    for number, size in enumerate(sizes, start=1):
        unfinished = int((out.steps >= number).sum())
        assert size >= unfinished
        assert size == unfinished or size - unfinished < compact * size, number
    if compact == 0:
        assert sum(sizes) == out.steps.sum()
    if compact == 1:
        assert set(sizes) == {len(images)}


def test_the_order_of_the_batch_plays_no_part(exits):
    model, images, threshold = exits
    anytime, order = Anytime(model, "confidence", threshold), torch.randperm(len(images))
    out, permuted = run(anytime, images), run(anytime, images[order])
    assert torch.equal(permuted.steps, out.steps[order])
    torch.testing.assert_close(permuted.logits, out.logits[order], rtol=1e-3, atol=1e-3)


# ---- modes, gradients, dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_mode_gives_the_same(mode, exits):
    model, images, threshold = exits
    anytime = Anytime(model, "confidence", threshold)
    expected = run(anytime, images)
    with mode():
        out = anytime(images)
        assert out.logits.requires_grad == (mode is torch.enable_grad)
    assert torch.equal(out.steps, expected.steps)
    torch.testing.assert_close(out.logits.detach(), expected.logits, rtol=1e-4, atol=1e-4)


def test_gradients_go_through_the_steps_that_were_taken(exits):
    model, images, threshold = exits
    out = Anytime(model, "confidence", threshold)(images)
    weights = torch.randn_like(out.logits)
    parameters = list(model.parameters())
    found = torch.autograd.grad((weights * out.logits).sum(), parameters)
    logits = model.forward_steps(images)[out.steps - 1, torch.arange(len(images))]
    expected = torch.autograd.grad((weights * logits).sum(), parameters)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_probabilities_are_at_least_float32(dtype, sharp, images):
    model, images = sharp().to(dtype), images.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.no_grad():
        logits = model.forward_steps(images)  # (5, 12, 10)
    sure = logits.to(wide).softmax(-1).amax(-1)
    threshold = sure[0].median().item()
    steps = [next((s for s in range(5) if p[s] >= threshold), 4) + 1 for p in sure.T.tolist()]
    out = run(Anytime(model, "confidence", threshold, compact=1), images)  # the same batch, so the same rounding
    assert out.logits.dtype == dtype
    assert out.steps.tolist() == steps
    assert torch.equal(out.logits, logits[out.steps - 1, torch.arange(len(images))])
    assert len(set(steps)) > 1


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scores_are_at_least_float32(criterion):
    logits, z = torch.randn(3, 10), torch.randn(2, 3, 4, 8)
    look = Look(logits, torch.tensor([1, 2, 3]), *z)
    expected = CRITERIA[criterion].measure(look)
    half = CRITERIA[criterion].measure(Look(logits.bfloat16(), look.streaks, *z.bfloat16()))
    assert half.dtype == expected.dtype
    assert half.dtype in (torch.float32, torch.int64)
    torch.testing.assert_close(half, expected, rtol=0.05, atol=0.05)


def test_it_works_under_autocast(sharp, images):
    with torch.autocast("cpu", torch.bfloat16):
        out = run(Anytime(sharp(), "confidence", 0.5), images)
    assert out.logits.shape == (12, 10)


def test_in_training_mode_dropout_is_on(sharp, images):
    model = sharp(drop_rate=0.5)
    anytime = Anytime(model, "confidence", None)
    assert not anytime.training
    first, again = run(anytime, images), run(anytime, images)
    assert torch.equal(first.logits, again.logits)
    anytime.train()
    assert model.training
    first, again = run(anytime, images), run(anytime, images)
    assert not torch.equal(first.logits, again.logits)


@pytest.mark.parametrize("same", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_give_the_same(same, exits):
    model, images, threshold = exits
    anytime = Anytime(model, "margin", threshold, least=2)
    out, copied = run(anytime, images), run(same(anytime), images)
    assert torch.equal(out.logits, copied.logits)
    assert torch.equal(out.steps, copied.steps)


def test_it_shows_its_arguments_and_holds_the_model(small):
    model = small("bvit", **SMALL)
    anytime = recurrent_vit.Anytime(model, "margin", 0.5, every=2)
    assert anytime.model is model
    assert "criterion='margin', threshold=0.5, least=1, every=2, compact=0.0625" in repr(anytime)
    assert set(anytime.state_dict()) == {f"model.{key}" for key in model.state_dict()}


# ---- states that overflow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("solver", SOLVERS[1:])
def test_a_state_that_has_overflowed_is_never_sure(solver, criterion, sharp, images):
    model, images = sharp(solver=solver, field="black_box"), images[:2]
    model.set_horizon(90)
    early = run(Anytime(model, criterion, always(criterion), least=2), images)
    assert early.steps.tolist() == [2, 2], "finite as yet"
    late = run(Anytime(model, criterion, always(criterion), least=80), images)  # states grow by 2 to 2.7 times a step
    assert late.steps.tolist() == [90, 90]
    with torch.no_grad():
        torch.testing.assert_close(late.logits, model(images), rtol=0, atol=0, equal_nan=True)


def test_what_norms_cannot_take_is_not_sound():
    z, logits = torch.ones(5, 4, 8), torch.zeros(5, 3)
    z[1, 2, 3] = 1e30  # finite, its square is not
    z[2, 0, 0] = math.nan
    logits[3, 1] = math.inf
    assert is_sound(logits, z).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_what_is_no_number_is_not_sure(criterion):
    scores = torch.tensor([math.nan])
    assert CRITERIA[criterion].is_met(scores, always(criterion)).tolist() == [False]


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"criterion": "entropy"}, "='entropy' is unknown; known criteria: confidence, margin, stable, step_norm"),
        ({"criterion": ["margin"]}, r"criterion=\['margin'\] is unknown"),
        ({"criterion": None}, "criterion=None is unknown"),
        ({"threshold": 1.01}, r"confidence threshold=1\.01 must be a number from 0 to 1"),
        ({"threshold": -0.1}, r"confidence threshold=-0\.1 must be"),
        ({"threshold": math.nan}, "confidence threshold=nan must be"),
        ({"threshold": math.inf}, "confidence threshold=inf must be"),
        ({"threshold": "0.9"}, r"confidence threshold='0\.9' must be"),
        ({"threshold": True}, "confidence threshold=True must be"),
        ({"threshold": torch.zeros(2)}, r"confidence threshold=tensor\(\[0\., 0\.\]\) must be"),
        ({"criterion": "stable"}, r"stable threshold=0\.9 must be a whole number from 1 to 10000"),
        ({"criterion": "stable", "threshold": 2.5}, r"stable threshold=2\.5 must be a whole number"),
        ({"criterion": "stable", "threshold": math.inf}, "stable threshold=inf must be a whole number"),
        ({"criterion": "step_norm", "threshold": 1e300}, r"threshold=1e\+300 must be a number from 0 to 10000"),
        ({"least": 0}, "least=0 must be a whole number from 1 to 10000"),
        ({"least": 1.5}, r"least=1\.5 must be"),
        ({"every": 0}, "every=0 must be a whole number from 1 to 10000"),
        ({"every": 10**400}, "every=1000000000"),
        ({"compact": 2}, "compact=2 must be a number from 0 to 1"),
        ({"compact": "all"}, "compact='all' must be"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_named(small, kwargs, message):
    with pytest.raises(ValueError, match=message):
        Anytime(small("bvit", **SMALL), **kwargs)


def test_models_that_do_not_fit_are_named(small, images):
    with pytest.raises(ValueError, match="must be a RecurrentVisionTransformer, not wrapped in another; got Linear"):
        Anytime(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="got Anytime"):
        Anytime(Anytime(small("bvit", **SMALL)))
    for classes in (0, 1):
        with pytest.raises(ValueError, match=rf"num_classes={classes}, .* at least 2 classes"):
            Anytime(small("bvit", **{**SMALL, "num_classes": classes}))
    with pytest.raises(ValueError, match="global_pool=''"):
        Anytime(small("bvit", **SMALL, global_pool=""))
    model = small("bvit", **SMALL)
    anytime = Anytime(model)
    model.prune_intermediate_layers([3], prune_head=False)
    for use in (lambda: Anytime(model), lambda: anytime(images)):
        with pytest.raises(ValueError, match="this model was pruned to its first 4 states"):
            use()


def test_unknown_arguments_are_a_type_error(small):
    with pytest.raises(TypeError, match="patience"):
        Anytime(small("bvit", **SMALL), patience=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "criterion='' is unknown"),
        ("sure:0.9", "criterion='sure' is unknown; known criteria: confidence"),
        ("confidence:", "anytime='confidence:': '' is not a number; give CRITERION:THRESHOLD"),
        ("confidence:0.9:1", "'0.9:1' is not a number"),
        ("confidence:90", r"confidence threshold=90\.0 must be a number from 0 to 1"),
        ("confidence:nan", "confidence threshold=nan must be"),
        ("stable:2.5", r"stable threshold=2\.5 must be a whole number"),
    ],
)
def test_parse_names_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_parse_reads_every_criterion(criterion):
    assert parse(criterion) == (criterion, None)
    assert parse(f"{criterion}:1") == (criterion, 1)


# ---- every threshold at once -----------------------------------------------------------------------------------------


def synthetic(criterion, n=30, checks=4):
    """Records of chance, with equal scores, scores that fall again, and some that are no numbers."""
    generator = torch.Generator().manual_seed(n + checks)
    scores = torch.randint(1, 9, (n, checks), generator=generator).double()
    if not CRITERIA[criterion].whole:
        scores /= 8
    scores[torch.rand(n, checks, generator=generator) < 0.1] = math.nan
    right = torch.rand(n, checks + 1, generator=generator) < torch.linspace(0.3, 0.9, checks + 1)
    steps = (*range(2, 2 + 3 * checks, 3), 3 * checks + 1)
    return Records(criterion, steps, scores, right, {"horizon": steps[-1], "NFE": 4 * steps[-1]})


def by_hand(records, threshold):
    """(right answers, steps of all images) in loops over numbers."""
    right = total = 0
    for scores, hits in zip(records.scores.tolist(), records.right.tolist()):
        rising = records.criterion != "step_norm"
        sure = [threshold is not None and (s >= threshold if rising else s <= threshold) for s in scores] + [True]
        place = sure.index(True)
        right += hits[place]
        total += records.steps[place]
    return right, total


def candidates(records):
    return [None, *sorted({score for score in records.scores.flatten().tolist() if not math.isnan(score)})]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_row_is_what_a_loop_over_images_counts(criterion):
    records = synthetic(criterion)
    whole, _ = by_hand(records, None)
    for threshold in candidates(records):
        row, (right, total) = at(records, threshold), by_hand(records, threshold)
        assert row["top1"] == pytest.approx(right / 30)
        assert row["lost"] == pytest.approx((whole - right) / 30)
        assert row["mean_steps"] == pytest.approx(total / 30)
        assert row["mean_NFE"] == pytest.approx(4 * total / 30)
        assert row["saved"] == pytest.approx(1 - total / 30 / records.steps[-1])
        assert sum(row["exits"].values()) == row["count"] == 30
        assert sum(int(step) * images for step, images in row["exits"].items()) == total
        assert row["threshold"] == threshold


@pytest.mark.parametrize("loss", [0, 0.05, 0.1, 0.3, 1])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_chosen_threshold_is_that_of_a_search_by_brute_force(criterion, loss):
    for n, checks in ((30, 4), (7, 1), (100, 11), (1, 3)):
        records = synthetic(criterion, n, checks)
        whole, _ = by_hand(records, None)
        counted = [by_hand(records, threshold) for threshold in candidates(records)]
        cheapest = min(total for right, total in counted if (whole - right) / n <= loss)
        row = choose(records, loss)
        right, total = by_hand(records, row["threshold"])
        assert total == cheapest
        assert (whole - right) / n <= loss
        assert row == at(records, row["threshold"])


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_curve_has_every_threshold_that_differs(criterion):
    records = synthetic(criterion)
    found = curve(records, points=10_000)
    costs = {total for _, total in (by_hand(records, threshold) for threshold in candidates(records))}
    assert [round(30 * row["mean_steps"]) for row in found] == sorted(costs, reverse=True)
    assert found[0]["threshold"] is None
    thinned = curve(records, points=3)
    assert len(thinned) <= 3
    assert (thinned[0], thinned[-1]) == (found[0], found[-1])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_without_a_check_before_the_last_there_is_nothing_to_choose():
    records = Records(
        "margin", (1,), torch.empty(4, 0, dtype=torch.float64), torch.ones(4, 1).bool(), {"horizon": 1, "NFE": 1}
    )
    assert [row["threshold"] for row in curve(records)] == [None]
    assert choose(records)["saved"] == 0


def test_the_error_of_what_is_lost_is_that_of_pairs():
    records = synthetic("confidence", n=100)
    row = at(records, 0.5)
    exits = [next((k for k, s in enumerate(scores) if s >= 0.5), 4) for scores in records.scores.tolist()]
    lost = [int(hits[-1]) - int(hits[place]) for hits, place in zip(records.right.tolist(), exits)]
    mean = sum(lost) / 100
    assert row["lost_stderr"] == pytest.approx((sum((value - mean) ** 2 for value in lost) / 100**2) ** 0.5)
    assert row["lost_stderr"] > 0


def test_uniform_rows_stop_all_images_at_once():
    records = synthetic("stable")
    found = uniform(records)
    assert [row["mean_steps"] for row in found] == list(records.steps)
    assert [row["top1"] for row in found] == pytest.approx(records.right.double().mean(0).tolist())
    assert {row["criterion"] for row in found} == {"uniform"}
    assert (found[-1]["lost"], found[-1]["saved"]) == (0, 0)


# ---- on a split ------------------------------------------------------------------------------------------------------


@pytest.fixture
def answered(sharp, split):
    """A model, and a split of which about half of the labels are its own answers after all steps."""
    model = sharp()
    with torch.no_grad():
        split.labels[::2] = model(normalize(split.images)).argmax(1)[::2]
    return model, split


def test_never_is_evaluation_at_the_horizon(answered):
    model, split = answered
    row = measure(Anytime(model, "stable", None), split, batch_size=8, progress=True)
    [expected] = evaluate(model, split, batch_size=8)
    shared = row.keys() & expected.keys() - {"seconds"}
    assert len(shared) == 13
    assert {key: row[key] for key in shared} == {key: expected[key] for key in shared}
    assert (row["mean_steps"], row["saved"], row["exits"]) == (5, 0, {"5": 17})
    assert row["seconds"] > 0


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_records_tell_what_exits_will_do(criterion, precision, answered):
    model, split = answered
    options = {"batch_size": 8, "precision": precision}
    records = record(model, split, least=2, **options)
    assert list(records) == list(CRITERIA)
    assert records[criterion].steps == (2, 3, 4, 5)
    for expected in curve(records[criterion]):  # without removal: the same batches, so the same rounding
        row = measure(Anytime(model, criterion, expected["threshold"], least=2, compact=1), split, **options)
        assert_agree(row, expected)
        assert row.keys() >= expected.keys() - {"lost", "lost_stderr"}
        assert json.loads(json.dumps(row, allow_nan=False)) == row


@pytest.mark.parametrize("criterion", CRITERIA)
def test_calibration_chooses_and_shows(criterion, answered):
    model, split = answered
    threshold, row, shown = calibrate(model, split, criterion, max_lost=0.1, every=2, batch_size=8)
    records = record(model, split, [criterion], every=2, batch_size=8)[criterion]
    assert row == choose(records, 0.1)
    assert row["threshold"] == threshold
    assert row["lost"] <= 0.1
    assert shown == curve(records)
    assert (row["every"], row["criterion"], row["solver"], row["trained_horizon"]) == (2, criterion, "plain", 5)


def test_states_that_overflow_are_wrong_and_not_sure(sharp, split):
    model = sharp("bvit_ode_rk4", field="black_box")
    model.set_horizon(150)
    records = record(model, split, least=148)
    for found in records.values():
        assert found.scores.isnan().all()
        assert not found.right.any()
    row = measure(Anytime(model, "stable", 1, least=100), split)
    assert (row["non_finite"], row["top1"], row["loss"], row["exits"]) == (17, 0, None, {"150": 17})


def test_the_model_is_left_as_it_was(answered):
    model, split = answered
    model.train()
    model.patch_embed.eval()
    before = {name: part.training for name, part in model.named_modules()}
    record(model, split)
    measure(Anytime(model, "margin", 0.5), split)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert model.horizon == 5
    assert torch.is_grad_enabled()


def test_mistakes_on_a_split_are_named(sharp, split):
    model = sharp()
    for use in (
        lambda **kwargs: record(model, split, **kwargs),
        lambda **kwargs: calibrate(model, split, **kwargs),
        lambda **kwargs: measure(Anytime(model), split, **kwargs),
    ):
        with pytest.raises(ValueError, match="precision='fp16' is unknown; known precisions: fp32, bf16"):
            use(precision="fp16")
        with pytest.raises(ValueError, match="batch_size must be >= 1; got 0"):
            use(batch_size=0)
    for use in (lambda part: record(model, part), lambda part: measure(Anytime(model), part)):
        with pytest.raises(ValueError, match="split is empty"):
            use(split[:0])
    with pytest.raises(ValueError, match="must be a RecurrentVisionTransformer"):
        record(nn.Linear(1, 1), split)
    with pytest.raises(ValueError, match="criterion='sure' is unknown"):
        record(model, split, ["sure"])
    with pytest.raises(ValueError, match="criteria is empty; known criteria: confidence"):
        record(model, split, [])
    with pytest.raises(ValueError, match="max_lost=-1 must be a number from 0 to 1"):
        calibrate(model, split, max_lost=-1)
    with pytest.raises(ValueError, match="max_lost=nan must be"):
        choose(synthetic("margin"), math.nan)
    with pytest.raises(ValueError, match="points=1 must be a whole number from 2 to 10000"):
        curve(synthetic("margin"), points=1)
    with pytest.raises(ValueError, match="margin threshold=2 must be"):
        at(synthetic("margin"), 2)


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_shows_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {name: curve(synthetic(name)) for name in CRITERIA}
    rows = [*uniform(synthetic("margin")), *(row for found in curves.values() for row in found)]
    mark = choose(synthetic("margin"), 0.1)
    (axes,) = calibration._draw_curve(rows, "a title", [mark]).axes
    lines = {line.get_label(): line for line in axes.lines}
    for name, found in curves.items():
        assert lines[name].get_xydata().tolist() == [[row["mean_NFE"], 100 * row["top1"]] for row in found]
    assert "same for all images" in lines
    places = [line.get_xydata().tolist() for line in axes.lines if line.get_color() == lines["margin"].get_color()]
    assert [[mark["mean_NFE"], 100 * mark["top1"]]] in places
    assert axes.get_title() == "a title"
    plot_curve(rows, tmp_path / "curve.png", points=[mark])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_of_the_picture_are_named(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="rows is empty"):
        plot_curve([], tmp_path / "curve.png")
    with pytest.raises(ValueError, match=r"must end in one of \.pdf, \.png, \.svg"):
        plot_curve(uniform(synthetic("margin")), tmp_path / "curve.gif")


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`evaluate` of a small model, on a CIFAR-100 of five hundred noisy images, a hundred of them to calibrate on."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8, generator=generator)
    found = Split(images, torch.arange(500) % 100)
    splits = {"train": found, "test": found[:60]}
    monkeypatch.setattr(cifar, "load", lambda root, split="train": splits[split])
    monkeypatch.setattr(calibration, "HELD_OUT", 100)
    model = timm.create_model("bvit_ds", embed_dim=16, num_heads=2)
    nn.init.normal_(model.head.weight)
    (tmp_path / "model").mkdir()
    save_for_hf(model, tmp_path / "model", safe_serialization=True)
    return SimpleNamespace(
        words=["evaluate", f"local-dir:{tmp_path / 'model'}"], model=model.eval(), splits=splits, folder=tmp_path
    )


def test_a_threshold_that_is_given_is_used(command, capsys):
    assert main([*command.words, "--anytime", "margin:0.25", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    expected = measure(Anytime(command.model, "margin", 0.25), command.splits["test"])
    assert_agree(row, expected)
    assert row.keys() >= expected.keys()
    assert (row["split"], row["calibrated_on"], row["max_lost"]) == ("test", None, None)


def test_without_a_threshold_one_is_calibrated_on_held_out_images(command, capsys):
    train = command.splits["train"]
    held = train[cifar.held_out(train.labels, 100)[1]]
    threshold = calibrate(command.model, held, "confidence").threshold
    assert main([*command.words, "--anytime", "confidence", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["threshold"] == threshold
    assert (row["calibrated_on"], row["max_lost"], row["count"]) == ("100 training images", 0.005, 60)
    assert main([*command.words, "--anytime", "confidence"]) == 0
    head, line, steps, words = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["criterion", "threshold"]
    assert line.split()[0] == "confidence"
    assert line.split()[1] == ("never" if threshold is None else f"{threshold:.9g}")
    assert steps.startswith("steps: ")
    assert words.startswith("The threshold was calibrated on 100 training images, to lose at most 0.5 points there. On")
    assert "at most 0.5 points" in words


def test_options_of_evaluate_work_with_it(command, capsys):
    picture, written = command.folder / "curve.png", command.folder / "rows.jsonl"
    options = ["--horizon", "6", "--solver", "heun2", "--limit", "20", "--precision", "bf16", "--batch-size", "7"]
    files = ["--json", str(written), "--plot", str(picture)]
    assert main([*command.words, "--anytime", "stable:2", *options, *files]) == 0
    row = json.loads(written.read_text())
    assert (row["horizon"], row["NFE"], row["solver"], row["precision"], row["count"]) == (6, 12, "heun2", "bf16", 20)
    assert row["mean_NFE"] == pytest.approx(2 * row["mean_steps"])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "stable" in capsys.readouterr().out
    assert main([*command.words, "--anytime", "stable:2", "--held-out", "100", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["split"], row["count"]) == ("held out 100", 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--anytime", "sure"], "criterion='sure' is unknown; known criteria: confidence, margin, stable, step_norm"),
        (["--anytime", ""], "criterion='' is unknown"),
        (["--anytime", "confidence:x"], "anytime='confidence:x': 'x' is not a number"),
        (["--anytime", "confidence:2"], "confidence threshold=2.0 must be a number from 0 to 1"),
        (["--anytime", "margin:0.5", "--horizon", "1,2"], "--horizon '1,2': with --anytime give one number of steps"),
        (["--anytime", "margin", "--held-out", "100"], "--held-out 100: a threshold would be calibrated on the images"),
    ],
)
def test_a_mistake_is_one_line(command, arguments, message, capsys):
    assert main([*command.words, *arguments]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_help_tells_of_it(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["evaluate", "--help"])
    assert "--anytime CRITERION[:THRESHOLD]" in capsys.readouterr().out


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def test_the_benchmark_appends_its_rows(command, monkeypatch):
    monkeypatch.setattr(benchmark, "BATCH", 16)
    out, picture = command.folder / "anytime.jsonl", command.folder / "curve.png"
    words = [command.words[1], "--data", "D", "--rounds", "2", "--out", str(out)]
    benchmark.main([*words, "--plot", str(picture)])
    found = list(benchmark_rows.read(out))
    kinds = {
        name: [row for row in found if row["benchmark"] == name] for name in sorted({r["benchmark"] for r in found})
    }
    assert list(kinds) == ["anytime", "anytime curve", "anytime time"]
    pairs = [(row["criterion"], row["max_lost"]) for row in kinds["anytime"]]
    assert pairs == [(criterion, loss) for criterion in CRITERIA for loss in benchmark.MAX_LOST]
    for row in kinds["anytime"]:
        assert row["count"] == 60
        assert row["calibrated_on"] == "100 training images"
        assert 0 <= row["saved"] < 1
    assert {row["criterion"] for row in kinds["anytime curve"]} == {*CRITERIA, "uniform"}
    plain, *others = kinds["anytime time"]
    assert (plain["subject"], plain["reference"]) == ("local-dir:model plain", None)
    assert len(others) == len(pairs)
    for row in others:
        assert row["reference"] == plain["subject"]
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    for row in found:
        assert {"date", "hardware", "versions", "commit", "command", "sha256"} <= set(row)
        assert row["command"] == "python -m benchmarks.anytime local-dir:model --data DIR --rounds 2"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = benchmark_tables.tables(found)
    for title, count in (("Early exit", len(pairs)), ("Early exit: time", len(others) + 1)):
        part = text.partition(f"### {title}, cpu\n")[2].partition("###")[0]
        assert part.count("\n| local-dir:model") == count, title
        assert "not run" not in part


def test_a_smoke_run_is_printed_not_recorded(command, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "BATCH", 8)
    monkeypatch.setattr(benchmark_rows, "RESULTS", command.folder / "results")
    benchmark.main([command.words[1], "--rounds", "1", "--limit", "10"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["benchmark"] for row in printed} == {"anytime", "anytime curve", "anytime time"}
    assert not (command.folder / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds 0: give at least 1"),
        (["--limit", "0"], "--limit 0: give at least 1"),
        (["--limit", "5", "--out", "rows.jsonl"], "--limit 5: such rows are not recorded; leave --out away"),
        (["--out", "no/such/rows.jsonl"], "there is no folder 'no/such'"),
        (["--plot", "curve.gif"], "must end in one of .pdf, .png, .svg"),
        (["--held-out", "7"], "size must be a multiple of the number of classes"),
    ],
)
def test_wrong_usage_of_the_benchmark(command, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([command.words[1], *arguments])
    assert message in capsys.readouterr().err
