"""The captured training of the paper's protocol: the same run as the ordinary one, on a CPU."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import timm
import torch

from benchmarks import paper
from recurrent_vit import augment, cifar, evaluate, hub, plots, runs, train
from recurrent_vit.recipes import RECIPES, Recipe

TINY = {"embed_dim": 16, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2.0, "steps": 2}
PHASE = replace(RECIPES["paper"].phases[0], batch_size=8, micro_batch=8)
# The average forgets soon enough to move, and late enough to show what it began with; the rate is high from the start.
RECIPE = replace(RECIPES["paper"], epochs=2.5, warmup=0.0, ema_decay=0.9, dropout=0.0, phases=(PHASE,))
UPDATES = round(2.5 * 43 / 8)


def pictures(count=43):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return cifar.Split(images, torch.randint(100, (count,), generator=generator))


def captured(name="bvit", recipe=RECIPE, device="cpu", **changes):
    arguments = {"precision": "fp32", "compile": False, "model_kwargs": TINY, **changes}
    return paper.Captured(name, recipe, pictures().to(device), seed=3, **arguments)


def states(quick):
    """Copies of the weights, and of their average."""
    modules = {"weights": quick.model, "average": quick.ema.module}
    return {
        f"{which} {name}": tensor.clone()
        for which, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


def assert_same_way(found, expected, start):
    """Each tensor ends where it should, but for a thousandth of the way that it goes: Adam makes much of roundings."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        way, apart = (value - start[name]).norm(), (found[name] - value).norm()
        assert apart < 1e-3 * way, f"{name}: {apart:.3g} apart after a way of {way:.3g}"


