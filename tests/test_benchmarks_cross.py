"""Cross-evaluation: that the trained setting loses nothing, what each setting costs, and the error of a difference."""

import json
import statistics
from itertools import product
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch

from benchmarks import accuracy, cross, rows, tables
from recurrent_vit import augment, cifar, evaluate, runs, weights

SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10, "patch_size": 8}
MODELS = {
    "bvit": {"steps": 3},
    "bvit_ds": {"steps": 1, "stages": 3},
    "bvit_ode_euler": {"steps": 2, "step_size": 0.5},
    "bvit_ode_heun": {"steps": 2},
    "bvit_ode_rk4": {"steps": 1},
    "vit_cifar": {"depth": 2},
}
EVALUATIONS = {"euler": 1, "heun2": 2, "rk4": 4}
SUBJECT = accuracy.Subject("mine", "mine", None)
IN_EVERY_ROW = {
    *("benchmark", "subject", "horizon", "trained_horizon", "solver", "field", "step_size", "top1", "top1_stderr"),
    *("top5", "loss", "non_finite", "count", "NFE", "MACs", "parameters", "seconds", "precision", "sha256"),
    *("as_trained", "trained_solver", "trained_field", "trained_time", "lost", "lost_stderr", "agreement"),
    *("date", "device", "hardware", "versions", "commit", "dirty", "command"),
}
DATA = "/home/somebody/cifar"


@pytest.fixture
def split(monkeypatch):
    """Random images, each of a tint of its own, in place of the test images; `trained` gives them their labels."""
    images = torch.randint(128, (40, 3, 1, 1)) + torch.randint(128, (40, 3, 32, 32))
    split = cifar.Split(images.to(torch.uint8), torch.randint(10, (40,)))
    asked = []

    def load(root, part):
        asked.append((root, part))
        return split

    monkeypatch.setattr(cifar, "load", load)
    yield split
    assert set(asked) <= {(DATA, "test")}


@pytest.fixture
def trained(small, split):
    """Build a model whose steps are large, and give every second image the label that it predicts."""

    def build(name, **kwargs):
        model = small(name, **{**SMALL, **kwargs})
        with torch.no_grad():
            for parameter in model.blocks.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            torch.nn.init.normal_(model.head.weight)
            split.labels[::2] = model(augment.normalize(split.images)).argmax(1)[::2]
        return model

    return build


@pytest.fixture
def run(trained, tmp_path):
    """Make the folder of a finished run."""

    def make(architecture="bvit", folder="mine", **kwargs):
        kwargs = {**SMALL, "steps": 2, **kwargs}
        path = tmp_path / folder
        path.mkdir()
        safetensors.torch.save_file(trained(architecture, **kwargs).state_dict(), path / "model.safetensors")
        (path / "run.json").write_text(json.dumps({"name": architecture, "model_kwargs": kwargs}))
        return path

    return make


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder of results, empty."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(rows, "RESULTS", folder)
    return folder


@pytest.fixture
def checkpoints(monkeypatch):
    """Four checkpoints in place of the package's; two are the same function, and one has twelve blocks."""
    names = {"vit_cifar": "0", "bvit": "1", "bvit_ode_euler": "1", "bvit_ode_rk4": "2"}
    found = [
        SimpleNamespace(id=f"{name}.some_c100", name=name, sha256=digit * 64, metrics={"horizon": 12}, same_as="")
        for name, digit in names.items()
    ]
    found[2].same_as = found[1].id
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: found)
    return found


# ---- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kwargs"), MODELS.items())
def test_the_trained_setting_loses_nothing(name, kwargs, trained, split):
    model = trained(name, **kwargs)
    first, *others = cross.measure(SUBJECT, model, split)
    (same,) = [row for row in others if cross.is_trained_setting(row)]
    solver = "euler" if model.solver == "plain" else model.solver
    assert (same["solver"], same["step_size"]) == (solver, model.step_size)
    assert same["top1"] == first["top1"]
    assert same["loss"] == pytest.approx(first["loss"], rel=1e-4)
    for row in (first, same):
        assert (row["lost"], row["lost_stderr"], row["agreement"]) == (0, 0, 1), row
    assert min(row["agreement"] for row in others) < 1, "the settings differ, or the test sees nothing"


