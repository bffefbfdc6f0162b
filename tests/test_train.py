"""Training: growth from leg to leg, optimizer groups, whitening, and runs that survive."""

import copy
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import timm
import timm.optim.muon
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from recurrent_vit import augment, cifar, machine, runs, train
from recurrent_vit.recipes import RECIPES, Phase, make_plan

TINY = {"embed_dim": 16, "num_heads": 2, "num_classes": 4}
RECIPE = replace(
    RECIPES["short"],
    name="tiny",
    phases=(
        Phase(0.5, 16, Fraction(1, 2), batch_size=8, micro_batch=4, padding=2),
        Phase(0.5, 32, Fraction(1), batch_size=4, micro_batch=4, padding=4, ema=True),
    ),
    dropout=0.1,
    publish="ema",
)
PFLOP = 1e-6  # some ten updates of the tiny model


def pictures(count=40):
    """Noise in four shades of grey, the shade being the class."""
    labels = torch.arange(count) % 4
    noise = torch.randint(64, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return cifar.Split(noise + (64 * labels).to(torch.uint8)[:, None, None, None], labels)


def fit(out, name="bvit", recipe=RECIPE, split=None, **kwargs):
    arguments = {"pflop": PFLOP, "model_kwargs": TINY, "checkpoint_seconds": 0.0, **kwargs}
    return train.fit(name, recipe, pictures() if split is None else split, out, **arguments)


# ---- growth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("bvit", {"steps": 6}, {"steps": 12}),
        ("vit_cifar", {"depth": 6}, {"depth": 12}),
        ("bvit_ds", {"stages": 2}, {"stages": 4}),
        ("bvit_ode_heun", {"steps": 3, "step_size": 2.0}, {"steps": 6, "step_size": 1.0}),
        ("bvit_ode_rk4", {"steps": 2, "step_size": 1.5}, {"steps": 3, "step_size": 1.0}),
        ("bvit_ode_euler", {"steps": 3}, {"steps": 12}),
    ],
)
def test_growth_keeps_the_flow(small, images, name, before, after):
    old, new = small(name, **before), small(name, **after)
    with torch.no_grad():
        for block in old.blocks:  # small steps, where the flow does not depend on their number
            block.attn.proj.weight.mul_(0.1), block.mlp.fc2.weight.mul_(0.1)
            block.attn.proj.bias.mul_(0.1), block.mlp.fc2.bias.mul_(0.1)
    train.grow(old, new)
    start = old.initial_state(images)
    end = old.forward_features(images)
    moved = (end - old.norm(start)).norm()
    assert (new.forward_features(images) - end).norm() < 0.05 * moved
    assert moved > 0.05 * end.norm()


def test_growth_says_where_each_parameter_comes_from(small):
    old, new = small("vit_cifar", depth=2), small("vit_cifar", depth=4)
    sources = train.grow(old, new)
    assert set(sources) == {name for name, _ in new.named_parameters()}
    assert [sources[f"blocks.{i}.norm1.weight"] for i in range(4)] == [
        "blocks.0.norm1.weight", "blocks.0.norm1.weight", "blocks.1.norm1.weight", "blocks.1.norm1.weight"
    ]  # fmt: skip
    assert torch.equal(new.blocks[3].mlp.fc2.bias, old.blocks[1].mlp.fc2.bias / 2)
    assert torch.equal(new.blocks[3].attn.qkv.weight, old.blocks[1].attn.qkv.weight)


# ---- optimizer, whitening --------------------------------------------------------------------------------------------


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(name):
    model = timm.create_model(name, **TINY)
    optimizer = train.make_optimizer(model, RECIPES["short"])
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    groups = [sorted(names.pop(id(p)) for p in group["params"]) for group in optimizer.param_groups]
    assert not names
    muon, decayed, rest = groups
    parts = ("attn.qkv", "attn.proj", "mlp.fc1_g", "mlp.fc1_x", "mlp.fc2")
    assert muon == sorted(f"blocks.{i}.{part}.weight" for i in range(model.depth) for part in parts)
    assert decayed == ["head.weight", "patch_embed.proj.weight"]
    assert "pos_embed" in rest
    assert all(key.endswith("bias") or "norm" in key or key == "pos_embed" for key in rest)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.05, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 2e-3, 2e-3]