class Clock:
    """Stands still but for `clock.now += seconds`, in place of the module `time`."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(paper, "time", clock)
    return clock


# ---- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bvit", "bvit_ds", "bvit_ode_heun", "vit_cifar"])
def test_it_ends_with_the_weights_of_the_ordinary_run(tmp_path, name):
    kwargs = {key: value for key, value in TINY.items() if name != "vit_cifar" or key != "steps"}
    quick = captured(name, model_kwargs=kwargs)
    start = states(quick)
    updates = [number for number, _, _ in quick.epochs()]
    assert updates[-1] == quick.leg.updates == UPDATES
    train.fit(name, RECIPE, pictures(), tmp_path / "run", seed=3, model_kwargs=kwargs)
    packed = runs.load_checkpoint(runs.find_checkpoints(tmp_path / "run")[-1])
    modules = {"weights": packed["model"], "average": packed["ema"]}
    expected = {f"{which} {key}": value for which, state in modules.items() for key, value in state.items()}
    assert_same_way(states(quick), expected, start)


def test_an_epoch_is_that_of_the_batches():
    augmentation = augment.Augmentation()
    drawn = paper.draw_epoch(43, 8, augmentation, epoch=2, seed=5)
    split = pictures()
    for k, batch in enumerate(cifar.batches(split, 8, epoch=2, seed=5, augmentation=augmentation, drop_last=True)):
        assert torch.equal(drawn.rows[k], batch.indices)
        draws = augment.Draws(drawn.offsets[k], drawn.mirrored[k], drawn.rows[k])
        assert torch.equal(augmentation(split.images[drawn.rows[k]], draws), batch.images)
    assert len(drawn.rows) == 43 // 8


@pytest.mark.parametrize("updates", [1, UPDATES])
def test_a_rehearsal_leaves_no_trace(updates):
    recipe = replace(RECIPE, dropout=0.1, epochs=updates * 8 / 43)  # one update is less than a rehearsal
    untouched, rehearsed = captured(recipe=recipe), captured(recipe=recipe)
    begin = states(rehearsed)
    start = rehearsed.rehearse()
    assert not any(torch.equal(value, begin[name]) for name, value in states(rehearsed).items())
    rehearsed.restore(start)
    losses = [[row[:2] for row in quick.epochs()] for quick in (untouched, rehearsed)]
    assert losses[0] == losses[1]
    assert losses[0][-1][0] == updates
    for name, value in states(untouched).items():
        assert torch.equal(states(rehearsed)[name], value), name


def test_all_updates_but_the_first_are_one():
    ends = []
    for number in (2, 3, 1000):
        quick = captured()
        quick.epoch.rows.copy_(torch.arange(40).view(5, 8))
        quick.update(1)
        first = states(quick)
        assert all(torch.equal(first[f"average {key}"], value) for key, value in quick.model.state_dict().items())
        quick.update(number)
        ends.append(states(quick))
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name
        assert torch.equal(ends[2][name], value), name
    assert not all(torch.equal(ends[0][f"average {key}"], value) for key, value in quick.model.state_dict().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_update_is_an_eager_one():
    eager, graph = captured(device="cuda"), captured(device="cuda")
    start = states(eager)
    eager.capture = lambda: None
    list(eager.epochs())
    list(graph.epochs())
    assert_same_way(states(graph), states(eager), start)


def test_a_gpu_is_made_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(paper.Captured, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    quick = captured()
    assert chosen == [quick.split.images.device]


# ---- what is not captured --------------------------------------------------------------------------------------------


def with_augmentation(**more):
    """A recipe with more augmentation than a `Recipe` can say."""

    class Augmented(Recipe):
        def augmentation(self, phase):
            return replace(super().augmentation(phase), **more)

    return Augmented(**vars(RECIPE))


def with_phases(*shares, **changes):
    return replace(RECIPE, phases=tuple(replace(PHASE, share=share, **changes) for share in shares))


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        (with_phases(0.5, 0.5), "several phases"),
        (with_phases(1.0, fraction=Fraction(1, 2)), "a fraction of the steps"),
        (
            replace(RECIPE, publish="raw", phases=(replace(PHASE, ema=False),)),
            "a phase without an average, publish other than 'ema'",
        ),
        (replace(RECIPE, muon_lr=1e-3), "muon_lr"),
        (replace(RECIPE, clip=1.0), "clip"),
        (replace(RECIPE, ema_warmup=True), "ema_warmup"),
        (replace(RECIPE, publish="raw"), "publish other than 'ema'"),
        (replace(RECIPE, whiten=True), "whiten"),
        (with_augmentation(rand_ops=1), "rand_ops"),
        (with_augmentation(erase=0.5), "erase"),
        (
            RECIPES["short"],
            "several phases, a fraction of the steps, a phase without an average, muon_lr, clip, ema_warmup, "
            "publish other than 'ema', whiten",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recipes_that_are_not_captured_are_refused(recipe, named):
    with pytest.raises(ValueError, match="cannot be captured") as caught:
        captured(recipe=recipe)
    assert str(caught.value) == f"recipe {recipe.name!r} cannot be captured: {named}; use recurrent-vit train"


def test_a_seed_is_checked_before_the_draws_need_it():
    with pytest.raises(ValueError, match=r"seed=-1 must be from 0 to 2\^32 - 1"):
        paper.Captured("bvit", RECIPE, pictures(), seed=-1, precision="fp32", compile=False, model_kwargs=TINY)


# ---- the folder of the run -------------------------------------------------------------------------------------------


def test_weights_facts_and_accuracy_are_there_after_every_epoch(tmp_path):
    test = pictures(20)
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        quick = captured()
        for row in paper.run(quick, test, folder, command="python -m benchmarks.paper bvit"):
            history = list(runs.read_history(folder))
            assert history[-1] == row
            (found,) = evaluate.evaluate(quick.ema.module, test)
            assert row["test_top1"] == found["top1"]
            facts = json.loads((folder / "run.json").read_text())
            assert [facts[key] for key in ("updates", "planned_updates")] == [row["update"], UPDATES]
            assert [facts[key] for key in ("pflop", "seconds")] == [row["pflop"], row["seconds"]]
            assert facts["command"] == "python -m benchmarks.paper bvit"
            model = runs.load_result(folder)
            state = quick.ema.module.state_dict()
            assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [line["update"] for line in history] == [5, 10, 13]
    assert {"hardware", "versions", "date", "images", "precision", "seed", "recipe"} <= facts.keys()


def test_a_run_that_is_killed_can_be_evaluated_but_not_staged(tmp_path):
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        training = paper.run(captured(), pictures(20), folder)
        next(training)
        training.close()
    (row,) = evaluate.evaluate(runs.load_result(folder), pictures(20))
    assert row["top1"] == next(runs.read_history(folder))["test_top1"]
    with pytest.raises(ValueError, match=f"run was stopped after update 5 of {UPDATES}"):
        hub.stage(folder, "bvit", "x", tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_loss_that_is_not_finite_keeps_the_result_of_the_epoch_before(tmp_path):
    quick = captured()
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        training = paper.run(quick, pictures(20), folder)
        next(training)
        before = {name: (folder / name).read_bytes() for name in ("model.safetensors", "run.json", "history.jsonl")}
        quick.model.head.weight.data.fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="the loss is nan in the epoch that ends with update 10"):
            next(training)
        assert {name: (folder / name).read_bytes() for name in before} == before
    runs.load_result(folder)


# ---- the clock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "updates"),
    [
        (None, [5, 10, 13]),
        (104.5, [5, 10, 13]),  # the first epoch, which compiles, says nothing of the others
        (103.0, [5, 10]),  # the third would end after 104
        (50.0, [5]),
        (0.0, [5]),
    ],
)
def test_no_epoch_begins_that_would_end_too_late(tmp_path, capsys, clock, seconds, updates):
    quick = captured()
    ordinary = quick.epochs

    def slow():
        for number, row in enumerate(ordinary()):
            clock.now += 2 if number else 100
            yield row

    quick.epochs = slow
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        found = list(paper.run(quick, pictures(20), folder, seconds))
    assert [row["update"] for row in found] == updates
    stopped = f"stopped after update {updates[-1]} of {UPDATES}: {seconds or 0:g} seconds are over\n"
    assert capsys.readouterr().err == ("" if updates[-1] == UPDATES else stopped)
    runs.load_result(folder)


def test_images_per_second_are_of_the_training_alone(tmp_path, monkeypatch, clock):
    quick = captured()
    update, measure = quick.update, evaluate.evaluate

    def slow_update(number):
        clock.now += 0.5
        update(number)

    def slow_evaluation(*arguments, **options):
        clock.now += 100
        return measure(*arguments, **options)

    quick.update = slow_update
    monkeypatch.setattr(evaluate, "evaluate", slow_evaluation)
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        found = list(paper.run(quick, pictures(20), folder))
    assert [row["update"] for row in found] == [5, 10, 13], "the last epoch is short, or the test sees nothing"
    assert [row["images_per_second"] for row in found] == [16, 16, 16]
    assert [row["seconds"] for row in found] == [102.5, 205, 306.5]


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Small models, a small recipe, and few images in place of CIFAR-100."""
    pytest.importorskip("matplotlib")
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **kwargs: create(name, **{**TINY, **kwargs}))
    monkeypatch.setitem(paper.RECIPES, "paper", RECIPE)
    monkeypatch.setattr(cifar, "load", lambda root, part: pictures({"train": 43, "test": 20}[part]))


