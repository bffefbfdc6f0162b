"""Evaluation against a loop over single images, in one process and in two; rebuilding."""

import json
import math
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

from recurrent_vit import RecurrentVisionTransformer
from recurrent_vit import evaluate as module
from recurrent_vit.augment import normalize
from recurrent_vit.cifar import Split
from recurrent_vit.evaluate import evaluate, parse_horizons, rebuild

SMALL = {"embed_dim": 16, "num_heads": 2, "num_classes": 10}
HORIZONS = [5, 1, 2]
KEYS = [
    "horizon", "trained_horizon", "solver", "field", "step_size", "precision", "top1", "top1_stderr", "top5", "loss",
    "non_finite", "count", "NFE", "MACs", "parameters", "seconds",
]  # fmt: skip


@pytest.fixture
def split():
    """Random images, an odd number of them; `sharp` gives them their labels."""
    return Split(torch.randint(256, (17, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (17,)))


@pytest.fixture
def sharp(small, split):
    """Build a model, and give the split labels of which about half are its own predictions after three steps."""

    def build(name, **kwargs):
        model = small(name, **{**SMALL, **kwargs})
        nn.init.normal_(model.head.weight)
        model.set_horizon(3)
        with torch.no_grad():
            split.labels[::2] = model(normalize(split.images)).argmax(1)[::2]
        return model

    return build


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def assert_same(rows, expected):
    """Equal but for the time, and for the rounding of the loss."""
    rows, expected = without_time(rows), without_time(expected)
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected):
        assert row.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-6)
        assert row == other


@torch.no_grad()
def naive(model, split, horizon):
    """The rows' statistics from one image at a time, with floats and sorting."""
    top1 = top5 = loss = 0
    for image, label in zip(split.images, split.labels.tolist()):
        z = model.initial_state(normalize(image[None]))
        for _ in range(horizon):
            z = model.step(z)
        logits = model.forward_head(model.norm(z))[0].tolist()
        order = sorted(range(len(logits)), key=lambda c: -logits[c])
        top1 += label == order[0]
        top5 += label in order[:5]
        loss += math.log(math.fsum(math.exp(y) for y in logits)) - logits[label]
    n = len(split)
    return {"top1": top1 / n, "top5": top5 / n, "loss": loss / n, "top1_stderr": (top1 * (n - top1) / n**3) ** 0.5}


# ---- accuracy --------------------------------------------------------------------------------------------------------


def test_every_name_agrees_with_a_loop_over_pictures(name, sharp, split):
    model = sharp(name, **({"depth": 2} if name == "vit_cifar" else {}))
    rows = list(evaluate(model, split, horizons=HORIZONS, batch_size=8, progress=True))
    assert [row["horizon"] for row in rows] == sorted(HORIZONS)
    seen = set()
    for row in rows:
        assert list(row) == KEYS
        for key, value in naive(model, split, row["horizon"]).items():
            assert row[key] == pytest.approx(value, rel=1e-5), key
        assert (row["count"], row["non_finite"]) == (len(split), 0)
        assert row["trained_horizon"] == model.steps * model.stages
        ran = (row["solver"], row["field"], row["step_size"], row["precision"])
        assert ran == (model.solver, model.field, model.step_size, "fp32")
        assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert row["seconds"] > 0
        seen.add(row["top1"])
        model.set_horizon(row["horizon"])
        assert (row["NFE"], row["MACs"]) == (model.nfe, model.macs)
    assert len(seen) > 1, "the horizons differ, or the test sees nothing"
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_the_default_is_the_horizon_of_the_model(sharp, split):
    model = sharp("bvit")
    rows = list(evaluate(model, split))
    assert [row["horizon"] for row in rows] == [3]
    assert rows[0]["top1"] == (model(normalize(split.images)).argmax(1) == split.labels).double().mean()
    assert 0.5 < rows[0]["top1"] < 0.8


def test_one_pass_is_several_passes(sharp, split):
    model = sharp("bvit", depth=2, steps=2)
    rows = list(evaluate(model, split, horizons=HORIZONS))
    assert_same(rows, [next(evaluate(model, split, horizons=[horizon])) for horizon in sorted(HORIZONS)])


def test_repeated_horizons_give_one_row(sharp, split):
    model = sharp("bvit")
    assert_same(evaluate(model, split, horizons=[2, 1, 2]), list(evaluate(model, split, horizons=(1, 2))))


