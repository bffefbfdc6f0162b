"""Every name carried elsewhere: copies, files, TorchScript, fx, torch.compile, torch.export, ONNX, two processes."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models._hub import save_for_hf
from torch import nn
from torch.nn.functional import cross_entropy

from recurrent_vit import VARIANTS

TINY = {"embed_dim": 32, "num_heads": 4, "num_classes": 10}
PREFIX = {"class_token": True, "global_pool": "token", "reg_tokens": 2}

# Each name of the zoo at its own depth, steps and solver, and what the names leave out.
CASES = {
    **{name: (name, {}) for name in VARIANTS},
    "bvit-depth3": ("bvit", {"depth": 3, "steps": 2, **PREFIX}),
    "bvit_ode_rk4-depth2": ("bvit_ode_rk4", {"depth": 2, "solver": "rk4_38", "step_size": 0.5, "steps": 2}),
    "bvit_ode_heun-black_box": ("bvit_ode_heun", {"depth": 2, "steps": 2, "field": "black_box"}),
}

script_is_deprecated = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=CASES)
def model(request, small):
    """A narrow model of each case, on a grid of 4 x 4 patches."""
    name, kwargs = CASES[request.param]
    return small(name, img_size=32, patch_size=8, **kwargs)


def mask_for(model):
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    return (torch.rand(tokens, tokens) < 0.5).fill_diagonal_(True)


# ---- copies and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_gives_the_same_output_from_parameters_of_its_own(small, images, name, duplicate):
    model = small(name)
    model.set_horizon(5)
    twin = duplicate(model)
    output = model(images)
    assert torch.equal(twin(images), output)
    assert (twin.horizon, twin.num_states, twin.macs) == (5, model.num_states, model.macs)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    twin.set_horizon(2)
    assert torch.equal(model(images), output)
    assert model.horizon == 5


@pytest.mark.parametrize("name", VARIANTS)
def test_safetensors_hold_each_parameter_once_and_load_strictly(small, tmp_path, name):
    model = small(name, img_size=32, patch_size=8)
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file, metadata={"format": "pt"})
    saved = load_file(file)
    assert saved.keys() == {key for key, _ in model.named_parameters()}
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in model.parameters())

    fresh = timm.create_model(name, **TINY, img_size=32, patch_size=8).eval()
    fresh.load_state_dict(saved, strict=True)
    by_path = timm.create_model(name, **TINY, img_size=32, patch_size=8, checkpoint_path=str(file)).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(fresh(x), model(x))
    assert torch.equal(by_path(x), model(x))


EXPORTED = {
    **{name: (name, {}) for name in VARIANTS},
    "bvit-depth3": ("bvit", {"depth": 3, "steps": 2, "horizon": 5}),
    "bvit_ode_rk4-black_box": ("bvit_ode_rk4", {"solver": "rk4_38", "field": "black_box", "step_size": 0.25}),
    "bvit_ds-prefix": ("bvit_ds", {**PREFIX, "stages": 2}),
}


@pytest.mark.parametrize(("name", "kwargs"), EXPORTED.values(), ids=EXPORTED)
def test_an_exported_folder_gives_the_model_back(small, tmp_path, name, kwargs):
    kwargs = {"img_size": 32, "patch_size": 8, **kwargs}
    model = small(name, **kwargs)
    save_for_hf(model, tmp_path, safe_serialization=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == name
    asked = {k: v for k, v in config["model_args"].items() if k not in ("in_chans", "global_pool", "img_size")}
    assert asked == {**TINY, **{k: v for k, v in kwargs.items() if k in asked}}
    assert kwargs.items() <= {**config["model_args"], "img_size": 32}.items()
    assert config["model_args"]["img_size"] == [32, 32]

    back = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    for (key, a), b in zip(back.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    for key in ("depth", "steps", "stages", "horizon", "solver", "field", "step_size", "nfe", "macs"):
        assert getattr(back, key) == getattr(model, key), key
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(back(x), model(x))


def test_changes_after_construction_are_exported(small, tmp_path, name):
    model = small(name)
    model.set_horizon(5)
    model.set_input_size((48, 40), patch_size=8)
    model.reset_classifier(3, "max")
    save_for_hf(model, tmp_path, safe_serialization=True)
    back = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 48, 40)
    assert torch.equal(back(x), model(x))
    assert (back.horizon, back.num_classes, back.global_pool) == (5, 3, "max")
    assert back.patch_embed.grid_size == (6, 5)


def test_an_exported_folder_adapts_to_other_arguments(small, images, tmp_path, name):
    model = small(name)
    model.set_horizon(5)
    save_for_hf(model, tmp_path, safe_serialization=True)

    longer = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, horizon=7).eval()
    model.set_horizon(7)
    assert torch.equal(longer(images), model(images))

    large = {"img_size": 48, "patch_size": 8, "horizon": 7}
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **large).eval()
    resized = copy.deepcopy(model)
    resized.set_input_size((48, 48), patch_size=8)
    x = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(larger(x), resized(x), rtol=1e-4, atol=1e-5)

    grey = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, horizon=7, in_chans=1, num_classes=3).eval()
    grey.reset_classifier(0)
    x = images[:, :1]
    expected = model.forward_head(model.forward_features(x.expand(-1, 3, -1, -1)), pre_logits=True)
    torch.testing.assert_close(grey(x), expected, rtol=1e-5, atol=1e-5)  # the weights of the colours are summed


# ---- TorchScript -----------------------------------------------------------------------------------------------------


@script_is_deprecated
def test_the_scripted_model_gives_the_same_output_and_features(model, images):
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(images), model(images))
    assert torch.equal(scripted.forward_features(images), model.forward_features(images))


@script_is_deprecated
def test_the_scripted_model_sees_the_mask(model, images):
    scripted = torch.jit.script(model)
    for mask in ({"attn_mask": mask_for(model)}, {"is_causal": True}):
        assert torch.equal(scripted(images, **mask), model(images, **mask))
        assert not torch.equal(scripted(images, **mask), model(images))


@script_is_deprecated
def test_the_scripted_model_survives_a_file(model, images, tmp_path):
    torch.jit.script(model).save(str(tmp_path / "model.pt"))
    loaded = torch.jit.load(str(tmp_path / "model.pt"))
    assert torch.equal(loaded(images), model(images))
    assert {key for key, _ in loaded.named_parameters()} == {key for key, _ in model.named_parameters()}


@script_is_deprecated
@pytest.mark.parametrize("states", [1, 2, 4, 5])
def test_the_scripted_model_stops_inside_a_step(small, images, states):
    model = small("bvit", depth=3, steps=2)
    model.prune_intermediate_layers([states - 1], prune_head=False)
    assert torch.equal(torch.jit.script(model)(images), model(images))


@script_is_deprecated
def test_the_horizon_is_the_one_at_the_time_of_scripting(model, images):
    model.set_horizon(5)
    expected = model(images)
    scripted = torch.jit.script(model)
    model.set_horizon(2)
    assert torch.equal(scripted(images), expected)
    assert not torch.equal(model(images), expected)


@script_is_deprecated
def test_the_scripted_model_trains(model, images):
    model.train()
    scripted = torch.jit.script(model)
    model(images).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scripted(images).square().sum().backward()
    for (key, p), gradient in zip(scripted.named_parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


@script_is_deprecated
def test_the_scripted_model_takes_any_size_if_the_model_does(small, images, name):
    model = small(name, patch_size=8, dynamic_img_size=True)
    model.set_grad_checkpointing()  # has no effect on the scripted model
    scripted = torch.jit.script(model)
    for x in (images, torch.randn(2, 3, 24, 40)):
        assert torch.equal(scripted(x), model(x))


@script_is_deprecated
def test_fx_features_can_be_scripted(small, images, name):
    features = timm.create_model(name, features_only=True, feature_cls="fx", patch_size=8, **TINY).eval()
    for a, b in zip(torch.jit.script(features)(images), features(images), strict=True):
        assert torch.equal(a, b)


# ---- fx --------------------------------------------------------------------------------------------------------------


def test_the_fx_trace_is_the_unrolled_model(model, images):
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(images), model(images))
    mask = mask_for(model)
    assert torch.equal(traced(images, attn_mask=mask), model(images, attn_mask=mask))
    taps = [node.target for node in traced.graph.nodes if node.op == "call_module" and "taps." in str(node.target)]
    assert taps == [f"taps.{i}" for i in range(model.num_states)]


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Counting:
    """A backend that runs the captured graph as it is and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def test_the_compiled_model_is_one_graph_with_the_same_output(model, images):
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(images), model(images))
    assert torch.equal(compiled(images), model(images))
    assert backend.graphs == 1


