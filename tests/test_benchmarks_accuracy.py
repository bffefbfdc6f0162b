"""The accuracy benchmark: rows as `evaluate` gives them, where they go, and what tables and picture make of them."""

import json
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch

from benchmarks import accuracy, figures, rows, tables
from recurrent_vit import cifar, runs, weights
from recurrent_vit.evaluate import evaluate

SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10}
IN_EVERY_ROW = {
    *("benchmark", "subject", "horizon", "trained_horizon", "solver", "field", "step_size", "top1", "top1_stderr"),
    *("top5", "loss", "non_finite", "count", "NFE", "MACs", "parameters", "seconds", "precision", "sha256"),
    *("date", "device", "hardware", "versions", "commit", "dirty", "command"),
}
DATA = "/home/somebody/cifar"


@pytest.fixture
def split(monkeypatch):
    """Random images in place of the test images."""
    split = cifar.Split(torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (40,)))
    asked = []

    def load(root, part):
        asked.append((root, part))
        return split

    monkeypatch.setattr(cifar, "load", load)
    yield split
    assert set(asked) <= {(DATA, "test")}


@pytest.fixture
def run(tmp_path):
    """Make the folder of a finished run."""

    def make(architecture="bvit", folder="mine", **kwargs):
        kwargs = {**SMALL, "steps": 3, **kwargs}
        model = timm.create_model(architecture, **kwargs).eval()
        torch.nn.init.normal_(model.head.weight)
        path = tmp_path / folder
        path.mkdir()
        safetensors.torch.save_file(model.state_dict(), path / "model.safetensors")
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
    """Two checkpoints in place of the package's."""
    found = [
        SimpleNamespace(id=f"{name}.some_c100", name=name, sha256=digit * 64, metrics={"horizon": horizon}, same_as="")
        for name, digit, horizon in (("bvit", "1", 12), ("bvit_ode_rk4", "2", 3))
    ]
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: found)
    return found


def assert_equal_but_for_the_time(row, expected):
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    same = expected.keys() - {"loss", "seconds"}
    assert {key: row[key] for key in same} == {key: expected[key] for key in same}


# ---- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_are_those_of_evaluate(precision, run, split, tmp_path):
    folder, out = run(), tmp_path / "rows.jsonl"
    options = ["--horizon", "1,5", "--precision", precision, "--batch-size", "16", "--out", str(out)]
    accuracy.main([str(folder), "--data", DATA, *options])
    measured = list(rows.read(out))
    expected = list(evaluate(runs.load_result(folder), split, horizons=[1, 3, 5], batch_size=16, precision=precision))
    assert [row["horizon"] for row in measured] == [1, 3, 5], "the trained number of steps is always there"
    for row, other in zip(measured, expected, strict=True):
        assert set(row) >= IN_EVERY_ROW
        assert_equal_but_for_the_time(row, other)
        assert (row["benchmark"], row["subject"], row["device"]) == ("accuracy", "mine", "cpu")
        assert row["count"] == len(split)


def test_the_sum_is_that_of_the_weights(run, split, tmp_path):
    folder, out = run(), tmp_path / "rows.jsonl"
    accuracy.main([str(folder), "--data", DATA, "--horizon", "1", "--out", str(out)])
    sums = {row["sha256"] for row in rows.read(out)}
    assert sums == {weights.sha256(folder / "model.safetensors")}


def test_no_path_of_this_machine_is_recorded(run, split, tmp_path):
    folder, out = run(), tmp_path / "rows.jsonl"
    plot = tmp_path / "sweep.svg"
    pytest.importorskip("matplotlib")
    accuracy.main(
        [str(folder), f"--data={DATA}", "--horizon=2,1", "--batch-size", "7", "--out", str(out), "--plot", str(plot)]
    )
    text = out.read_text()
    assert str(tmp_path) not in text
    assert DATA not in text
    commands = {row["command"] for row in rows.read(out)}
    assert commands == {"python -m benchmarks.accuracy mine --data DIR --horizon 1,2 --batch-size 7"}
    assert plot.read_bytes().startswith(b"<?xml")


def test_the_shortest_command_is_recorded_where_nothing_was_chosen(checkpoints, split, results, monkeypatch):
    monkeypatch.setattr(accuracy, "load", lambda subject: timm.create_model("bvit", **SMALL, steps=1))
    monkeypatch.setattr(accuracy, "measure", lambda *_, **__: [a_row()])
    accuracy.main(["--data", DATA])
    commands = {row["command"] for row in rows.read(results / "accuracy.jsonl")}
    assert commands == {"python -m benchmarks.accuracy --data DIR"}


