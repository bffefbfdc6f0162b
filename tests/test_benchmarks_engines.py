"""The engines give the model's answers, and the rows say what was measured."""

import json

import pytest
import torch

from benchmarks import accuracy, engines, rows, tables
from benchmarks.measure import TIMM_VIT, Settings, build
from recurrent_vit import augment, cifar

INEXACT = [
    *("m eager", "m bf16", "m bf16 frozen", "m onnx int8", "m optimized int8", "m early exit", "m early exit int8"),
]
TINY = {"embed_dim": 16, "num_heads": 2, "patch_size": 8}


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Compiling takes minutes and is torch's own: here a compiled block is the block."""
    for name in ("_compiled", "_to_freeze"):
        monkeypatch.setattr(engines, name, lambda model: model)
    monkeypatch.setattr(engines, "SETTLE", 0)
    monkeypatch.setattr(engines, "GEMM_SIZE", 64)
    monkeypatch.setattr(engines, "BATCHES", {1: 2, 4: 8})


@pytest.fixture
def model(small):
    return small("bvit", **TINY, num_classes=100, steps=4)


@pytest.fixture
def split():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (12, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return cifar.Split(images, torch.randint(100, (12,), generator=generator))


@pytest.fixture
def vit():
    return build(TIMM_VIT, Settings(model={**TINY, "depth": 2})).eval()


def test_every_engine_computes_the_logits_of_the_model(model, split):
    images = augment.normalize(split.images)
    ours = engines.engines(model, None)
    assert list(ours) == [
        *("eager", "compiled", "frozen", "bf16", "bf16 frozen", "onnx", "onnx int8"),
        *("optimized", "optimized int8", "early exit", "early exit int8"),
    ]
    with torch.inference_mode():
        expected = model(images)
        for name, engine in ours.items():
            found, allowed = engine.logits(images), 0.1 if "int8" in name or "bf16" in name else 1e-5
            assert (found - expected).norm() < allowed * expected.norm(), name
        assert not torch.equal(ours["onnx int8"].logits(images), ours["onnx"].logits(images))


def test_every_engine_computes_the_logits_of_a_vit(vit, split):
    images = augment.normalize(split.images)
    with torch.inference_mode():
        expected = vit(images)
        for name, engine in engines.vit_engines(vit).items():
            found, allowed = engine.logits(images), 0.1 if "int8" in name or "bf16" in name else 1e-5
            assert (found - expected).norm() < allowed * expected.norm(), name


def test_speeds_have_a_row_for_each_engine_and_batch(model, vit, split):
    ours, theirs = engines.engines(model, 0.5), engines.vit_engines(vit)
    found = list(engines.speeds("m", ours, theirs, (10**9, 10**8), augment.normalize(split.images), rounds=2))
    measured = [row for row in found if row["benchmark"] == "engines"]
    subjects = [f"m {name}" for name in ours] + [f"timm_vit {name}" for name in theirs]
    assert [(row["batch"], row["subject"]) for row in measured] == [
        (b, subject) for b in (1, 4) for subject in subjects
    ]
    for row in measured:
        assert row["reference"] == (None if row["subject"] == "m eager" else "m eager")
        assert row["images"] == {1: 2, 4: 8}[row["batch"]]
        assert row["images_per_s"] == pytest.approx(1000 * row["batch"] / row["median"], rel=1e-2)
        cost = 10**9 if row["subject"].startswith("m ") else 10**8
        flop = 2 * cost * row["batch"]  # two rounds: the mean of the rates at least and most
        assert row["gflops"] == pytest.approx((flop / row["min"] + flop / row["max"]) / 2e6, rel=1e-2, abs=0.1)
        assert row["gemm_fraction"] > 0
    times = {(row["subject"], row["batch"]): row for row in measured}
    quantised = [row for row in found if row["benchmark"] == "engines int8"]
    assert [(row["batch"], row["subject"]) for row in quantised] == [
        (b, f"{who} onnx int8") for b in (1, 4) for who in ("m", "timm_vit")
    ]
    for row in quantised:
        int8, fp32 = (times[row[key], row["batch"]] for key in ("subject", "reference"))
        assert row["reference"] == row["subject"].removesuffix(" int8")
        assert row["median"] == int8["median"]
        assert fp32["min"] / int8["max"] - 1e-3 <= row["ratio"] <= fp32["max"] / int8["min"] + 1e-3


def test_an_engine_that_is_off_is_an_error(model, split):
    images = augment.normalize(split.images)
    ours = engines.engines(model, None)
    engines.check_exact(ours, images)
    for wrong in (lambda x: 1.01 * model(x), lambda x: model(x) * torch.nan):
        with pytest.raises(RuntimeError, match="frozen is off by"):
            engines.check_exact({**ours, "frozen": engines.Engine(wrong)}, images)


def test_accuracies_are_paired_with_eager(model, split):
    ours = engines.engines(model, 0.0)  # everything leaves after the first step
    found = {row["subject"]: row for row in engines.accuracies("m", ours, split, batch=5)}
    assert list(found) == INEXACT
    with torch.inference_mode():
        images = augment.normalize(split.images)
        eager, first = model(images).argmax(-1), model.forward_steps(images)[0].argmax(-1)
    assert found["m eager"]["top1"] == pytest.approx((eager == split.labels).double().mean().item())
    assert (found["m eager"]["lost"], found["m eager"]["agreement"]) == (0, 1)
    assert found["m early exit"]["agreement"] == pytest.approx((eager == first).double().mean().item())
    assert all(row["count"] == 12 for row in found.values())


def test_threads_and_the_compiler_are_put_back():
    before, config = torch.get_num_threads(), torch._inductor.config
    with engines._running(engines.Engine(torch.nn.Identity(), threads=before + 1, frozen=True)):
        assert (torch.get_num_threads(), config.freezing, torch.is_inference_mode_enabled()) == (before + 1, True, True)
    assert (torch.get_num_threads(), config.freezing, torch.is_inference_mode_enabled()) == (before, False, False)
    with engines._running(engines.Engine(torch.nn.Identity())):
        assert (torch.get_num_threads(), config.freezing) == (before, False)


def test_each_model_and_batch_size_has_graphs_of_its_own_and_none_runs_eagerly(model, vit, split, monkeypatch):
    """A backend that counts: the graphs that are compiled, and the weights that a frozen one has as constants."""
    monkeypatch.undo()
    monkeypatch.setattr(engines, "SETTLE", 0)
    monkeypatch.setattr(engines, "BATCHES", {1: 2, 2: 4, 3: 6})
    monkeypatch.setattr(engines, "GEMM_SIZE", 64)
    compiled = []

    def backend(graph, inputs):
        compiled.append(sum(isinstance(value, torch.nn.Parameter) for value in inputs))
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend=backend, **options))
    ours, theirs = engines._torch_engines(model), engines._torch_engines(vit)
    list(engines.speeds("m", ours, theirs, (1, 1), augment.normalize(split.images), rounds=1))
    frozen = 2 * (1 + len(vit.blocks))  # fp32 and bf16
    assert len(compiled) >= 3 * (2 + frozen)
    assert compiled.count(0) == 3 * frozen, "a frozen graph has no parameter among its inputs, another has"