def test_a_compiled_model_follows_its_horizon(small, images, name):
    model = small(name, patch_size=8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    outputs = []
    for horizon in (1, 2, 1):
        model.set_horizon(horizon)
        outputs.append(compiled(images))
        assert torch.equal(outputs[-1], model(images))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_compiled_model_has_the_same_gradients(small, images, name, checkpointing):
    model = small(name, patch_size=8, depth=2 if name == "vit_cifar" else 1, horizon=2).train()
    model.set_grad_checkpointing(checkpointing)
    model(images).square().sum().backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(images).square().sum().backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[key], rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor_compiles_a_shared_block_and_its_steps(small, images):
    model = small("bvit_ode_heun", patch_size=8, steps=2)
    with torch.no_grad():
        output = torch.compile(model, fullgraph=True)(images)
        torch.testing.assert_close(output, model(images), rtol=1e-4, atol=1e-5)


def test_blocks_compiled_in_place_are_one_graph_for_all_horizons(model, images):
    keys = list(model.state_dict())
    expected = {}
    for horizon in (1, 3, 12):
        model.set_horizon(horizon)
        expected[horizon] = model(images), model.forward_steps(images)
    backend = Counting()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    with torch.no_grad():
        for horizon, (logits, steps) in expected.items():
            model.set_horizon(horizon)
            assert torch.equal(model(images), logits)
            assert torch.equal(model.forward_steps(images), steps)
    assert 1 <= backend.graphs <= model.depth
    assert list(model.state_dict()) == keys


# ---- torch.export and ONNX -------------------------------------------------------------------------------------------


def test_the_exported_program_takes_any_batch(model, images):
    with torch.no_grad():
        batch = torch.export.Dim("batch")
        program = torch.export.export(model, (images,), dynamic_shapes={"x": {0: batch}})
        for size in (1, 2, 7):
            x = torch.randn(size, 3, 32, 32)
            assert torch.equal(program.module()(x), model(x))
    assert set(program.state_dict) == {key for key, _ in model.named_parameters()}


@pytest.mark.parametrize("case", ["bvit_ode_rk4-depth2", "bvit-depth3"])
def test_the_onnx_file_takes_any_batch_and_holds_each_weight_once(small, images, tmp_path, case):
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    name, kwargs = CASES[case]
    # onnxscript stores the transpose of a matrix below 8192 entries once for each use, so these are larger
    model = small(name, img_size=32, patch_size=8, embed_dim=96, num_heads=3, **kwargs)
    file = str(tmp_path / "model.onnx")
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        model, (images,), file, dynamo=True, dynamic_shapes={"x": {0: batch}}, external_data=False, verbose=False
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for size in (1, 5):
        x = torch.randn(size, 3, 32, 32)
        (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(x), rtol=1e-5, atol=1e-5)
    weights = [t for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    stored = sum(int(torch.tensor(t.dims).prod()) for t in weights if len(t.dims) > 0)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters <= stored <= 1.01 * parameters


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


def ddp_model(name):
    torch.manual_seed(11)
    return timm.create_model(name, **TINY)


def ddp_batch():
    generator = torch.Generator().manual_seed(12)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.tensor([1, 3, 5, 7])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {key.removeprefix("module."): p.grad.clone() for key, p in model.named_parameters()}


def ddp_worker(rank, folder):
    """Process `rank` of two: half of the batch through every name; the first one writes the gradients."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    images, labels = (t[rank::2] for t in ddp_batch())
    results = {}
    for name in VARIANTS:
        if "224" in name:
            continue
        model = nn.parallel.DistributedDataParallel(ddp_model(name))
        results[name, "forward"] = gradients(model, cross_entropy(model(images), labels))
        steps = model(images, return_all_steps=True)
        results[name, "steps"] = gradients(model, cross_entropy(steps.flatten(0, 1), labels.repeat(len(steps))))
    if rank == 0:
        torch.save(results, f"{folder}/gradients.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ddp_gradients(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ddp"))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    workers = [
        subprocess.Popen([*command, str(rank), folder], env=env, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for worker in workers:
            _, stderr = worker.communicate(timeout=200)
            assert worker.returncode == 0, stderr
    finally:
        for worker in workers:
            worker.kill()  # the other one waits for a process that has failed
            worker.wait()
    return torch.load(f"{folder}/gradients.pt", weights_only=True)


def test_two_processes_give_the_gradients_of_one_on_the_joint_batch(ddp_gradients, name):
    model, (images, labels) = ddp_model(name), ddp_batch()
    expected = {"forward": gradients(model, cross_entropy(model(images), labels))}
    steps = model.forward_steps(images)
    expected["steps"] = gradients(model, cross_entropy(steps.flatten(0, 1), labels.repeat(len(steps))))
    for kind, reference in expected.items():
        assert ddp_gradients[name, kind].keys() == reference.keys()
        for key, gradient in ddp_gradients[name, kind].items():
            where = f"{kind}, {key}"
            torch.testing.assert_close(
                gradient, reference[key], rtol=1e-4, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
            )


@script_is_deprecated
def test_a_whole_step_size_is_scripted_as_a_float(small, images):
    model = small("bvit_ode_heun", step_size=1)
    assert torch.equal(torch.jit.script(model)(images), model(images))


if __name__ == "__main__":
    ddp_worker(int(sys.argv[1]), sys.argv[2])