def test_every_checkpoint_is_evaluated_unless_some_are_named(checkpoints, split, results, monkeypatch):
    loaded = []

    def load(subject):
        loaded.append(subject)
        return timm.create_model("bvit", **SMALL, steps=2)

    monkeypatch.setattr(accuracy, "load", load)
    accuracy.main(["--data", DATA, "--horizon", "1"])
    accuracy.main(["bvit_ode_rk4", "--data", DATA, "--horizon", "1"])
    first, second = [row.id for row in checkpoints]
    assert [subject.source for subject in loaded] == [first, second, second]
    measured = [(row["subject"], row["sha256"][0], row["horizon"]) for row in rows.read(results / "accuracy.jsonl")]
    one, two = ([(first, "1", n) for n in (1, 2)], [(second, "2", n) for n in (1, 2)])
    assert measured == [*one, *two, *two]


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("bvit", "bvit.some_c100", "bvit.some_c100"),
        ("bvit.some_c100", "bvit.some_c100", "bvit.some_c100"),
        ("local-dir:hub/mine", "local-dir:hub/mine", "local-dir:hub/mine"),
        ("local-dir:/a/b/mine", "local-dir:mine", "local-dir:/a/b/mine"),
        ("hf-hub:us/bvit@main", "hf-hub:us/bvit@main", "hf-hub:us/bvit@main"),
        ("runs/mine/", "runs/mine", "runs/mine/"),
        ("./bvit", "bvit", "./bvit"),
    ],
)
def test_what_is_evaluated_and_what_it_is_called(text, name, source, checkpoints, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "bvit").mkdir()
    monkeypatch.chdir(tmp_path)
    assert accuracy.resolve(text)[:2] == (name, source)


# ---- recorded or not -------------------------------------------------------------------------------------------------


def test_rows_go_into_the_results_unless_out_is_given(run, split, results, tmp_path):
    folder = str(run())
    accuracy.main([folder, "--data", DATA, "--horizon", "1"])
    assert len(list(rows.read(results / "accuracy.jsonl"))) == 2
    accuracy.main([folder, "--data", DATA, "--horizon", "1", "--out", str(tmp_path / "other.jsonl")])
    assert len(list(rows.read(results / "accuracy.jsonl"))) == 2
    assert len(list(rows.read(tmp_path / "other.jsonl"))) == 2


def test_a_smoke_run_is_printed_not_recorded(run, split, results, capsys):
    accuracy.main([str(run()), "--data", DATA, "--horizon", "1", "--limit", "7"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["horizon"], row["count"]) for row in printed] == [(1, 7), (3, 7)]
    assert not list(results.iterdir())