@pytest.mark.parametrize("batch_size", [1, 7, 17, 1000])
def test_batch_size_plays_no_part(sharp, split, batch_size):
    model = sharp("bvit")
    rows = list(evaluate(model, split, horizons=HORIZONS, batch_size=batch_size))
    assert_same(rows, list(evaluate(model, split, horizons=HORIZONS)))


def test_each_step_is_taken_once(sharp, split, monkeypatch):
    model, calls = sharp("bvit"), []
    step = model.step
    monkeypatch.setattr(model, "step", lambda z: calls.append(len(z)) or step(z))
    list(evaluate(model, split, horizons=[1, 4, 6], batch_size=10))
    assert calls == [10] * 6 + [7] * 6


@pytest.mark.parametrize("classes", [1, 3])
def test_fewer_than_five_classes(sharp, split, classes):
    model = sharp("bvit", num_classes=classes)
    (row,) = evaluate(model, Split(split.images, split.labels % classes))
    assert row["top5"] == 1
    assert row["top1"] == 1 or classes > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pictures_come_in_the_dtype_of_the_model(sharp, split, dtype):
    model = sharp("bvit").to(dtype)
    (row,) = evaluate(model, split)
    assert row["top1"] == (model(normalize(split.images).to(dtype)).argmax(1) == split.labels).double().mean()


def test_bf16_is_autocast(sharp, split):
    model = sharp("bvit")
    (row,) = evaluate(model, split, precision="bf16")
    (exact,) = evaluate(model, split)
    assert row["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert row["loss"] != exact["loss"]
    assert model.head.weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(evaluate(model, split), [exact])


def test_evaluation_inside_an_autocast_leaves_training_intact(sharp, split):
    model, images = sharp("bvit"), normalize(split.images[:1])
    with torch.autocast("cpu", torch.bfloat16):
        list(evaluate(model, split[:4], precision="bf16"))
        model(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---- outputs that are not finite -------------------------------------------------------------------------------------


def test_a_black_box_field_that_overflows_counts_as_wrong(sharp, split):
    model = sharp("bvit_ode_rk4", field="black_box")
    first, last = evaluate(model, split, horizons=[1, 150])
    assert (first["non_finite"], last["non_finite"]) == (0, len(split))
    assert (last["top1"], last["top5"], last["top1_stderr"], last["loss"]) == (0, 0, 0, None)
    assert last["count"] == len(split)
    json.dumps(last, allow_nan=False)


def test_a_picture_with_any_logit_not_finite_is_wrong():
    logits = torch.zeros(1, 6, 3)
    logits[..., 0] = 2.0  # every image would be right
    logits[0, 1, 1] = math.nan
    logits[0, 2, 0] = math.inf
    logits[0, 3, 2] = -math.inf
    totals = dict(zip(module.COLUMNS, module.tally(logits, torch.zeros(6, dtype=torch.int64))[0].tolist()))
    loss = math.log(math.exp(2) + 2) - 2
    assert totals == {"count": 6, "finite": 3, "top1": 3, "top5": 3, "loss": pytest.approx(3 * loss)}
    row = module.statistics(**totals)
    assert (row["top1"], row["non_finite"]) == (0.5, 3)
    assert row["loss"] == pytest.approx(loss)


def test_the_loss_of_huge_finite_logits_is_finite():
    logits = torch.tensor([[[-3e38, 3e38]]])
    totals = dict(zip(module.COLUMNS, module.tally(logits, torch.tensor([0]))[0].tolist()))
    assert totals["finite"] == 1
    assert totals["loss"] == pytest.approx(6e38)


# ---- the model is left as it was -------------------------------------------------------------------------------------


def snapshot(model):
    hooks = {name: list(part._forward_hooks) for name, part in model.named_modules()}
    modes = {name: part.training for name, part in model.named_modules()}
    return hooks, modes, model.horizon, dict(model._model_args), {p: v.clone() for p, v in model.state_dict().items()}


def assert_unchanged(model, before):
    after = snapshot(model)
    assert after[:-1] == before[:-1]
    for name, value in before[-1].items():
        assert torch.equal(after[-1][name], value), name


def in_mixed_mode(model):
    model.train()
    model.patch_embed.eval()
    model.taps[2].register_forward_hook(lambda *_: None)
    return model


def test_the_model_is_left_as_it_was(sharp, split):
    model = in_mixed_mode(sharp("bvit", drop_rate=0.5, proj_drop_rate=0.5))
    before = snapshot(model)
    rows = evaluate(model, split, horizons=[1, 5], precision="bf16")
    first = next(rows)
    assert_unchanged(model, before)  # already between two rows
    again = next(evaluate(model, split, horizons=[1], precision="bf16"))
    assert first["loss"] == pytest.approx(again["loss"]), "dropout was on"
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_the_model_is_left_as_it_was_when_the_pass_fails(sharp, split, monkeypatch):
    model = in_mixed_mode(sharp("bvit"))
    before = snapshot(model)

    def fail(z):
        assert not model.blocks.training
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.blocks[0], "forward", lambda z, *_: fail(z))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(evaluate(model, split))
    assert_unchanged(model, before)
    assert torch.is_grad_enabled()


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"horizons": [0]}, r"horizon=0 must be an integer from 1 to 10000"),
        ({"horizons": [1, 20_000]}, r"horizon=20000 must be"),
        ({"horizons": [1.5]}, r"horizon=1.5 must be"),
        ({"horizons": []}, r"horizons is empty"),
        ({"precision": "fp16"}, r"precision='fp16' is unknown; known precisions: fp32, bf16"),
        ({"batch_size": 0}, r"batch_size must be >= 1; got 0"),
    ],
)
def test_arguments_out_of_range_are_named_at_the_call(small, split, kwargs, message):
    with pytest.raises(ValueError, match=message):
        evaluate(small("bvit"), split, **kwargs)


