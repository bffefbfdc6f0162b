"""Thresholds against a search by brute force, records against what exits do; `evaluate --anytime`."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from recurrent_vit import cifar, plots
from recurrent_vit.__main__ import main
from recurrent_vit.anytime import CRITERIA, Anytime
from recurrent_vit.augment import normalize
from recurrent_vit.calibration import (
    Records,
    at,
    calibrate,
    calibrated_on,
    choose,
    curve,
    measure,
    record,
    uniform,
    uniform_top1,
)
from recurrent_vit.cifar import Split
from recurrent_vit.evaluate import evaluate


@pytest.fixture
def split():
    return Split(torch.randint(256, (17, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (17,)))


def assert_agree(row, expected):
    """Equal in all columns that both have, but for the time and the rounding of fractions."""
    for key in row.keys() & expected.keys() - {"seconds"}:
        rounded = isinstance(expected[key], float)
        assert row[key] == (pytest.approx(expected[key]) if rounded else expected[key]), key


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


def test_the_accuracy_of_stopping_all_images_alike_is_interpolated():
    records = synthetic("margin")
    rows = {row["threshold"]: row["top1"] for row in uniform(records)}
    assert [uniform_top1(records, step) for step in rows] == pytest.approx(list(rows.values()))
    low, high, *_ = rows
    assert uniform_top1(records, (low + high) / 2) == pytest.approx((rows[low] + rows[high]) / 2)


def test_what_a_threshold_was_calibrated_on_says_whether_the_model_knows_the_images(tmp_path):
    assert calibrated_on("bvit", 5000) == calibrated_on("bvit.short_c100", 5000)
    assert calibrated_on("bvit", 5000) == "5000 training images that it was trained on"
    assert calibrated_on("local-dir:somewhere", 5000) == "5000 training images"
    for facts, told in (
        ({"images": 45_000}, "5000 training images held out"),
        ({"images": 45_001}, "5000 training images that it was trained on"),
        ({}, "5000 training images"),
    ):
        (tmp_path / "run.json").write_text(json.dumps(facts))
        assert calibrated_on(tmp_path, 5000) == told


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
    with pytest.raises(ValueError, match="points=1 must be"):
        calibrate(nn.Linear(1, 1), split, points=1)  # before it looks at anything else
    for value in (True, np.bool_(True), torch.tensor(True), bytearray(b"1")):
        with pytest.raises(ValueError, match=r"margin threshold=.* must be a number"):
            at(synthetic("margin"), value)
    with pytest.raises(ValueError, match="is unknown; known criteria"):
        calibrate(model, split, criterion=["margin"])
    with pytest.raises(ValueError, match="margin threshold=2 must be"):
        at(synthetic("margin"), 2)


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_shows_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {name: curve(synthetic(name)) for name in CRITERIA}
    rows = [*uniform(synthetic("margin")), *(row for found in curves.values() for row in found)]
    mark = choose(synthetic("margin"), 0.1)
    (axes,) = plots._draw_curve(rows, "a title", [mark]).axes
    lines = {line.get_label(): line for line in axes.lines}
    for name, found in curves.items():
        assert lines[name].get_xydata().tolist() == [[row["mean_NFE"], 100 * row["top1"]] for row in found]
    assert "same for all images" in lines
    places = [line.get_xydata().tolist() for line in axes.lines if line.get_color() == lines["margin"].get_color()]
    assert [[mark["mean_NFE"], 100 * mark["top1"]]] in places
    assert axes.get_title() == "a title"
    plots.plot_curve(rows, tmp_path / "curve.png", points=[mark])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_of_the_picture_are_named(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="rows is empty"):
        plots.plot_curve([], tmp_path / "curve.png")
    with pytest.raises(ValueError, match=r"must end in one of \.pdf, \.png, \.svg"):
        plots.plot_curve(uniform(synthetic("margin")), tmp_path / "curve.gif")


# ---- the command line ------------------------------------------------------------------------------------------------


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