def test_the_first_row_is_the_checkpoint_as_trained(trained, split):
    model = trained("bvit_ds", steps=2, stages=2, horizon=7)
    first, *others = cross.measure(SUBJECT, model, split)
    (expected,) = evaluate.evaluate(model, split, horizons=[4])
    same = expected.keys() - {"seconds", "loss"}
    assert {key: first[key] for key in same} == {key: expected[key] for key in same}
    assert [row["as_trained"] for row in (first, *others)] == [True, *[False] * len(others)]
    for row in (first, *others):
        assert (row["trained_solver"], row["trained_time"], row["trained_horizon"]) == ("plain", 4, 4)


@pytest.mark.parametrize(
    ("name", "kwargs", "time"), [("bvit_ode_heun", {"steps": 2}, 2), ("bvit", {"steps": 3}, 3), ("bvit_ode_rk4", {}, 3)]
)
def test_steps_fill_the_trained_time_and_cost_their_evaluations(name, kwargs, time, trained, split):
    _, *others = cross.measure(SUBJECT, trained(name, **kwargs), split[:3])
    settings = [(row["solver"], row["step_size"], row["horizon"]) for row in others]
    assert settings == [(solver, size, time / size) for solver, size in product(EVALUATIONS, (1, 0.5, 0.25))]
    for row in others:
        assert row["NFE"] == row["horizon"] * EVALUATIONS[row["solver"]]
        assert (row["field"], row["trained_time"], row["count"]) == ("state_subtracted", time, 3)


def test_the_accuracy_lost_is_the_difference_of_the_rows(trained, split):
    first, *others = cross.measure(SUBJECT, trained("bvit", steps=3), split, batch_size=16)
    for row in others:
        assert row["lost"] == pytest.approx(first["top1"] - row["top1"]), row
    assert len({row["top1"] for row in others}) > 1, "the settings differ, or the test sees nothing"


def test_a_checkpoint_of_the_other_field_is_compared_with_itself(trained, split):
    model = trained("bvit_ode_euler", steps=2, field="black_box")
    first, *others = cross.measure(SUBJECT, model, split)
    assert (first["field"], first["agreement"]) == ("black_box", 1)
    assert {(row["field"], row["trained_field"]) for row in others} == {("state_subtracted", "black_box")}
    assert not any(cross.is_trained_setting(row) for row in others)


def test_a_time_without_whole_steps_is_refused():
    assert {size for _, size, _ in cross.settings(2.25)} == {0.25}
    assert {steps for _, _, steps in cross.settings(0.1 * 3 * 10 / 3)} == {1, 2, 4}, "but for the rounding it is 1"
    for time in (0.1, 12.1):
        with pytest.raises(ValueError, match=f"time of {time} is no whole number of steps of any size among 1, 1/2, 1"):
            cross.settings(time)


# ---- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [7, 250])
@pytest.mark.parametrize("steps", [1, 5])
def test_classes_are_those_of_the_forward_pass(steps, batch_size, trained, split):
    model = trained("bvit_ode_rk4", steps=2, step_size=0.5)
    row, classes = cross.predict(model, split, steps, batch_size)
    twin = evaluate.rebuild(model)
    twin.set_horizon(steps)
    with torch.no_grad():
        expected = twin(augment.normalize(split.images)).argmax(1)
    assert torch.equal(classes, expected)
    assert row["top1"] == pytest.approx((classes == split.labels).double().mean().item())
    assert row["horizon"] == steps
    assert len(set(classes.tolist())) > 1, "the images differ, or the test sees nothing"


def test_the_model_keeps_no_hook(trained, split, monkeypatch):
    model = trained("bvit", steps=1)
    cross.predict(model, split, 1)
    monkeypatch.setattr(model.blocks[0], "forward", None)
    with pytest.raises(TypeError):
        cross.predict(model, split, 1)
    assert not model.norm._forward_pre_hooks
    assert not model.head._forward_hooks


def test_images_without_finite_logits_have_no_class(trained, split):
    model = trained("bvit_ode_rk4", steps=1, field="black_box")
    row, classes = cross.predict(model, split, 150)
    assert row["non_finite"] == len(split)
    assert classes.tolist() == [-1] * len(split)


def test_images_whose_state_overflows_have_no_class(trained, split, monkeypatch):
    model = trained("bvit", steps=1)
    monkeypatch.setattr(evaluate, "overflows", lambda z: torch.arange(len(z)) == 1)
    row, classes = cross.predict(model, split, 1, batch_size=20)
    assert row["non_finite"] == 2
    assert (classes == -1).nonzero().flatten().tolist() == [1, 21]


