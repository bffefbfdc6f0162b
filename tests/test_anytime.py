"""Early exit against a loop over single images."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import recurrent_vit
from recurrent_vit.anytime import CRITERIA, Anytime, Look, is_sound, parse
from recurrent_vit.limits import PLAIN

SOLVERS = [PLAIN, *recurrent_vit.TABLEAUS]
SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10}


@pytest.fixture
def images():
    return torch.randn(12, 3, 32, 32)


@torch.no_grad()
def run(anytime, images):
    return anytime(images)


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


def test_compiled_blocks_follow_the_batch_as_it_shrinks(exits):
    """As the docstring advises: with dynamic=True. The backend runs the graph as it is, and counts."""
    model, images, threshold = exits
    anytime, graphs = Anytime(model, "confidence", threshold, compact=0), []
    expected = run(anytime, images)
    assert len(expected.steps.unique()) > 2, "the batch shrinks more than once, or the test sees nothing"

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in model.blocks:
        block.compile(dynamic=True, fullgraph=True, backend=backend)
    found = run(anytime, images)
    assert torch.equal(found.steps, expected.steps)
    torch.testing.assert_close(found.logits, expected.logits)
    sizes = {int((expected.steps >= step).sum()) for step in expected.steps.unique()}
    assert len(graphs) <= 3 < len(sizes), "the initial state has other strides, a batch of one is another graph"


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
