"""Recipes are data: what the protocol fixes, what a budget comes to, how the learning rate runs over the compute."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import timm

from recurrent_vit.augment import Augmentation
from recurrent_vit.recipes import RECIPES, make_plan, schedule_arguments

IMAGES = 50_000


def gflop(evaluations, tokens, width=256, gate=688):
    """A training image by hand: three passes, two FLOP a MAC; projections, gate, attention."""
    return 3 * evaluations * tokens * (2 * (4 * width**2 + 3 * width * gate) + 4 * tokens * width) / 1e9


def test_the_paper_recipe_is_the_protocol():
    recipe = RECIPES["paper"]
    [leg] = make_plan("bvit", recipe, IMAGES)
    assert leg.updates == 200 * 50_000 // 128
    assert leg.phase.batch_size == 128
    assert leg.model_args == {"depth": 1, "steps": 12, "stages": 1}
    assert (recipe.adamw_lr, recipe.weight_decay, recipe.dropout) == (1e-3, 0.05, 0.1)
    assert (recipe.ema_decay, recipe.publish, leg.phase.ema) == (0.999, "ema", True)
    assert (recipe.label_smoothing, recipe.muon_lr) == (0.0, 0.0)
    assert leg.flop == pytest.approx(38e15, rel=0.01)


@pytest.mark.parametrize("pflop", [0.12, 1.5])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_plan_spends_its_budget(name, recipe, pflop):
    plan = make_plan(name, recipe, IMAGES, pflop)
    assert sum(leg.flop for leg in plan) == pytest.approx(pflop * 1e15, rel=0.01)
    for leg, phase, before in zip(plan, recipe.phases, [None, *plan]):
        assert leg.flop == pytest.approx(phase.share * pflop * 1e15, rel=0.02)
        assert leg.spent == (before.spent + before.flop if before else 0)


def test_the_cost_of_an_image_is_the_formula():
    plan = make_plan("bvit", RECIPES["short"], IMAGES)
    for leg, (evaluations, tokens) in zip(plan, [(3, 16), (3, 25), (6, 36), (12, 64)], strict=True):
        assert leg.flop_per_image / 1e9 == pytest.approx(gflop(evaluations, tokens), rel=0.03)


def test_no_epoch_is_used_twice():
    plan = make_plan("bvit", RECIPES["short"], IMAGES)
    for leg, following in pairwise(plan):
        assert leg.first_epoch + (leg.updates - 1) // leg.per_epoch < following.first_epoch


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_cifar", [(3, 1, 1), (3, 1, 1), (6, 1, 1), (12, 1, 1)]),
        ("bvit", [(1, 3, 1), (1, 3, 1), (1, 6, 1), (1, 12, 1)]),
        ("bvit_ode_euler", [(1, 3, 1), (1, 3, 1), (1, 6, 1), (1, 12, 1)]),
        ("bvit_ode_heun", [(1, 2, 1), (1, 2, 1), (1, 3, 1), (1, 6, 1)]),
        ("bvit_ode_rk4", [(1, 1, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)]),
        ("bvit_ds", [(1, 3, 1), (1, 3, 1), (1, 3, 2), (1, 3, 4)]),
    ],
)
def test_the_schedule_of_depth_steps_and_stages(name, expected):
    plan = make_plan(name, RECIPES["short"], IMAGES)
    assert [tuple(leg.model_args[key] for key in ("depth", "steps", "stages")) for leg in plan] == expected
    full = timm.create_model(name, device="meta")
    assert schedule_arguments(full, Fraction(1)) == dict(zip(("depth", "steps", "stages"), expected[-1]))


def test_an_ode_covers_the_same_time_in_every_leg_but_the_last_which_has_the_models_own_step():
    plan = make_plan("bvit_ode_euler", RECIPES["short"], IMAGES, step_size=0.5)
    assert [leg.model_args["steps"] * leg.model_args["step_size"] for leg in plan[:-1]] == [1.5, 1.5, 1.5]
    assert plan[-1].model_args["step_size"] == 0.5


def test_the_learning_rate_over_the_compute():
    short, paper = RECIPES["short"], RECIPES["paper"]
    assert [short.learning_rate(p) for p in (0, 0.03, 0.449, 1)] == pytest.approx([0, 1, 1, 0])
    assert short.learning_rate(0.725) == pytest.approx(0.5)
    assert [paper.learning_rate(p) for p in (0.0125, 0.025, 1)] == pytest.approx([0.5, 1, 0], abs=1e-12)
    assert paper.learning_rate(0.025 + 0.975 / 2) == pytest.approx(0.5)


@pytest.mark.parametrize("pflop", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_budget_that_is_none_is_refused(pflop):
    with pytest.raises(ValueError, match=r"pflop=.* must be a number above 0, at most 1,000,000"):
        make_plan("bvit", RECIPES["short"], IMAGES, pflop)


def test_a_budget_too_small_for_a_phase_names_it():
    with pytest.raises(ValueError, match="the phase at 16 px has no whole update of 256 images"):
        make_plan("bvit", RECIPES["short"], IMAGES, 1e-6)
    with pytest.raises(ValueError, match="100 images: the phase at 16 px has no whole update"):
        make_plan("bvit", RECIPES["short"], 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phases": RECIPES["short"].phases[:2]}, "shares of its phases must add up to 1"),
        ({"epochs": 3.0}, "give pflop or epochs, one of them"),
        ({"pflop": None}, "give pflop or epochs, one of them"),
        ({"publish": "ema", "phases": (replace(RECIPES["paper"].phases[0], ema=False),)}, "needs an average"),
    ],
)
def test_an_inconsistent_recipe_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RECIPES["short"], **change)


def test_the_recipes_ask_for_the_pictures_and_settings_of_their_text():
    short, paper = RECIPES["short"], RECIPES["paper"]
    assert [short.augmentation(phase) for phase in short.phases] == [
        Augmentation(padding=padding, flip="alternating", size=size)
        for padding, size in zip((2, 2, 2, 4), (16, 20, 24, 32))
    ]
    assert [paper.augmentation(phase) for phase in paper.phases] == [Augmentation(padding=4, flip="random", size=32)]
    assert (short.clip, short.betas, short.label_smoothing, short.whiten, short.head_scale) == (
        1.0, (0.9, 0.95), 0.1, True, 0.1
    )  # fmt: skip
    assert (short.ema_decay, short.ema_warmup, short.publish, short.dropout) == (0.99, True, "raw", 0.0)
    assert (paper.clip, paper.betas, paper.whiten, paper.head_scale, paper.ema_warmup) == (
        None, (0.9, 0.999), False, 1.0, False
    )  # fmt: skip