def test_a_run_that_fails_has_recorded_the_checkpoints_before(run, split, results, monkeypatch):
    names, real = [str(run(folder=name)) for name in ("one", "two")], accuracy.measure

    def measure(subject, *arguments, **options):
        if subject.name == "two":
            raise RuntimeError("out of memory")
        return real(subject, *arguments, **options)

    monkeypatch.setattr(accuracy, "measure", measure)
    with pytest.raises(RuntimeError, match="out of memory"):
        accuracy.main([*names, "--data", DATA, "--horizon", "1"])
    assert {row["subject"] for row in rows.read(results / "accuracy.jsonl")} == {"one"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resnet18"], "NAME 'resnet18' has no checkpoint; there are bvit.some_c100, bvit_ode_rk4.some_c100; or give"),
        (["bvit", "bvit.some_c100"], "NAME: bvit.some_c100 is there twice"),
        (["--horizon", "1,,2"], "--horizon: horizon='1,,2': '' is not a whole number; give steps like 1,2,4,12"),
        (["--limit", "0"], "--limit 0: give at least 1"),
        (["--limit", "5", "--out", "rows.jsonl"], "--limit 5: such rows are not recorded; leave --out away"),
        (["--batch-size", "0"], "--batch-size 0: give at least 1"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device"),
        (["--precision", "fp16"], "--precision: invalid choice: 'fp16'"),
        (["--out", "no/such/rows.jsonl"], "--out 'no/such/rows.jsonl': there is no folder 'no/such'"),
        (["--plot", "sweep.gif"], "plot 'sweep.gif' must end in one of .pdf, .png, .svg"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(argv, message, checkpoints, split, results, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accuracy, "measure", None)
    with pytest.raises(SystemExit, match="2"):
        accuracy.main([*argv, "--data", DATA])
    assert message in capsys.readouterr().err


def test_missing_data_and_missing_checkpoints_are_told(run, results, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        accuracy.main([str(run()), "--data", str(tmp_path / "none")])
    assert f"CIFAR-100 (test) was not found in {tmp_path / 'none'}" in capsys.readouterr().err
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: [])
    with pytest.raises(SystemExit, match="2"):
        accuracy.main([])
    assert "NAME is missing, and the package has no checkpoints; give the folder of a run" in capsys.readouterr().err


def test_a_model_of_another_kind_is_told(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="'hf-hub:us/other' is a Linear; give a model of the zoo"):
        accuracy.load(accuracy.resolve("hf-hub:us/other"))


# ---- tables ----------------------------------------------------------------------------------------------------------


def a_row(**kwargs):
    """A row of the benchmark."""
    return {
        "benchmark": "accuracy", "subject": "bvit.some_c100", "horizon": 12, "trained_horizon": 12, "precision": "fp32",
        "solver": "plain", "field": "state_subtracted", "step_size": 1.0,
        "top1": 0.5, "top1_stderr": 0.005, "top5": 0.75, "loss": 1.5, "non_finite": 0, "count": 10_000,
        "NFE": 12, "MACs": 633_104_384, "parameters": 882_276, "seconds": 9.0, "sha256": None,
        "date": "2030-01-02T03:04:05+00:00", "device": "cpu",
        "hardware": {"cpu": "A processor", "cores": 2, "threads": 1, "gpu": None},
        "versions": {"python": "3.11.2"}, "commit": None, "dirty": None, "command": "python -m benchmarks.accuracy",
        **kwargs,
    }  # fmt: skip


def lines_of(text, title):
    """The lines of one table, its head first."""
    part = text.split(f"### {title}\n")[1].split("### ")[0]
    head, _, *lines = (line for line in part.splitlines() if line.startswith("|"))
    return [head, *lines]


def test_every_checkpoint_has_its_lines_and_says_what_was_not_run(checkpoints):
    measured = [
        a_row(top1=0.1),
        a_row(),
        a_row(horizon=48, top1=0.25, non_finite=1234, loss=None),
        a_row(subject="runs/mine", precision="bf16", horizon=1, trained_horizon=1, top1=1.0, top1_stderr=0.0),
    ]
    text = tables.tables(measured)
    assert lines_of(text, "Accuracy, cpu") == [
        "| subject | precision | horizon | top-1 % | top-5 % | loss | not finite | images | NFE | MACs | parameters |",
        "| bvit.some_c100 | fp32 | 12 | 50.00 ± 0.50 | 75.00 | 1.5000 | 0 | 10,000 | 12 | 633,104,384 | 882,276 |",
        "| bvit_ode_rk4.some_c100 | fp32 | 3 |" + " not run |" * 8,
        "| runs/mine | bf16 | 1 | 100.00 ± 0.00 | 75.00 | 1.5000 | 0 | 10,000 | 12 | 633,104,384 | 882,276 |",
    ]
    none = " not run |"
    broken = " 25.00 ± 0.50 (1,234 not finite) |"
    assert lines_of(text, "Horizon sweep, cpu") == [
        "| subject | precision | trained horizon | 1 | 2 | 4 | 8 | 12 | 24 | 48 | 96 |",
        "| bvit.some_c100 | fp32 | 12 |" + 4 * none + " **50.00 ± 0.50** |" + none + broken + none,
        "| bvit_ode_rk4.some_c100 | fp32 | 3 |" + 8 * none,
        "| runs/mine | bf16 | 1 | **100.00 ± 0.00** |" + 7 * none,
    ]
    source = "- 2030-01-02; A processor, 2 cores, 1 threads; python 3.11.2; no commit; `python -m benchmarks.accuracy`"
    assert text.count(source) == 2


def test_the_same_function_under_another_name_is_evaluated_by_request_alone(checkpoints):
    alike = {**vars(checkpoints[0]), "id": "bvit_ode_euler.some_c100", "same_as": "bvit.some_c100"}
    checkpoints.append(SimpleNamespace(**alike))
    assert [row.id for row in accuracy.default_checkpoints()] == ["bvit.some_c100", "bvit_ode_rk4.some_c100"]
    text = tables.tables([a_row()])
    assert [line.split()[1] for line in lines_of(text, "Accuracy, cpu")[1:]] == [
        "bvit.some_c100", "bvit_ode_rk4.some_c100"
    ]  # fmt: skip
    assert text.count("bvit_ode_euler.some_c100 is the same function as bvit.some_c100.") == 2
    text = tables.tables([a_row(), a_row(subject="bvit_ode_euler.some_c100")])
    assert len(lines_of(text, "Accuracy, cpu")) == 4


def test_both_precisions_of_a_checkpoint_have_a_line(checkpoints):
    text = tables.tables([a_row(), a_row(precision="bf16", top1=0.25)])
    _, first, second, other = lines_of(text, "Accuracy, cpu")
    assert first.startswith("| bvit.some_c100 | fp32 | 12 | 50.00")
    assert second.startswith("| bvit.some_c100 | bf16 | 12 | 25.00")
    assert other.startswith("| bvit_ode_rk4.some_c100 | fp32 | 3 | not run")


def test_accuracy_on_a_gpu_is_a_table_of_its_own(checkpoints):
    text = tables.tables([a_row(device="cuda")])
    assert "### Accuracy, cpu" not in text
    assert "### Inference, cuda" not in text
    assert lines_of(text, "Accuracy, cuda")[1].startswith("| bvit.some_c100 | fp32 | 12 | 50.00")


def test_without_rows_every_checkpoint_says_so(checkpoints):
    text = tables.tables([])
    for title, columns in (("Accuracy, cpu", 8), ("Horizon sweep, cpu", len(accuracy.HORIZONS))):
        assert lines_of(text, title)[1:] == [
            "| bvit.some_c100 | fp32 | 12 |" + " not run |" * columns,
            "| bvit_ode_rk4.some_c100 | fp32 | 3 |" + " not run |" * columns,
        ]


# ---- the picture -----------------------------------------------------------------------------------------------------


def sweep(**kwargs):
    return [a_row(**{"horizon": n, "top1": 0.5 / n, "top1_stderr": 0.01, **kwargs}) for n in (96, 12, 1)]


def test_curves_are_of_the_latest_rows_in_the_order_of_their_steps():
    found = figures.curves([{"benchmark": "inference"}, *sweep(top1=0.1), *sweep(), *sweep(subject="other")])
    assert list(found) == ["bvit.some_c100", "other"]
    for curve in found.values():
        assert [(row["horizon"], row["top1"]) for row in curve] == [(1, 0.5), (12, 0.5 / 12), (96, 0.5 / 96)]


def test_curves_are_called_by_what_tells_them_apart():
    for key, first, second in (("precision", "fp32", "bf16"), ("device", "cpu", "cuda")):
        found = figures.curves([*sweep(), *sweep(**{key: second})])
        assert list(found) == [f"bvit.some_c100, {first}", f"bvit.some_c100, {second}"]
    assert figures.curves([]) == {}


def test_the_picture_shows_the_rows():
    pytest.importorskip("matplotlib")
    broken = a_row(subject="other", horizon=4, trained_horizon=4, top1=0.25, non_finite=3)
    (axes,) = figures.draw(figures.curves([*sweep(), broken])).axes
    one, other = axes.containers
    assert one.lines[0].get_xydata().tolist() == [[n, 100 * (0.5 / n)] for n in (1, 12, 96)]
    bars = one.lines[2][0].get_segments()
    assert [high - low for (_, low), (_, high) in bars] == pytest.approx([2.0] * 3)
    assert other.lines[0].get_xydata().tolist() == [[4, 25]]
    single = [line for line in axes.lines if len(line.get_xdata()) == 1 and line not in (one.lines[0], other.lines[0])]
    rings = [line.get_xydata().tolist() for line in single if line.get_fillstyle() == "none"]
    crosses = [line.get_xydata().tolist() for line in single if line.get_marker() == "X"]
    assert rings == [[[12, 100 * (0.5 / 12)]], [[4, 25]]]
    assert crosses == [[[4, 25]]]
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {"bvit.some_c100", "other", "trained horizon", "some outputs not finite"}
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "12", "96"]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_picture_is_drawn_from_files_of_rows(suffix, magic, results, tmp_path):
    pytest.importorskip("matplotlib")
    rows.append(results / "accuracy.jsonl", sweep())
    rows.append(tmp_path / "other.jsonl", sweep(subject="other"))
    for i, files in enumerate(([], [str(tmp_path / "other.jsonl")])):
        path = tmp_path / f"sweep{i}{suffix}"
        figures.main([str(path), *files])
        assert path.read_bytes().startswith(magic)


def test_a_picture_of_nothing_is_refused(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for of, message in (
        ("accuracy", "no rows of accuracy to draw; run python -m benchmarks.accuracy first"),
        ("anytime", "no rows of early exit to draw; run python -m benchmarks.anytime first"),
        ("cross", "no rows of cross-evaluation to draw; run python -m benchmarks.cross first"),
    ):
        with pytest.raises(SystemExit, match="2"):
            figures.main([str(tmp_path / "sweep.png"), "--of", of])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep.png").exists()


def test_plot_draws_all_rows_of_the_file_and_a_smoke_run_its_own(run, split, results, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(figures, "plot", lambda measured, path: drawn.append({row["subject"] for row in measured}))
    rows.append(results / "accuracy.jsonl", sweep())
    command = [str(run()), "--data", DATA, "--horizon", "1", "--plot", str(tmp_path / "sweep.png")]
    accuracy.main(command)
    accuracy.main([*command, "--limit", "3"])
    assert drawn == [{"bvit.some_c100", "mine"}, {"mine"}]
