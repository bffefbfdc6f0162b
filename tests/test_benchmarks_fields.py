"""The control of the field: what is planned, what a run is, what is not trained twice, and the table of it."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import timm
import torch

from benchmarks import fields, rows, tables
from recurrent_vit import cifar, evaluate, runs, train
from recurrent_vit.limits import FIELDS
from recurrent_vit.recipes import RECIPES, Phase

TINY = {"embed_dim": 16, "num_heads": 2, "num_classes": 4}
RECIPE = replace(
    RECIPES["short"],
    name="tiny",
    phases=(
        Phase(0.5, 16, Fraction(1, 2), batch_size=8, micro_batch=4, padding=2),
        Phase(0.5, 32, Fraction(1), batch_size=4, micro_batch=4, padding=4, ema=True),
    ),
)
PFLOP = 1e-6  # some ten updates of the tiny model
NAME = "bvit_ode_heun"
DATA = "/home/somebody/cifar"


def pictures(count=40):
    """Noise in four shades of grey, the shade being the class."""
    labels = torch.arange(count) % 4
    noise = torch.randint(64, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return cifar.Split(noise + (64 * labels).to(torch.uint8)[:, None, None, None], labels)


@pytest.fixture
def tiny(monkeypatch):
    """One variant, one seed, small models, a small recipe."""
    pytest.importorskip("matplotlib")
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **kwargs: create(name, **{**TINY, **kwargs}))
    for name, value in {"RECIPE": RECIPE, "NAMES": (NAME,), "SEEDS": (0,)}.items():
        monkeypatch.setattr(fields, name, value)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: True)  # it would outlast the test


@pytest.fixture
def data(monkeypatch):
    """Few images in place of the training images."""
    asked = []

    def load(root, part):
        asked.append((root, part))
        return pictures()

    monkeypatch.setattr(cifar, "load", load)
    yield
    assert set(asked) <= {(DATA, "train")}


# ---- the runs --------------------------------------------------------------------------------------------------------


def test_every_variant_is_trained_by_both_fields_seed_after_seed():
    planned = fields.plan()
    assert {run[:3] for run in planned} == set(product(fields.NAMES, FIELDS, fields.SEEDS))
    assert [run.seed for run in planned] == 6 * [0] + 6 * [1]
    assert {run.pflop for run in planned} == {0.12}
    assert len({run.folder for run in (*planned, *fields.plan(1.0))}) == 24


def test_what_has_a_row_is_not_trained_again():
    planned = fields.plan()
    done = [a_row(subject=run.name, field=run.field, seed=run.seed) for run in planned[:3]]
    other = {"benchmark": "accuracy", "subject": planned[3].name}
    assert fields.remaining(planned, [*done, other, a_row(seed=7)]) == planned[3:]
    assert fields.remaining(fields.plan(1.0), done) == fields.plan(1.0)
    assert fields.remaining(planned, []) == planned


def test_a_run_is_measured_on_what_it_was_not_trained_on(tiny, tmp_path):
    run, split = fields.Run(NAME, "black_box", 1, PFLOP), pictures()
    row = fields.measure(run, split, tmp_path / "run")
    rest, kept = cifar.held_out(split.labels, 4)
    model = runs.load_result(tmp_path / "run")
    assert (model.field, model.solver) == ("black_box", "heun2")
    (expected,) = evaluate.evaluate(model, split[kept])
    same = expected.keys() - {"seconds"}
    assert {key: row[key] for key in same} == {key: expected[key] for key in same}
    begin = {"benchmark": "fields", "subject": NAME, "seed": 1, "pflop": PFLOP, "split": "held out 4"}
    assert {key: row[key] for key in begin} == begin
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["images"], facts["seed"], facts["recipe"]) == (len(rest), 1, "tiny")
    assert facts["pflop"] == pytest.approx(PFLOP, rel=0.5)


def test_a_run_that_has_ended_is_measured_again_and_no_other_is_taken_for_it(tiny, tmp_path, monkeypatch):
    run = fields.Run(NAME, "state_subtracted", 0, PFLOP)
    first = fields.measure(run, pictures(), tmp_path / "run")
    monkeypatch.setattr(train, "fit", None)
    again = fields.measure(run, pictures(), tmp_path / "run")
    assert {**again, "seconds": first["seconds"]} == first
    changes = {"name": {"name": "bvit_ode_euler"}, "model_kwargs": {"field": "black_box"}, "seed": {"seed": 1}}
    for key, change in {**changes, "pflop": {"pflop": 2 * PFLOP}}.items():
        with pytest.raises(ValueError, match=f"run holds another run: its {key} is .*, asked for is "):
            fields.measure(run._replace(**change), pictures(), tmp_path / "run")


# ---- the program -----------------------------------------------------------------------------------------------------


def test_the_same_command_goes_on(tiny, data, tmp_path, monkeypatch, capsys):
    out, folder = tmp_path / "fields.jsonl", tmp_path / "runs"
    words = ["--data", DATA, "--runs", str(folder), "--out", str(out), "--pflop"]
    fields.main([*words, str(PFLOP)])
    text, measured = out.read_text(), list(rows.read(out))
    assert [(row["subject"], row["field"], row["seed"]) for row in measured] == [(NAME, field, 0) for field in FIELDS]
    for row in measured:
        assert {"date", "device", "hardware", "versions", "commit", "dirty", "command"} <= row.keys()
        assert row["command"] == "python -m benchmarks.fields --data DIR --pflop 1e-06"
        assert (row["split"], row["count"], row["device"]) == ("held out 4", 4, "cpu")
    assert str(tmp_path) not in text
    assert DATA not in text
    assert {path.name for path in folder.iterdir()} == {run.folder for run in fields.plan(PFLOP)}
    assert "2 of 2: bvit_ode_heun, black_box, seed 0" in capsys.readouterr().err

    trained = []

    def measure(run, split, place):
        trained.append((run, place))
        return a_row(subject=run.name, field=run.field, seed=run.seed, pflop=run.pflop)

    monkeypatch.setattr(fields, "measure", measure)
    fields.main([*words, str(PFLOP)])
    assert (trained, out.read_text()) == ([], text)
    fields.main([*words, str(2 * PFLOP)])  # other runs
    assert trained == [(run, folder / run.folder) for run in fields.plan(2 * PFLOP)]
    assert not any((folder / run.folder).exists() for run, _ in trained)
    trained.clear()
    fields.main([*words, str(2 * PFLOP)])
    assert trained == []


def test_the_shortest_command_is_recorded_where_nothing_was_chosen():
    assert fields.command(fields._parser().parse_args([])) == "python -m benchmarks.fields --data DIR"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pflop", "0"], "--pflop 0: pflop=0.0 must be a number above 0"),
        (["--pflop", "nan"], "--pflop nan: pflop=nan must be a number above 0"),
        (["--pflop", "1e-12"], "has no whole update of 8 images"),
        (["--out", "no/such/rows.jsonl"], "--out 'no/such/rows.jsonl': there is no folder 'no/such'"),
        (["--runs", __file__], "File exists"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(argv, message, tiny, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fields, "measure", None)
    given = ["--data", DATA, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit, match="2"):
        fields.main([*given, *argv])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_missing_data_are_told(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    given = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit, match="2"):
        fields.main(["--data", str(tmp_path / "none"), *given])
    assert f"CIFAR-100 (train) was not found in {tmp_path / 'none'}" in capsys.readouterr().err


# ---- the table -------------------------------------------------------------------------------------------------------


def a_row(**kwargs):
    """A row of the benchmark."""
    return {
        "benchmark": "fields", "subject": "bvit_ode_euler", "seed": 0, "pflop": 0.12, "split": "held out 5000",
        "horizon": 12, "trained_horizon": 12, "precision": "fp32", "solver": "euler", "field": "state_subtracted",
        "step_size": 1.0, "top1": 0.5, "top1_stderr": 0.007, "top5": 0.75, "loss": 1.5, "non_finite": 0, "count": 5000,
        "NFE": 12, "MACs": 633_103_360, "parameters": 849_348, "seconds": 9.0,
        "date": "2030-01-02T03:04:05+00:00", "device": "cpu",
        "hardware": {"cpu": "A processor", "cores": 2, "threads": 1, "gpu": None},
        "versions": {"python": "3.11.2"}, "commit": None, "dirty": None, "command": "python -m benchmarks.fields",
        **kwargs,
    }  # fmt: skip


def some_rows():
    return [
        a_row(top1=0.1),  # measured again below
        a_row(),
        a_row(seed=1, top1=0.52),
        a_row(field="black_box", top1=0.25, non_finite=3),
        a_row(field="black_box", seed=1, top1=0.24),
        a_row(subject="bvit_ode_rk4", seed=1),
    ]


def lines_of(text, title):
    """The lines of one table, its head first."""
    part = text.split(f"### {title}\n")[1].split("### ")[0]
    head, _, *lines = (line for line in part.splitlines() if line.startswith("|"))
    return [head, *lines]


def test_every_variant_has_a_line_for_each_field():
    text = tables.tables(some_rows())
    none = " not run |"
    assert lines_of(text, "Control of the field, cpu") == [
        "| pflop | subject | field | NFE | seed 0 | seed 1 | mean | state_subtracted - black_box (min to max) |",
        "| 0.12 | bvit_ode_euler | state_subtracted | 12 | 50.00 ± 0.70 | 52.00 ± 0.70 | 51.00 "
        "| +26.50 (+25.00 to +28.00) |",
        "| 0.12 | bvit_ode_euler | black_box | 12 | 25.00 ± 0.70 (3 not finite) | 24.00 ± 0.70 | 24.50 |  |",
        "| 0.12 | bvit_ode_heun | state_subtracted |" + 5 * none,
        "| 0.12 | bvit_ode_heun | black_box |" + 5 * none,
        "| 0.12 | bvit_ode_rk4 | state_subtracted | 12 |" + none + " 50.00 ± 0.70 | 50.00 |" + none,
        "| 0.12 | bvit_ode_rk4 | black_box |" + 5 * none,
    ]
    source = "- 2030-01-02; A processor, 2 cores, 1 threads; python 3.11.2; no commit; `python -m benchmarks.fields`"
    assert text.count(source) == 1


def test_budgets_are_lines_and_devices_tables_of_their_own():
    text = tables.tables([a_row(), a_row(pflop=1.0, top1=0.75), a_row(device="cuda", field="black_box", top1=0.25)])
    _, *lines = lines_of(text, "Control of the field, cpu")
    assert [line.split(" | ")[0] for line in lines] == 6 * ["| 0.12"] + 6 * ["| 1.0"]
    assert lines[6] == "| 1.0 | bvit_ode_euler | state_subtracted | 12 | 75.00 ± 0.70 | not run | 75.00 | not run |"
    first, second, *_ = lines_of(text, "Control of the field, cuda")[1:]
    assert first == "| 0.12 | bvit_ode_euler | state_subtracted |" + 5 * " not run |"
    assert second == "| 0.12 | bvit_ode_euler | black_box | 12 | 25.00 ± 0.70 | not run | 25.00 |  |"


def test_without_rows_there_is_no_table():
    assert "Control of the field" not in tables.tables([])
