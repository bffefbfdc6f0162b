"""The stage-wise loss and its per-stage backward, against naive twins."""

import subprocess
import sys
import weakref

import pytest
import timm
import torch
import torch.nn.functional as F

import recurrent_vit
from recurrent_vit.losses import average_gradients, backward_stages, cross_entropy, stage_loss

ARCHITECTURES = {
    "bvit": {"steps": 3},
    "bvit_ds": {"steps": 2, "stages": 3},
    "bvit_ode_rk4": {"steps": 1, "stages": 2},
    "vit_cifar": {"depth": 2},
}
LABELS = torch.tensor([3, 1, 4, 1])
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14}


def naive_stages(model, images):
    """The K stages written out, with every graph kept."""
    z = model.initial_state(images)
    for _ in range(model.stages):
        for _ in range(model.steps):
            z = model.step(z)
        yield model.forward_head(model.norm(z))
        z = z.detach()


def naive_gradients(model, images, targets, **kwargs):
    """Loss and gradients of the averaged loss, in one backward pass."""
    model.zero_grad()
    loss = sum(F.cross_entropy(logits, targets, **kwargs) for logits in naive_stages(model, images)) / model.stages
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found, expected, tolerance):
    """Every gradient agrees, relative to its own largest value."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, name
        error = (found[name] - gradient).abs().max() / scale
        assert error <= tolerance, f"{name}: {error:.1e}"


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_loss_is_the_formula(label_smoothing):
    stages = torch.randn(3, 4, 10, dtype=torch.float64)
    smooth = (1 - label_smoothing) * F.one_hot(LABELS, 10).double() + label_smoothing / 10
    expected = 0.0
    for logits in stages:
        for y, t in zip(logits, smooth):
            expected += -sum(t[c] * (y[c] - y.exp().sum().log()) for c in range(10)) / 4 / 3
    assert stage_loss(stages, LABELS, label_smoothing=label_smoothing) == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hot_targets_are_labels(label_smoothing, dtype):
    logits = torch.randn(4, 10, dtype=dtype)
    from_labels = cross_entropy(logits, LABELS, label_smoothing)
    torch.testing.assert_close(cross_entropy(logits, F.one_hot(LABELS, 10).to(dtype), label_smoothing), from_labels)
    torch.testing.assert_close(cross_entropy(logits, F.one_hot(LABELS, 10).float(), label_smoothing), from_labels)


def test_mixed_targets_are_the_mixture_of_the_losses():
    logits = torch.randn(4, 10, dtype=torch.float64)
    one, other = F.one_hot(LABELS, 10).double(), F.one_hot(LABELS.flip(0), 10).double()
    mixed = cross_entropy(logits, 0.3 * one + 0.7 * other)
    assert mixed == pytest.approx((0.3 * cross_entropy(logits, one) + 0.7 * cross_entropy(logits, other)).item())


def test_loss_of_half_precision_logits_is_computed_in_single():
    logits = torch.randn(4, 10).bfloat16()
    assert torch.equal(cross_entropy(logits, LABELS), cross_entropy(logits.float(), LABELS))


def test_a_list_a_stack_and_a_generator_of_stages_are_alike(small, images):
    model = small("bvit_ds", **ARCHITECTURES["bvit_ds"])
    stages = list(model.forward_stages(images))
    loss = stage_loss(model.forward_stages(images), LABELS)
    assert loss == stage_loss(stages, LABELS) == stage_loss(torch.stack(stages), LABELS)
    loss.backward()  # it is a loss, not a report of one


def test_no_stages_is_an_error():
    with pytest.raises(ValueError, match="stages is empty"):
        stage_loss([], LABELS)


# ---- the backward pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_the_averaged_loss(small, images, name, dtype):
    model, images = small(name, **ARCHITECTURES[name]).to(dtype), images.to(dtype)
    expected_loss, expected = naive_gradients(model, images, LABELS, label_smoothing=0.1)
    *_, expected_logits = naive_stages(model, images)
    model.zero_grad()
    loss, logits = backward_stages(model, images, LABELS, label_smoothing=0.1)
    assert not loss.requires_grad
    assert not logits.requires_grad
    assert loss == pytest.approx(expected_loss.item(), rel=TOLERANCES[dtype])
    torch.testing.assert_close(logits, expected_logits.detach())
    assert_close(gradients(model), expected, TOLERANCES[dtype])


def test_soft_targets(small, images):
    model = small("bvit_ds", **ARCHITECTURES["bvit_ds"]).double()
    targets = torch.randn(4, 10, dtype=torch.float64).softmax(1)
    expected_loss, expected = naive_gradients(model, images.double(), targets)
    model.zero_grad()
    loss, _ = backward_stages(model, images.double(), targets)
    assert loss == pytest.approx(expected_loss.item(), rel=1e-14)
    assert_close(gradients(model), expected, TOLERANCES[torch.float64])


def test_the_horizon_plays_no_part_in_training(small, images):
    model = small("bvit", steps=3, horizon=2)
    loss, logits = backward_stages(model, images, LABELS)
    model.set_horizon(3)
    assert torch.equal(logits, model(images))
    assert loss == F.cross_entropy(logits, LABELS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_micro_batches_add_up_to_the_batch(small, images, name):
    model, images = small(name, **ARCHITECTURES[name]).double(), images.double()
    backward_stages(model, images, LABELS)
    expected = gradients(model)
    model.zero_grad()
    for part in (slice(0, 3), slice(3, 4)):
        backward_stages(model, images[part], LABELS[part], scale=len(images[part]) / len(images))
    assert_close(gradients(model), expected, TOLERANCES[torch.float64])


def test_scale_does_not_touch_the_loss(small, images):
    model = small("bvit_ds", **ARCHITECTURES["bvit_ds"])
    assert backward_stages(model, images, LABELS, scale=0.25)[0] == backward_stages(model, images, LABELS)[0]


@pytest.mark.parametrize("argument", [True, False], ids=["as an argument", "the caller's"])
@pytest.mark.parametrize("name", ["bvit", "bvit_ds"])
def test_autocast(small, images, name, argument):
    model = small(name, **ARCHITECTURES[name])
    _, expected = naive_gradients(model, images, LABELS)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=not argument):
        loss, logits = backward_stages(model, images, LABELS, autocast=torch.bfloat16 if argument else None)
    found = gradients(model)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found.values())
    total = torch.cat([gradient.flatten() for gradient in expected.values()])
    error = torch.cat([found[key].flatten() for key in expected]) - total
    assert 1e-5 < error.norm() / total.norm() < 0.03


def test_backward_runs_outside_the_autocast_of_the_argument(small, images):
    model, seen = small("bvit_ds"), []
    model.head.weight.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
    backward_stages(model, images[:1], LABELS[:1], autocast=torch.bfloat16)
    assert seen == [False] * model.stages


def test_no_images_is_an_error(small, images):
    with pytest.raises(ValueError, match="images is empty"):
        backward_stages(small("bvit"), images[:0], LABELS[:0])


# ---- memory ----------------------------------------------------------------------------------------------------------


class LiveBytes:
    """Bytes that autograd holds for backward passes to come, parameters aside: now, and at most."""

    def __init__(self, model):
        self.now = self.peak = 0
        parameters = {parameter.data_ptr() for parameter in model.parameters()}

        def pack(tensor):
            held = lambda: tensor  # noqa: E731 (an object of its own, alive as long as the graph needs the tensor)
            if tensor.data_ptr() not in parameters:
                self.change(tensor.nbytes)
                weakref.finalize(held, self.change, -tensor.nbytes)
            return held

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held())

    def change(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(backward, stages, images):
    model = timm.create_model("bvit_ds", embed_dim=32, num_heads=4, num_classes=10, steps=3, stages=stages)
    live = LiveBytes(model)
    with live.hooks:
        backward(model, images, LABELS)
    assert live.now == 0, "something kept a graph"
    return live.peak


def test_memory_is_flat_in_the_number_of_stages(images):
    ours = [peak_bytes(backward_stages, stages, images) for stages in (1, 2, 4, 8)]
    naive = [peak_bytes(naive_gradients, stages, images) for stages in (1, 2, 4, 8)]
    assert max(ours) < 1.05 * min(ours), ours
    assert ours[0] > 1e6, "the instrument saw the activations"
    for stages, peak in zip((2, 4, 8), naive[1:]):
        assert peak > 0.9 * stages * naive[0], naive


# ---- several processes -----------------------------------------------------------------------------------------------


def test_average_gradients_of_one_process_changes_nothing(small, images):
    model = small("bvit")
    average_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())


TWO_PROCESSES = """
import sys
import timm, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import recurrent_vit
from recurrent_vit.losses import average_gradients, backward_stages

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
images, labels = given["images"], given["labels"]
mine = slice(0, 6) if rank == 0 else slice(6, 8)  # unequal parts
scale = 2 / len(images)  # of an image
result = {}