def test_muon_orthogonalises_in_fp32_on_a_cpu():
    # against the same update in fp64: what bfloat16 makes of it differs in the third digit
    parameter = torch.nn.Parameter(torch.randn(24, 16, generator=torch.Generator().manual_seed(0)))
    parameter.grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    before, x = parameter.detach().double(), parameter.grad.double().T
    x = x / x.norm()  # the first update is a multiple of the gradient, Nesterov or not
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    expected = before * (1 - 0.1 * 0.05) - 0.1 * 0.2 * 24**0.5 * x.T
    rule = timm.optim.muon.zeropower_via_newtonschulz
    optimizer = train.Muon([{"params": [parameter], "use_muon": True}], lr=0.1, weight_decay=0.05, **train.MUON)
    optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=1e-6)
    assert timm.optim.muon.zeropower_via_newtonschulz is rule  # timm's own is as it was
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert timm.optim.muon.zeropower_via_newtonschulz is rule


def test_the_paper_trains_everything_with_adamw():
    optimizer = train.make_optimizer(timm.create_model("bvit", **TINY), RECIPES["paper"])
    assert type(optimizer) is torch.optim.AdamW
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 0.05), (1e-3, 0.0)]


def test_whitened_tokens_have_equal_variance_in_every_direction_of_the_patches():
    model = timm.create_model("bvit", embed_dim=64, num_heads=2)
    images = torch.randn(500, 3, 32, 32)
    images = images + images.roll(1, -1) + images.mean(1, keepdim=True)  # neighbours and channels correlate
    tokens = model.patch_embed(images) - model.patch_embed.proj.bias
    train.whiten(model, images, epsilon=0.0)
    whitened = model.patch_embed(images) - model.patch_embed.proj.bias
    assert whitened.std().item() == pytest.approx(tokens.std().item(), rel=1e-3)
    variances = torch.linalg.eigvalsh(torch.cov(whitened.flatten(0, 1).T))[-48:]
    assert variances.max() / variances.min() < 1.01
    assert model.patch_embed.proj.weight.requires_grad


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_weights_history_picture_and_facts(tmp_path, name):
    model = fit(tmp_path, name)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    rows = list(runs.read_history(tmp_path))
    assert rows[-1]["pflop"] == pytest.approx(PFLOP, rel=0.3)
    assert [row["update"] for row in rows] == sorted(row["update"] for row in rows)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["name"], facts["seed"], facts["images"]) == (name, 0, 40)
    assert (tmp_path / "history.png").read_bytes()[:4] == b"\x89PNG"
    assert len(runs.find_checkpoints(tmp_path)) == 2
    assert not list(tmp_path.glob(".*"))
    assert not runs.load_result(tmp_path).training
    assert torch.__version__.startswith(facts["versions"]["torch"])
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert facts["seconds"] == pytest.approx(rows[-1]["seconds"], abs=0.1)
    for row, leg in [(row, make_plan(name, RECIPE, 40, PFLOP, **TINY)[row["leg"]]) for row in rows]:
        gflop_per_second = row["images_per_second"] * leg.flop_per_image / 1e9
        assert row["gflop_per_second"] == pytest.approx(gflop_per_second, abs=0.06)  # both are rounded to a tenth


