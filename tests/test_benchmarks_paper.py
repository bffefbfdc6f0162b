"""The captured training of the paper's protocol: the same run as the ordinary one, on a CPU."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import paper
from recurrent_vit import cifar, evaluate, runs, train
from recurrent_vit.recipes import RECIPES

TINY = {"embed_dim": 16, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2.0, "steps": 2}
PHASE = replace(RECIPES["paper"].phases[0], batch_size=8, micro_batch=8)
RECIPE = replace(RECIPES["paper"], epochs=2.5, dropout=0.0, phases=(PHASE,))


def pictures(count=43):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return cifar.Split(images, torch.randint(100, (count,), generator=generator))


def captured(name="bvit", **changes):
    arguments = {"precision": "fp32", "compile": False, "model_kwargs": TINY, **changes}
    return paper.Captured(name, RECIPE, pictures(), seed=3, **arguments)


@pytest.mark.parametrize("name", ["bvit", "bvit_ds", "bvit_ode_heun", "vit_cifar"])
def test_it_ends_with_the_weights_of_the_ordinary_run(tmp_path, name):
    kwargs = {key: value for key, value in TINY.items() if name != "vit_cifar" or key != "steps"}
    quick = captured(name, model_kwargs=kwargs)
    updates = [number for number, _ in quick.epochs()]
    expected = train.fit(name, RECIPE, pictures(), tmp_path / "run", seed=3, model_kwargs=kwargs).state_dict()
    assert updates[-1] == quick.leg.updates == round(2.5 * 43 / 8)
    for key, value in paper.weights(quick).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=key)


def test_an_epoch_is_that_of_the_batches():
    augmentation = cifar.Augmentation()
    drawn = paper.draw_epoch(43, 8, augmentation, epoch=2, seed=5)
    split = pictures()
    for k, batch in enumerate(cifar.batches(split, 8, epoch=2, seed=5, augmentation=augmentation, drop_last=True)):
        assert torch.equal(drawn.rows[k], batch.indices)
        draws = cifar.Draws(drawn.offsets[k], drawn.mirrored[k], drawn.rows[k])
        assert torch.equal(augmentation(split.images[drawn.rows[k]], draws), batch.images)
    assert len(drawn.rows) == 43 // 8


def test_weights_and_accuracy_are_there_after_every_epoch(tmp_path):
    test = pictures(20)
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        quick = captured()
        for row in paper.run(quick, test, folder, seconds=1e9):
            history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
            assert history[-1] == row
            (found,) = evaluate.evaluate(quick.ema.module, test)
            assert row["test_top1"] == found["top1"]
        paper._finish(quick, folder, history)
    model = runs.load_result(tmp_path / "run")
    assert all(torch.equal(value, quick.ema.module.state_dict()[key]) for key, value in model.state_dict().items())
    assert [line["update"] for line in history] == [5, 10, 13]


def test_the_clock_stops_it_between_epochs(tmp_path, capsys):
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        rows = list(paper.run(captured(), pictures(20), folder, seconds=0.0))
    assert [row["update"] for row in rows] == [5]
    assert "stopped after update 5 of 13: 0 seconds are over" in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_loss_that_is_not_finite_keeps_the_weights_of_the_epoch_before(tmp_path):
    quick = captured()
    with runs.open_folder(tmp_path / "run", resume=False) as folder:
        training = paper.run(quick, pictures(20), folder, seconds=1e9)
        next(training)
        before = (folder / "model.safetensors").read_bytes()
        quick.model.head.weight.data.fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="the loss is nan in the epoch that ends with update 10"):
            next(training)
        assert (folder / "model.safetensors").read_bytes() == before


def test_recipes_that_are_not_captured_are_refused():
    with pytest.raises(ValueError, match="Muon and clipping are not captured"):
        paper.Captured("bvit", replace(RECIPE, clip=1.0), pictures(), model_kwargs=TINY)


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        paper.main(["bvit", "--out", "x"])
    assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_update_is_an_eager_one():
    eager, graph = (paper.Captured("bvit", RECIPE, pictures().to("cuda"), 3, "fp32", False, TINY) for _ in range(2))
    eager.capture = lambda: None
    list(eager.epochs())
    list(graph.epochs())
    for key, value in paper.weights(graph).items():
        torch.testing.assert_close(value, paper.weights(eager)[key], rtol=1e-4, atol=1e-5, msg=key)