for name, kwargs in given["architectures"].items():
    model = timm.create_model(name, **kwargs)
    model.load_state_dict(given["weights"][name])

    def gradients():
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    def run(target, part):
        x, y = images[mine][part], labels[mine][part]
        backward_stages(target, x, y, scale=scale * len(x))

    run(model, slice(None))
    average_gradients(model)
    result[f"{name} averaged by hand"] = gradients()
    average_gradients(model)
    result[f"{name} averaged twice"] = gradients()

    model.zero_grad()
    if rank == 0:  # the other process has no images in this batch
        backward_stages(model, images, labels, scale=2.0)
    average_gradients(model)
    result[f"{name} one process idle"] = gradients()

    ddp = DistributedDataParallel(model)
    model.zero_grad()
    run(ddp, slice(None))
    result[f"{name} DistributedDataParallel"] = gradients()

    model.zero_grad()
    with ddp.no_sync():
        run(ddp, slice(0, 1))
    run(ddp, slice(1, None))
    result[f"{name} DistributedDataParallel accumulated"] = gradients()

    with ddp.no_sync():
        model.zero_grad()
        run(ddp, slice(None))
    result[f"{name} local"] = gradients()

torch.save(result, f"{folder}/result{rank}.pt")
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


def test_two_processes_give_the_gradients_of_one(small, tmp_path):
    shape = {"embed_dim": 32, "num_heads": 4, "num_classes": 10}
    architectures = {name: {**shape, **ARCHITECTURES[name]} for name in ("bvit", "bvit_ds")}
    models = {name: small(name, **kwargs) for name, kwargs in architectures.items()}
    given = {
        "images": torch.randn(8, 3, 32, 32),
        "labels": torch.arange(8),
        "architectures": architectures,
        "weights": {name: model.state_dict() for name, model in models.items()},
    }
    torch.save(given, tmp_path / "given.pt")
    expected = {}
    for name, model in models.items():
        backward_stages(model, given["images"], given["labels"])
        expected[name] = gradients(model)

    first, second = run_two_processes(TWO_PROCESSES, tmp_path)
    assert len(first) == 6 * len(models)
    for case, found in first.items():
        name, _, how = case.partition(" ")
        equal = all(torch.equal(found[key], second[case][key]) for key in found)
        if how == "local":
            assert not equal, f"{case}: no_sync was not heeded"
            mean = {key: (found[key] + second[case][key]) / 2 for key in found}
            assert_close(mean, expected[name], 1e-5)
        else:
            assert equal, f"{case}: the processes differ"
            assert_close(found, expected[name], 1e-5)


def test_every_staged_variant_is_covered():
    staged = {name for name, variant in recurrent_vit.VARIANTS.items() if variant.args.get("stages", 1) > 1}
    assert staged <= ARCHITECTURES.keys()