def test_the_loss_falls(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LOG_SECONDS", 0.0)
    fit(tmp_path, pflop=4e-5, checkpoint_seconds=1e9, recipe=replace(RECIPE, dropout=0.0, label_smoothing=0.0))
    losses = [row["loss"] for row in runs.read_history(tmp_path)]
    assert sum(losses[-10:]) / 10 < 0.5 * sum(losses[:10]) / 10


def test_another_seed_is_another_run_and_the_same_seed_the_same(tmp_path):
    first, again, other = (fit(tmp_path / str(i), seed=seed).state_dict() for i, seed in enumerate((0, 0, 1)))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_train
from recurrent_vit import runs
point, number, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def die(): os.kill(os.getpid(), int(sys.argv[4]))
if point == "update":
    call = runs.Reporter.__call__
    def report(self, *arguments):
        call(self, *arguments)
        if self.done == number: die()
    runs.Reporter.__call__ = report
else:
    sync, calls = os.fsync, []
    def fsync(file):
        sync(file); calls.append(file)
        if len(calls) == number: die()
    os.fsync = fsync
test_train.fit(out, checkpoint_seconds=float(sys.argv[5]), resume=True)
"""


def run_and_kill(out, point, number, number_of_signal, checkpoint_seconds=0.0):
    script = SCRIPT.format(tests=os.path.dirname(__file__))
    arguments = [point, str(number), str(out), str(int(number_of_signal)), str(checkpoint_seconds)]
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    fit(folder)
    return folder


def assert_same_run(folder, reference):
    ours, theirs = load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    updates = [row["update"] for row in runs.read_history(folder)]
    assert updates == sorted(set(updates))


@pytest.mark.parametrize(
    ("point", "number", "checkpoint_seconds"),
    [("update", 1, 1e9), ("update", 5, 0.0), ("update", 9, 1e9), ("fsync", 6, 0.0)],
    ids=["before the first checkpoint", "between updates", "far from a checkpoint", "inside a write"],
)
def test_a_killed_run_resumes_to_bitwise_the_same_weights(tmp_path, uninterrupted, point, number, checkpoint_seconds):
    killed = run_and_kill(tmp_path, point, number, signal.SIGKILL, checkpoint_seconds)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "model.safetensors").exists()
    fit(tmp_path, resume=True)
    assert_same_run(tmp_path, uninterrupted)
    assert not list(tmp_path.glob(".*"))


def test_sigterm_writes_a_checkpoint_and_says_how_to_go_on(tmp_path, uninterrupted):
    stopped = run_and_kill(tmp_path, "update", 3, signal.SIGTERM, checkpoint_seconds=1e9)
    assert stopped.returncode == 1
    assert "Interrupted: stopped by SIGTERM after update 3 of" in stopped.stderr
    assert [path.name[:19] for path in runs.find_checkpoints(tmp_path)] == ["checkpoint-00000003"]
    fit(tmp_path, resume=True)
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_is_not_written_over(uninterrupted):
    with pytest.raises(FileExistsError, match="holds a run already; give --resume"):
        fit(uninterrupted)


def test_two_runs_do_not_share_a_folder(tmp_path):
    with (
        runs.open_folder(tmp_path, resume=False),
        pytest.raises(FileExistsError, match="another process is training in"),
    ):
        fit(tmp_path)
    fit(tmp_path)


def test_a_finished_run_resumes_to_its_own_result(uninterrupted):
    before = (uninterrupted / "model.safetensors").read_bytes()
    fit(uninterrupted, resume=True)
    assert (uninterrupted / "model.safetensors").read_bytes() == before


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoints_before_it(tmp_path, monkeypatch):
    backward, calls = train.backward_stages, []

    def poisoned(*arguments, **kwargs):
        calls.append(1)
        loss, logits = backward(*arguments, **kwargs)
        return loss * (float("nan") if len(calls) > 6 else 1), logits

    monkeypatch.setattr(train, "backward_stages", poisoned)
    with pytest.raises(FloatingPointError, match=r"the loss is nan .* the last checkpoint in .* is from before"):
        fit(tmp_path)
    [_, last] = runs.find_checkpoints(tmp_path)
    assert all(value.isfinite().all() for value in runs.load_checkpoint(last)["model"].values())


def test_weights_that_are_not_finite_are_never_written(tmp_path, monkeypatch):
    set_rates = train._set_rates

    def explode(job, state):
        set_rates(job, state)
        for group in state.optimizer.param_groups:
            group["lr"] = float("inf") if train._done(job, state) == 3 else group["lr"]

    monkeypatch.setattr(train, "_set_rates", explode)
    with pytest.raises(FloatingPointError, match="weights are not finite after update 4"):
        fit(tmp_path)
    assert [path.name[:19] for path in runs.find_checkpoints(tmp_path)] == [
        "checkpoint-00000002",
        "checkpoint-00000003",
    ]


def test_a_full_disk_leaves_the_last_checkpoints_whole_and_nothing_half_written(tmp_path, monkeypatch):
    sync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) == 6:
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path)
    monkeypatch.undo()
    paths = runs.find_checkpoints(tmp_path)
    assert len(paths) == 2
    for path in paths:
        runs.load_checkpoint(path)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fit(tmp_path / "file" / "run")


@pytest.mark.parametrize("damage", ["flip", "cut", "rename"])
def test_a_damaged_checkpoint_is_refused_with_the_way_out(tmp_path, damage):
    fit(tmp_path)
    path = runs.find_checkpoints(tmp_path)[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= damage == "flip"
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    if damage == "rename":
        path.rename(path.with_name(path.name[:20] + "00000000.pt"))
    with pytest.raises(ValueError, match=r"is damaged or not a checkpoint of ours.*remove it to resume from the"):
        fit(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"pflop": 2e-6}, "pflop"),
        ({"precision": "bf16"}, "precision"),
        ({"name": "bvit_ds"}, "name"),
        ({"model_kwargs": {**TINY, "drop_path_rate": 0.1}}, "model_kwargs"),
        ({"recipe": replace(RECIPE, label_smoothing=0.2)}, "settings"),
        ({"split": pictures(44)}, "images"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, key):
    fit(tmp_path)
    with pytest.raises(ValueError, match=f"is of another run: its {key} is"):
        fit(tmp_path, resume=True, **change)


def test_bf16_keeps_float32_weights_and_trains_near_fp32(tmp_path):
    model = fit(tmp_path / "bf16", precision="bf16")
    reference = fit(tmp_path / "fp32")
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all()
    assert not torch.equal(model.head.weight, reference.head.weight)
    torch.testing.assert_close(model.pos_embed, reference.pos_embed, rtol=0, atol=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from inside torch.compile
def test_compiled_blocks_train_as_eager_ones_do(tmp_path, monkeypatch):
    compiled = []
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: (compiled.append(self), real(self, backend="eager")))
    model = fit(tmp_path / "compiled", compile=True)
    assert len(compiled) == 2  # one block in each of two legs
    eager = fit(tmp_path / "eager").state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, eager[key], rtol=1e-5, atol=1e-6)


def _one_of_two(rank, folder, out):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    fit(out, recipe=replace(RECIPE, dropout=0.0))
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one_does(tmp_path):
    torch.multiprocessing.spawn(_one_of_two, (tmp_path, tmp_path / "two"), nprocs=2)
    fit(tmp_path / "one", recipe=replace(RECIPE, dropout=0.0))
    one, two = (load_file(tmp_path / key / "model.safetensors") for key in ("one", "two"))
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=0, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}")
    assert [row["update"] for row in runs.read_history(tmp_path / "two")] == [
        row["update"] for row in runs.read_history(tmp_path / "one")
    ]


@pytest.mark.parametrize("publish", ["raw", "ema"])
def test_a_run_is_the_recipe_by_hand(tmp_path, publish):
    recipe = replace(RECIPE, publish=publish, clip=0.05, warmup=0.3, hold=0.5)  # so that each of them shows here
    ran = fit(tmp_path, recipe=recipe, seed=3).state_dict()

    split, done, old, losses = pictures(), 0, None, []
    plan = make_plan("bvit", recipe, len(split), PFLOP, **TINY)
    budget = sum(leg.flop for leg in plan)
    torch.manual_seed(3)
    for leg in plan:
        model = timm.create_model(
            "bvit", **TINY, steps=leg.model_args["steps"], dynamic_img_size=True, proj_drop_rate=0.1
        ).train()
        if old is None:
            train.whiten(model, augment.normalize(split.images))
            model.head.weight.data *= 0.1
        optimizer = train.make_optimizer(model, recipe)
        if old is not None:
            train.grow(old[0], model)
            optimizer.load_state_dict(old[1].state_dict())
        average, update = copy.deepcopy(model).requires_grad_(False), 0
        size, epoch = leg.phase.batch_size, leg.first_epoch
        look = augment.Augmentation(padding=leg.phase.padding, flip="alternating", size=leg.phase.size)
        while update < leg.updates:
            for batch in cifar.batches(split, size, epoch=epoch, seed=3, augmentation=look, drop_last=True):
                factor = recipe.learning_rate((leg.spent + update * leg.flop_per_image * size) / budget)
                muon, *adamw = optimizer.param_groups
                muon["lr"], muon["momentum"] = 3e-3 * factor, 0.85 + 0.10 * done / 300
                for group in adamw:
                    group["lr"] = 2e-3 * factor
                torch.manual_seed(int(np.random.SeedSequence((3, done, 0)).generate_state(1)[0]))
                optimizer.zero_grad()
                losses.append(0.0)
                for i in range(0, size, leg.phase.micro_batch):
                    part = slice(i, i + leg.phase.micro_batch)
                    loss = cross_entropy(model(batch.images[part]), batch.labels[part], label_smoothing=0.1)
                    losses[-1] += loss.item() * leg.phase.micro_batch / size
                    (loss * leg.phase.micro_batch / size).backward()
                torch.nn.utils.clip_grad_norm_([p for group in adamw for p in group["params"]], 0.05)
                optimizer.step()
                decay = min(0.99, update / (10 + update))
                for mean, parameter in zip(average.parameters(), model.parameters()):
                    mean.lerp_(parameter.detach(), 1 - decay)
                update, done = update + 1, done + 1
                if update == leg.updates:
                    break
            epoch += 1
        old = model, optimizer
    assert [row["loss"] for row in runs.read_history(tmp_path)] == pytest.approx(losses, abs=2e-5)
    for key, value in (average if publish == "ema" else model).state_dict().items():
        torch.testing.assert_close(ran[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_a_resumed_run_writes_the_history_after_its_checkpoint_again(tmp_path, monkeypatch):
    fit(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    updates = [row["update"] for row in runs.read_history(tmp_path)]
    assert updates == list(range(1, updates[-1] + 1))
    runs.find_checkpoints(tmp_path)[-1].unlink()
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"update": 12, "lo')  # as a process that is killed leaves it
    trained, update = [], train._update
    monkeypatch.setattr(train, "_update", lambda *arguments: (trained.append(1), update(*arguments))[1])
    fit(tmp_path, resume=True)
    assert [row["update"] for row in runs.read_history(tmp_path)] == updates
    assert (tmp_path / "model.safetensors").read_bytes() == weights  # the average, too, went on from where it was
    assert trained == [1]  # from the last checkpoint, not from one before it
    fit(tmp_path, resume=True)
    assert trained == [1]  # and a finished run trains no more


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_in_a_file_is_written_once_a_minute(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    stream.isatty = lambda: terminal
    plan = make_plan("bvit", RECIPE, 40, 1000 * PFLOP, **TINY)
    with runs.Reporter(tmp_path, plan, 0, 0, 0.0) as report:
        for update in range(1, 6):
            time.sleep(0.2)
            report(
                0, 500 * update, torch.zeros(()), 10.0 * update, 1.0
            )  # seconds of training: a line of the history each
        shown = stream.getvalue().count("\r")
    assert len(list(runs.read_history(tmp_path))) == 5
    assert shown == (6 if terminal else 1)  # the first is the empty bar


def test_a_history_without_a_checkpoint_is_a_run_too(tmp_path):
    (tmp_path / "history.jsonl").write_text("")
    fit(tmp_path, pflop=1e-7 * 5)  # a process that came to nothing leaves an empty one
    for path in runs.find_checkpoints(tmp_path):
        path.unlink()
    with pytest.raises(FileExistsError, match="holds a run already"):
        fit(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"name": 1, "model_kwargs": {}}', '{"name": "resnet18", "model_kwargs": {}}',
     '{"name": "bvit", "model_kwargs": {"stepz": 1}}', '{"name": "bvit", "model_kwargs": {"steps": 1000000000}}',
     '{"name": "bvit", "model_kwargs": {"checkpoint_path": "/etc/passwd"}}', '{"name": "bvit", "model_kwargs": {}}'],
)  # fmt: skip
def test_a_folder_with_foreign_files_is_refused_by_name(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"run\.json and model\.safetensors are not those of a run"):
        runs.load_result(tmp_path)


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_bad_seed_is_refused_before_a_folder_is_made(tmp_path, seed):
    with pytest.raises(ValueError, match=f"seed={seed} must be from 0"):
        fit(tmp_path / "run", seed=seed)
    assert not (tmp_path / "run").exists()


def test_signals_are_noted_once_and_handed_back():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        with machine.stop_signals() as stopped:
            assert stopped() == ""
            signal.raise_signal(number)
            assert stopped() == number.name
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert [signal.getsignal(number) for number in numbers] == before


class Hostile:
    def __reduce__(self):
        return os.getcwd, ()


def test_a_checkpoint_runs_no_code(tmp_path):
    runs.save_checkpoint(tmp_path, 1, {"run": Hostile()})
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        runs.load_checkpoint(runs.find_checkpoints(tmp_path)[0])


def test_processes_take_different_parts_of_a_batch_and_different_dropout(monkeypatch):
    split = pictures()
    plan = make_plan("bvit", RECIPE, len(split), PFLOP, **TINY)
    job = train.Job("bvit", TINY, RECIPE, plan, split, 0, torch.device("cpu"), "fp32", False)
    state = train.State(0, 0, None, None, None)
    whole, *parts = ([], [], [])
    seeds = set()
    for place, batches in (((0, 1), whole), ((0, 2), parts[0]), ((1, 2), parts[1])):
        monkeypatch.setattr(machine, "place", lambda place=place: place)
        batches.extend(train._batches(job, plan[0], 0))
        seeds.add((place, train._dropout_seed(job, state)))
    assert len({seed for place, seed in seeds if place[1] == 2}) == 2
    for batch, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([first.images, second.images]), batch.images)
        assert torch.equal(torch.cat([first.labels, second.labels]), batch.labels)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model_kwargs": {**TINY, "img_size": 64}}, r"images of shape \(3, 32, 32\), the model takes \(3, 64, 64\)"),
        ({"model_kwargs": {**TINY, "in_chans": 1}}, r"the model takes \(1, 32, 32\)"),
        ({"model_kwargs": {**TINY, "num_classes": 3}}, "labels from 0 to 3, the model num_classes=3"),
        ({"model_kwargs": {**TINY, "scriptable": True}}, r"model_kwargs: scriptable is not an argument of the model"),
        ({"precision": "fp16"}, "precision='fp16' is unknown; known precisions: fp32, bf16"),
    ],
)
def test_what_does_not_fit_is_told_before_the_training(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "run", **kwargs)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("asked", "rate"), [({}, 0.1), ({"proj_drop_rate": 0.3}, 0.3)])
def test_dropout_is_that_of_the_recipe_unless_the_model_is_given_another(asked, rate):
    kwargs = {**TINY, **asked}
    plan = make_plan("bvit", RECIPE, 40, PFLOP, **kwargs)
    job = train.Job("bvit", kwargs, RECIPE, plan, pictures(), 0, torch.device("cpu"), "fp32", compile=False)
    assert job.build(plan[0]).blocks[0].attn.proj_drop.p == rate


def test_the_seconds_are_those_on_the_clock(tmp_path, monkeypatch):
    """An update takes 1 second here, and what is done after each, 10: after the last, nobody asks for the time."""
    now, update, report = [0.0], train._update, runs.Reporter.__call__

    def slow(function, seconds):
        def call(*arguments):
            now[0] += seconds
            return function(*arguments)

        return call

    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train, "_update", slow(update, 1))
    monkeypatch.setattr(runs.Reporter, "__call__", slow(report, 10))
    fit(tmp_path)
    updates = sum(leg.updates for leg in make_plan("bvit", RECIPE, 40, PFLOP, **TINY))
    assert json.loads((tmp_path / "run.json").read_text())["seconds"] == 11 * updates - 10