def test_a_lost_logit_is_no_class(trained, split):
    model = trained("bvit", steps=1)
    with torch.no_grad():
        model.head.bias[3] = torch.inf
    row, classes = cross.predict(model, split, 1)
    assert row["non_finite"] == len(split)
    assert set(classes.tolist()) == {-1}


# ---- the paired difference -------------------------------------------------------------------------------------------


def test_the_error_of_a_difference_is_that_of_its_terms():
    count = 300
    labels, wrong = torch.randint(7, (count,)), torch.randint(-1, 7, (2, count))
    reference, classes = (
        labels.where(torch.rand(count) < share, other) for share, other in zip((0.6, 0.4), wrong, strict=True)
    )
    row = cross.paired(classes, reference, labels)
    triples = list(zip(classes.tolist(), reference.tolist(), labels.tolist(), strict=True))
    differences = [(theirs == label) - (ours == label) for ours, theirs, label in triples]
    assert set(differences) == {-1, 0, 1}
    assert row["lost"] == pytest.approx(statistics.fmean(differences))
    assert row["lost_stderr"] == pytest.approx(statistics.pstdev(differences) / count**0.5)
    assert row["agreement"] == pytest.approx(sum(ours == theirs != -1 for ours, theirs, _ in triples) / count)
    worse, better = differences.count(1), differences.count(-1)
    closed_form = (worse + better - (worse - better) ** 2 / count) ** 0.5 / count
    assert row["lost_stderr"] == pytest.approx(closed_form)


def test_images_without_a_class_are_not_alike():
    none = torch.tensor([-1, -1])
    row = cross.paired(none, none, torch.tensor([0, 1]))
    assert (row["lost"], row["lost_stderr"], row["agreement"]) == (0, 0, 0)


# ---- recorded or not -------------------------------------------------------------------------------------------------


def test_rows_are_recorded_without_a_path_of_this_machine(run, split, tmp_path):
    folder, out = run(), tmp_path / "rows.jsonl"
    cross.main([str(folder), f"--data={DATA}", "--limit", "20", "--batch-size=8", "--out", str(out)])
    text, measured = out.read_text(), list(rows.read(out))
    assert len(measured) == 1 + len(cross.SOLVERS) * len(cross.STEP_SIZES)
    for row in measured:
        assert set(row) >= IN_EVERY_ROW
        assert (row["benchmark"], row["subject"], row["device"], row["count"]) == ("cross", "mine", "cpu", 20)
        assert row["sha256"] == weights.sha256(folder / "model.safetensors")
        assert row["command"] == "python -m benchmarks.cross mine --data DIR --batch-size 8 --limit 20"
    assert str(tmp_path) not in text
    assert DATA not in text
    again = list(cross.measure(SUBJECT, runs.load_result(folder), cifar.sample(split, 20), batch_size=8))
    for key in ("top1", "lost", "lost_stderr", "agreement", "NFE"):
        assert [row[key] for row in measured] == [row[key] for row in again], key


def test_the_shortest_command_is_recorded_where_nothing_was_chosen(checkpoints, split, results, monkeypatch):
    monkeypatch.setattr(accuracy, "load", lambda subject: timm.create_model("bvit", **SMALL, steps=1))
    monkeypatch.setattr(cross, "measure", lambda *_, **__: [a_row()])
    cross.main(["--data", DATA])
    commands = {row["command"] for row in rows.read(results / "cross.jsonl")}
    assert commands == {"python -m benchmarks.cross --data DIR"}


def test_weights_are_evaluated_once_and_several_blocks_on_demand(checkpoints, split, results, monkeypatch):
    loaded = []

    def load(subject):
        loaded.append(subject.source)
        return timm.create_model("bvit", **SMALL, steps=1)

    monkeypatch.setattr(accuracy, "load", load)
    monkeypatch.setattr(cross, "measure", lambda *_, **__: [a_row()])
    cross.main(["--data", DATA])
    assert loaded == ["bvit.some_c100", "bvit_ode_rk4.some_c100"]
    cross.main(["vit_cifar", "bvit_ode_euler", "--data", DATA])
    assert loaded[2:] == ["vit_cifar.some_c100", "bvit_ode_euler.some_c100"]