def test_a_model_or_split_that_does_not_fit_is_named(small, split):
    model = small("bvit", num_classes=3)
    with pytest.raises(ValueError, match=r"labels from \d to \d, the model num_classes=3"):
        evaluate(model, split)
    with pytest.raises(ValueError, match=r"labels from -1 to"):
        evaluate(model, Split(split.images, split.labels % 3 - 1))
    with pytest.raises(ValueError, match=r"images of shape \(3, 32, 32\), the model takes \(3, 64, 64\)"):
        evaluate(small("bvit", img_size=64), split)
    with pytest.raises(ValueError, match=r"images of shape \(3, 32, 32\), the model takes \(1, 32, 32\)"):
        evaluate(small("bvit", in_chans=1), split)
    with pytest.raises(ValueError, match="split is empty"):
        evaluate(model, split[:0])
    with pytest.raises(ValueError, match="must be a RecurrentVisionTransformer, not wrapped in another; got Linear"):
        evaluate(nn.Linear(1, 1), split)
    model.prune_intermediate_layers([3], prune_head=False)
    with pytest.raises(ValueError, match="this model was pruned to its first 4 states"):
        evaluate(model, split)


def test_other_sizes_of_pictures_where_the_model_takes_them(small, split):
    model = small("bvit", img_size=64, dynamic_img_size=True)
    (row,) = evaluate(model, split)
    assert row["count"] == len(split)


@pytest.mark.parametrize(
    ("text", "steps"), [("12", (12,)), ("1,2,4,12", (1, 2, 4, 12)), (" 4, 1 ,4", (1, 4)), ("010000", (10_000,))]
)
def test_parse_horizons(text, steps):
    assert parse_horizons(text) == steps


@pytest.mark.parametrize("text", ["", ",", "1,,2", "1 2", "-1", "1.5", "twelve", "1-4", "²"])
def test_parse_horizons_names_what_is_no_number(text):
    with pytest.raises(ValueError, match=r"horizon='.*': '.*' is not a whole number; give steps like 1,2,4,12"):
        parse_horizons(text)


@pytest.mark.parametrize("text", ["0", "1,10001"])
def test_parse_horizons_names_what_is_out_of_range(text):
    with pytest.raises(ValueError, match="horizon="):
        parse_horizons(text)