def test_the_program_runs_to_its_end(tiny, tmp_path, capsys):
    command = ["bvit", "--data", "/home/somebody/cifar", "--device", "cpu", "--seed", "3"]
    paper.main([*command, "--out", str(tmp_path / "run")])
    *epochs, last = capsys.readouterr().out.splitlines()
    history = list(runs.read_history(tmp_path / "run"))
    assert [line.partition(":")[0] for line in epochs] == ["epoch 1", "epoch 2", "epoch 2.6"]
    assert last.startswith(f"bvit: last {100 * history[-1]['test_top1']:.2f} %; best, chosen on the test set, ")
    assert f"{100 * max(row['test_top1'] for row in history):.2f} % (epoch " in last
    text = (tmp_path / "run" / "run.json").read_text()
    facts = json.loads(text)
    assert (facts["updates"], facts["planned_updates"], facts["precision"]) == (UPDATES, UPDATES, "fp32")
    assert facts["command"] == "python -m benchmarks.paper bvit --out runs/bvit --seed 3 --data DIR --device cpu"
    assert str(tmp_path) not in text
    assert "somebody" not in text
    quick = captured()
    list(quick.epochs())
    for key, value in runs.load_result(tmp_path / "run").state_dict().items():
        assert torch.equal(value, quick.ema.module.state_dict()[key]), key
    assert (tmp_path / "run" / "history.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(SystemExit, match="2"):
        paper.main([*command, "--out", str(tmp_path / "run")])
    assert f"--out '{tmp_path / 'run'}' holds a run already; give another" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.json").read_text() == text


def test_options_that_matter_are_in_the_command():
    words = ["bvit_ds", "--data", "D", "--out", "X", "--epochs", "0.5", "--seconds", "9", "--precision", "fp32"]
    found = paper.command(paper._parser().parse_args(words))
    expected = "python -m benchmarks.paper bvit_ds --out runs/bvit_ds --seed 0 --data DIR --epochs 0.5 --precision fp32"
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["resnet18"], "NAME 'resnet18' is not a name of the zoo (vit_cifar, bvit, "),
        (["bvit", "--device", "gpu"], "--device gpu: Expected one of cpu, cuda,"),
        (["bvit", "--device", "cuda"], "--device cuda: torch finds no CUDA device"),
        (["bvit", "--device", "cuda:1"], "--device cuda:1: torch finds no CUDA device"),
        (["bvit", "--epochs", "0"], "--epochs 0: give a number above 0"),
        (["bvit", "--epochs", "nan"], "--epochs nan: give a number above 0"),
        (["bvit", "--epochs", "0.01"], "has no whole update of 8 images"),
        (["bvit", "--seconds", "-1"], "--seconds -1: give a number above 0"),
        (["bvit", "--seed", "-1"], "seed=-1 must be from 0 to 2^32 - 1"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(changes, message, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(paper, "run", None)
    with pytest.raises(SystemExit, match="2"):
        paper.main(["--device", "cpu", "--out", str(tmp_path / "run"), *changes])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_missing_data_are_told(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        paper.main(["bvit", "--device", "cpu", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "run")])
    assert f"CIFAR-100 (train) was not found in {tmp_path / 'none'}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_matplotlib_it_does_not_begin(tiny, tmp_path, capsys, monkeypatch):
    def missing():
        raise ImportError('drawing needs matplotlib: pip install "recurrent-vit[train]"')

    monkeypatch.setattr(plots, "import_figure", missing)
    with pytest.raises(SystemExit, match="2"):
        paper.main(["bvit", "--device", "cpu", "--out", str(tmp_path / "run")])
    assert "drawing needs matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