@pytest.fixture
def loaded(model, vit, split, monkeypatch):
    monkeypatch.setattr(engines, "build", lambda name, settings: vit)
    monkeypatch.setattr(accuracy, "resolve", lambda name: accuracy.Subject(name, name, "0" * 64))
    monkeypatch.setattr(accuracy, "load", lambda subject: model)
    monkeypatch.setattr(cifar, "load", lambda root, part: split)
    monkeypatch.setattr(cifar, "held_out", lambda labels, count: (None, torch.arange(6)))


@pytest.mark.usefixtures("loaded")
def test_the_program_appends_rows_with_their_origin(tmp_path):
    out = tmp_path / "engines.jsonl"
    engines.main(["bvit", "--data", "/secret", "--rounds", "2", "--out", str(out)])
    measured = list(rows.read(out))
    assert {row["benchmark"] for row in measured} == {"engines", "engines int8", "engine accuracy"}
    assert {row["command"] for row in measured} == {"python -m benchmarks.engines bvit --data DIR --rounds 2"}
    assert all(row["sha256"] == "0" * 64 for row in measured)
    exits = [row for row in measured if "threshold" in row]
    assert {row["subject"] for row in exits} == {"bvit early exit", "bvit early exit int8"}
    assert {row["calibrated_on"] for row in exits} == {"6 training images that it was trained on"}
    assert "/secret" not in out.read_text()


@pytest.mark.usefixtures("loaded")
def test_a_smoke_run_is_printed(capsys):
    engines.main(["bvit", "--limit", "4", "--rounds", "1"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["count"] for row in printed if row["benchmark"] == "engine accuracy"} == {4}
    for only, expected in (("speed", {"engines", "engines int8"}), ("accuracy", {"engine accuracy"})):
        engines.main(["bvit", "--limit", "4", "--rounds", "1", "--only", only])
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {row["benchmark"] for row in found} == expected
        assert f"--only {only} " in found[0]["command"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds 0: give at least 1"),
        (["--limit", "0"], "--limit 0: give at least 1"),
        (["--limit", "1", "--out", "x"], "such rows are not recorded"),
        (["--out", "no/such/x.jsonl"], "there is no folder"),
        (["bvitt"], "bvitt"),
    ],
)
def test_wrong_usage_is_one_line(options, message, capsys):
    with pytest.raises(SystemExit):
        engines.main(options)
    assert message in capsys.readouterr().err


def test_rows_become_tables(model, vit, split, monkeypatch):
    monkeypatch.setattr(tables, "FULL", Settings(batches=(1, 4)))
    ours, theirs = engines.engines(model, 0.5), engines.vit_engines(vit)
    origin = rows.provenance("cpu", "a command")
    measured = [
        {**row, **origin}
        for row in (
            *engines.speeds("m", ours, theirs, (10**9, 10**8), augment.normalize(split.images), rounds=2),
            *engines.accuracies("m", ours, split),
        )
    ]
    text = tables.tables(measured)
    speed, quantised, accuracies = (text.partition(f"### {title}, cpu")[2].partition("###")[0] for title in TITLES)
    assert "| subject | batch 1 | batch 4 |" in speed
    assert quantised.count("\n| m onnx int8 |") == quantised.count("\n| timm_vit onnx int8 |") == 2
    for row in measured[: len(ours) + len(theirs)]:
        (line,) = [line for line in speed.splitlines() if line.startswith(f"| {row['subject']} |")]
        ratio = f"{row['ratio']:.2f} x, " if row["ratio"] else ""
        assert f"| {row['images_per_s']:,.0f} ({ratio}{row['gemm_fraction']:.0%}) |" in line
    assert "not run" not in speed
    lines = [line.split(" | ")[0] for line in accuracies.splitlines() if line.startswith("| m ")]
    assert lines == [f"| {subject}" for subject in INEXACT]
    assert "### Engines" not in tables.tables([])


TITLES = ("Engines", "Engines: int8", "Engines: accuracy")