# ---- several processes -----------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import sys, time
import timm, torch, torch.distributed as dist
import recurrent_vit
from recurrent_vit.cifar import Split
from recurrent_vit.evaluate import evaluate

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
model = timm.create_model("bvit", **given["arguments"])
model.load_state_dict(given["weights"])
split = Split(given["images"], given["labels"])
# 17 images in batches of 2 x 4: the last has one, which leaves the other process without
start = time.perf_counter()
rows = [list(evaluate(model, split[:n], horizons=given["horizons"], batch_size=4)) for n in given["sizes"]]
torch.save((rows, start, time.perf_counter()), f"{folder}/result{rank}.pt")
dist.destroy_process_group()
"""


def run_two_processes(script, folder):
    """Run the script twice at once, with the folder and the rank as arguments; what each saved as resultN.pt."""
    command = [sys.executable, "-c", script, str(folder)]
    processes = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"result{rank}.pt") for rank in range(2)]


def test_two_processes_count_every_picture_once(sharp, split, tmp_path):
    model, sizes = sharp("bvit"), (17, 15, 1)
    given = {
        "arguments": SMALL,
        "weights": model.state_dict(),
        "images": split.images,
        "labels": split.labels,
        "horizons": HORIZONS,
        "sizes": sizes,
    }
    torch.save(given, tmp_path / "given.pt")
    (first, *times), (second, *others) = run_two_processes(TWO_PROCESSES, tmp_path)
    assert first == second, "time included"
    # no pass begins in one process before the other has ended the one before, by the clock of the system
    assert 0 < sum(rows[0]["seconds"] for rows in first) <= max(times + others) - min(times + others)
    for size, rows in zip(sizes, first, strict=True):
        assert rows[0]["count"] == size
        assert_same(rows, list(evaluate(model, split[:size], horizons=HORIZONS)))


# ---- other solvers ---------------------------------------------------------------------------------------------------


def test_rebuilt_without_a_change_it_is_the_same_function(name, small, images):
    model = small(name, drop_rate=0.3)
    model.set_horizon(2)
    before = snapshot(model)
    twin = rebuild(model)
    assert type(twin) is type(model)
    assert torch.equal(twin(images), model(images))
    assert (twin.horizon, twin.steps, twin.stages, twin.training) == (2, model.steps, model.stages, False)
    assert twin.head_drop.p == 0.3
    with torch.no_grad():
        twin.head.weight.zero_()
    assert_unchanged(model, before)


@pytest.mark.parametrize("solver", ["plain", "euler", "heun2", "rk4"])
def test_rebuilt_under_another_solver_it_is_the_model_made_so(small, images, solver):
    model = small("bvit_ode_heun")
    made = timm.create_model("bvit_ode_heun", **{**SMALL, "embed_dim": 32, "num_heads": 4}, solver=solver).eval()
    made.load_state_dict(model.state_dict())
    assert torch.equal(rebuild(model, solver=solver)(images), made(images))


def test_rebuilt_field_and_step_size(small, images):
    model = small("bvit")
    twin = rebuild(rebuild(model, solver="euler", field="black_box", step_size=0.25), step_size=0.5)
    assert (twin.solver, twin.field, twin.step_size) == ("euler", "black_box", 0.5)
    back = rebuild(twin, field="state_subtracted", step_size=1.0)
    assert torch.equal(back(images), rebuild(model, solver="euler")(images))


def test_rebuilt_after_changes_and_from_a_folder(small, images, tmp_path):
    model = small("bvit", img_size=64)
    model.reset_classifier(7)
    model.set_input_size((32, 32))
    model = model.double().train()
    twin = rebuild(model, solver="rk4")
    assert (twin.num_classes, twin.training, twin.head.weight.dtype) == (7, True, torch.float64)
    assert twin(images.double()).shape == (4, 7)
    timm.models.save_for_hf(model.float(), tmp_path, safe_serialization="both")
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(rebuild(loaded)(images), loaded(images))


def test_rebuild_names_what_is_wrong(small):
    model = small("bvit_ode_euler", field="black_box")
    with pytest.raises(ValueError, match="solver='rk5' is unknown"):
        rebuild(model, solver="rk5")
    with pytest.raises(ValueError, match=r"field='black_box', step_size=1\.0: solver='plain' takes neither a field"):
        rebuild(model, solver="plain")
    with pytest.raises(ValueError, match="step_size=0 must be a number above 0"):
        rebuild(model, step_size=0)
    with pytest.raises(ValueError, match=r"not built by timm\.create_model"):
        rebuild(RecurrentVisionTransformer(**SMALL, img_size=32, patch_size=8))
    model.prune_intermediate_layers([3])
    with pytest.raises(ValueError, match="this model was pruned"):
        rebuild(model)


def test_more_states_than_there_may_be_are_refused_at_the_call():
    model = timm.create_model("bvit", embed_dim=16, num_heads=2, depth=40)
    split = Split(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="horizon=501 steps of depth=40 blocks"):
        evaluate(model, split, horizons=[1, 501])