def test_a_run_that_fails_has_recorded_whole_checkpoints_only(run, split, results, monkeypatch):
    names, real = [str(run(folder=name)) for name in ("one", "two")], cross.measure

    def measure(subject, *arguments, **options):
        for row in real(subject, *arguments, **options):
            yield row
            if subject.name == "two":
                raise RuntimeError("out of memory")

    monkeypatch.setattr(cross, "measure", measure)
    with pytest.raises(RuntimeError, match="out of memory"):
        cross.main([*names, "--data", DATA, "--limit", "4"])
    assert [row["subject"] for row in rows.read(results / "cross.jsonl")] == ["one"] * 10


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resnet18"], "NAME 'resnet18' has no checkpoint; there are vit_cifar.some_c100, bvit.some_c100"),
        (["bvit", "bvit.some_c100"], "NAME: bvit.some_c100 is there twice"),
        (["--limit", "0"], "--limit 0: give at least 1"),
        (["--batch-size", "0"], "--batch-size 0: give at least 1"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device"),
        (["--out", "no/such/rows.jsonl"], "--out 'no/such/rows.jsonl': there is no folder 'no/such'"),
        (["--plot", "cross.gif"], "plot 'cross.gif' must end in one of .pdf, .png, .svg"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(argv, message, checkpoints, split, results, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cross, "measure", None)
    with pytest.raises(SystemExit, match="2"):
        cross.main([*argv, "--data", DATA])
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_told_before_anything_runs(run, split, results, capsys, monkeypatch):
    monkeypatch.setattr(cross, "measure", None)
    good, odd = str(run(folder="good")), str(run("bvit_ode_euler", folder="odd", step_size=0.3))
    with pytest.raises(SystemExit, match="2"):
        cross.main([good, odd, "--data", DATA])
    assert "odd: the trained time of 0.6 is no whole number of steps" in capsys.readouterr().err
    split.labels[3] = 10
    with pytest.raises(SystemExit, match="2"):
        cross.main([good, "--data", DATA])
    told = capsys.readouterr().err
    assert "good: split has labels from" in told
    assert "to 10, the model num_classes=10" in told
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: [])
    with pytest.raises(SystemExit, match="2"):
        cross.main(["--data", DATA])
    assert "NAME is missing, and the package has no checkpoints of one block" in capsys.readouterr().err


# ---- the table -------------------------------------------------------------------------------------------------------


def a_row(**kwargs):
    """A row of the benchmark: that of Euler with the step size of the training."""
    return {
        "benchmark": "cross", "subject": "bvit.some_c100", "as_trained": False,
        "horizon": 12, "trained_horizon": 12, "precision": "fp32", "solver": "euler", "field": "state_subtracted",
        "step_size": 1.0, "top1": 0.5, "top1_stderr": 0.011, "top5": 0.75, "loss": 1.5, "non_finite": 0, "count": 2000,
        "NFE": 12, "MACs": 633_104_384, "parameters": 882_276, "seconds": 9.0,
        "lost": 0.0, "lost_stderr": 0.0, "agreement": 1.0,
        "trained_solver": "plain", "trained_field": "state_subtracted", "trained_time": 12.0, "sha256": None,
        "date": "2030-01-02T03:04:05+00:00", "device": "cpu",
        "hardware": {"cpu": "A processor", "cores": 2, "threads": 1, "gpu": None},
        "versions": {"python": "3.11.2"}, "commit": None, "dirty": None, "command": "python -m benchmarks.cross",
        **kwargs,
    }  # fmt: skip


def some_rows():
    """Rows of two checkpoints, not all of them."""
    heun = {"trained_solver": "heun2", "trained_horizon": 6, "trained_time": 6.0, "subject": "runs/mine"}
    return [
        a_row(top1=0.1),  # measured again below
        a_row(as_trained=True, solver="plain"),
        a_row(),
        a_row(step_size=0.5, horizon=24, NFE=24, top1=0.48, lost=0.02, lost_stderr=0.004, agreement=0.9),
        a_row(solver="heun2", step_size=0.25, horizon=48, NFE=96, top1=0.25, non_finite=3, lost=0.25, lost_stderr=0.01),
        a_row(**heun, solver="heun2", as_trained=True, horizon=6),
        a_row(**heun, solver="heun2", horizon=6, count=50, top1=0.6, top1_stderr=0.07),
    ]


def lines_of(text, title):
    """The lines of one table, its head first."""
    part = text.split(f"### {title}\n")[1].split("### ")[0]
    head, _, *lines = (line for line in part.splitlines() if line.startswith("|"))
    return [head, *lines]


def test_checkpoints_with_rows_have_a_line_for_each_solver():
    text = tables.tables(some_rows())
    none, sizes = " not run |", " step size 1 | step size 1/2 | step size 1/4 |"
    euler = " 12 | **50.00 ± 1.10 (lost 0.00 ± 0.00)** | 48.00 ± 1.10 (lost 2.00 ± 0.40) |"
    heun = " **60.00 ± 7.00 (lost 0.00 ± 0.00)** |"
    assert lines_of(text, "Cross-evaluation, cpu") == [
        "| subject | trained solver | count | solver | NFE at step size 1 |" + sizes,
        "| bvit.some_c100 | plain | 2000 | euler |" + euler + none,
        "| bvit.some_c100 | plain | 2000 | heun2 |" + 3 * none + " 25.00 ± 1.10 (3 not finite) (lost 25.00 ± 1.00) |",
        "| bvit.some_c100 | plain | 2000 | rk4 |" + 4 * none,
        *(f"| runs/mine | heun2 | 2000 | {solver} |" + 4 * none for solver in cross.SOLVERS),
        "| runs/mine | heun2 | 50 | euler |" + 4 * none,
        "| runs/mine | heun2 | 50 | heun2 | 12 |" + heun + 2 * none,
        "| runs/mine | heun2 | 50 | rk4 |" + 4 * none,
    ]
    source = "- 2030-01-02; A processor, 2 cores, 1 threads; python 3.11.2; no commit; `python -m benchmarks.cross`"
    assert text.count(source) == 1


def test_without_rows_there_is_no_table():
    other = {"benchmark": "accuracy of something else", "device": "cpu"}
    assert "Cross-evaluation" not in tables.tables([])
    assert tables.tables([other]) == tables.tables([])


def test_each_device_has_a_table_of_its_own():
    text = tables.tables([a_row(device="cuda")])
    assert "### Cross-evaluation, cpu" not in text
    assert lines_of(text, "Cross-evaluation, cuda")[1].startswith("| bvit.some_c100 | plain | 2000 | euler | 12 | **50")


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_panels_have_the_latest_rows():
    found = cross.panels([{"benchmark": "accuracy"}, *some_rows()])
    assert {title: len(panel) for title, panel in found.items()} == {
        "bvit.some_c100, 2,000 images": 4,
        "runs/mine, 2,000 images": 1,
        "runs/mine, 50 images": 1,
    }
    assert 0.1 not in [row["top1"] for panel in found.values() for row in panel]
    assert list(cross.panels([a_row(), a_row(device="cuda")])) == ["bvit.some_c100, cpu", "bvit.some_c100, cuda"]
    assert cross.panels([]) == {}


def test_the_picture_shows_the_rows():
    pytest.importorskip("matplotlib")
    *most, last = some_rows()
    first, second = cross.draw(cross.panels([*most, {**last, "count": 2000}])).axes
    curves = {part.get_label(): part.lines[0].get_xydata().tolist() for part in first.containers}
    assert curves == {"euler": [[0.5, 48], [1, 50]], "heun2": [[0.25, 25]]}
    bars = first.containers[0].lines[2][0].get_segments()
    assert [high - low for (_, low), (_, high) in bars] == pytest.approx([2.2, 2.2])
    for axes, as_trained, setting in ((first, 50, [1, 50]), (second, 50, [1, 60])):
        (line,) = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert list(line.get_ydata()) == [as_trained, as_trained]
        rings = [line.get_xydata().tolist() for line in axes.lines if line.get_fillstyle() == "none"]
        assert [ring for ring in rings if ring] == [[setting]]
        assert {tick.get_text() for tick in axes.get_xticklabels()} == {"1", "1/2", "1/4"}
    crosses = [line.get_xydata().tolist() for line in first.lines if line.get_marker() == "X"]
    assert [place for place in crosses if place] == [[[0.25, 25]]]
    labels = {text.get_text() for text in first.get_legend().get_texts()}
    assert labels == {"euler", "heun2", "as trained", "trained setting", "some outputs not finite"}
    assert [axes.get_title() for axes in (first, second)] == ["bvit.some_c100", "runs/mine"]


def test_plot_draws_all_rows_of_the_file(run, split, results, tmp_path):
    pytest.importorskip("matplotlib")
    rows.append(results / "cross.jsonl", some_rows())
    path = tmp_path / "cross.svg"
    cross.main([str(run()), "--data", DATA, "--limit", "4", "--plot", str(path)])
    assert path.read_bytes().startswith(b"<?xml")
    assert {row["subject"] for row in rows.read(results / "cross.jsonl")} == {"bvit.some_c100", "runs/mine", "mine"}
    with pytest.raises(ValueError, match=r"no rows of cross-evaluation to draw; run python -m benchmarks\.cross first"):
        cross.plot([{"benchmark": "accuracy"}], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
