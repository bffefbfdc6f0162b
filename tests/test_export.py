"""Exported files against the models they were made of: every solver and field, any number of steps from one file."""

import copy
import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from recurrent_vit import TABLEAUS, checkpoints, cifar, classify, export
from recurrent_vit.__main__ import main
from recurrent_vit.export import export_onnx, export_program
from recurrent_vit.optimized import start_session

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

STEPS = (1, 12, 48)
TOLERANCE = 1e-5  # of the largest logit
SIZE = {"img_size": 32, "patch_size": 8}
STEP_SIZES = {"state_subtracted": 0.5, "black_box": 0.05}  # F itself grows: 48 whole steps of it would overflow

CASES = {
    "plain": {},
    **{
        f"{solver}-{field}": {"solver": solver, "field": field, "step_size": step_size}
        for solver in TABLEAUS
        for field, step_size in STEP_SIZES.items()
    },
    "depth3": {"depth": 3, "steps": 2, "stages": 2, "class_token": True, "global_pool": "token", "reg_tokens": 2},
    "grey": {"in_chans": 1, "img_size": (48, 40), "dynamic_img_size": True},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tiny(**kwargs):
    """A narrow model with every parameter away from its initial value."""
    torch.manual_seed(0)
    arguments = {"embed_dim": 32, "num_heads": 4, "num_classes": 10, **SIZE, **kwargs}
    model = timm.create_model("bvit", **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def images_for(model, batch):
    return torch.randn(batch, model.in_chans, *model.patch_embed.img_size)


@torch.no_grad()
def torch_logits(model, images, steps):
    z = model.initial_state(images)
    for _ in range(steps):
        z = model.step(z)
    return model.forward_head(model.norm(z))


def open_session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(session, images, steps=None):
    feed = {"image": images.numpy()}
    if steps is not None:
        feed["steps"] = torch.tensor(steps).numpy()
    (logits,) = session.run(["logits"], feed)
    return torch.from_numpy(logits)


def assert_same(found, expected, what):
    assert found.shape == expected.shape, what
    assert expected.isfinite().all(), what
    deviation = ((found - expected).abs().max() / expected.abs().max()).item()
    assert deviation <= TOLERANCE, f"{what}: {deviation:.2g} of the largest logit"


def op_types(path):
    return [node.op_type for graph in export._graphs(onnx.load(path).graph) for node in graph.node]


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory):
    """(case, model, file, what export_onnx returned)"""
    model, path = tiny(**CASES[request.param]), tmp_path_factory.mktemp("onnx") / "model.onnx"
    return request.param, model, path, export_onnx(model, path)


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "plain.onnx"
    export_onnx(tiny(), path)
    return path


# ---- the file --------------------------------------------------------------------------------------------------------


def test_one_file_gives_the_logits_of_the_model_after_any_steps_for_any_batch(exported):
    case, model, path, _ = exported
    session = open_session(path)
    for steps in STEPS:
        for batch in (1, 5):
            images = images_for(model, batch)
            found = run(session, images, steps)
            assert_same(found, torch_logits(model, images, steps), f"{case}, {steps} steps, batch {batch}")
            model.set_horizon(steps)
            assert_same(found, model(images).detach(), f"{case}, horizon {steps}, batch {batch}")


def test_no_steps_or_less_give_the_logits_of_the_initial_state(exported):
    case, model, path, _ = exported
    session, images = open_session(path), images_for(model, 2)
    for steps in (0, -1, -(2**63)):
        assert_same(run(session, images, steps), torch_logits(model, images, 0), f"{case}, {steps} steps")


def test_the_file_is_sound_and_holds_each_weight_once(exported):
    case, model, path, _ = exported
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"], case
    onnx.checker.check_model(str(path), full_check=True)
    assert op_types(path).count("Loop") == 1, case
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["image", "steps"], case
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch", case
    stored = sum(
        torch.Size(tensor.dims).numel() for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters <= stored <= 1.01 * parameters, case
    content = path.read_bytes()
    for trace in (b"site-packages", b"recurrent_vit/", os.getcwd().encode()):
        assert trace not in content, f"{case}: the file tells of the machine it was made on: {trace}"


def test_the_file_says_what_it_is(exported):
    case, model, path, facts = exported
    read = open_session(path).get_modelmeta().custom_metadata_map
    assert read == facts, case
    assert read["model"] == "bvit", case
    assert read["solver"] == CASES[case].get("solver", "plain"), case
    assert read["field"] == CASES[case].get("field", "state_subtracted"), case
    expected = {
        "step_size": CASES[case].get("step_size", 1.0),
        "depth": CASES[case].get("depth", 1),
        "nfe_per_step": TABLEAUS[read["solver"]].evaluations if read["solver"] in TABLEAUS else 1,
        "trained_horizon": 4 if case == "depth3" else 12,
        "fixed_horizon": None,
        "input_size": [model.in_chans, *model.patch_embed.img_size],
        "mean": [0.5071, 0.4865, 0.4409],
        "std": [0.2673, 0.2564, 0.2762],
        "classes": [],
    }
    assert {key: json.loads(read[key]) for key in expected} == expected, case
    assert {"torch", "timm", "onnx", "recurrent-vit"} <= json.loads(read["versions"]).keys(), case
    content = safetensors.torch.save(model.state_dict(), metadata={"format": "pt"})
    assert (read["checkpoint"], read["sha256"]) == ("", hashlib.sha256(content).hexdigest()), case
    assert (read["license"], read["precision"]) == ("", "fp32"), case


def test_class_names_are_those_of_the_configuration(tmp_path, monkeypatch, plain_file):
    monkeypatch.setattr(export, "_to_onnx", lambda model, horizon: onnx.load(plain_file))
    model, names = tiny(), [f"class {i}" for i in range(10)]
    model.pretrained_cfg["label_names"] = names
    assert json.loads(export_onnx(model, tmp_path / "model.onnx")["classes"]) == names
    model.pretrained_cfg["label_names"] = names[:9]
    assert json.loads(export_onnx(model, tmp_path / "model.onnx")["classes"]) == []


def test_every_name_of_the_zoo_as_it_is_published(name, tmp_path):
    model = timm.create_model(name, embed_dim=16, num_heads=2, num_classes=10).eval()
    export_onnx(model, tmp_path / "model.onnx")
    session, images = open_session(tmp_path / "model.onnx"), images_for(model, 3)
    for steps in (1, model.horizon):
        assert_same(run(session, images, steps), torch_logits(model, images, steps), f"{name}, {steps} steps")


def test_a_fixed_horizon_is_written_without_a_loop(tmp_path):
    model, path = tiny(solver="heun2", step_size=0.5), tmp_path / "model.onnx"
    facts = export_onnx(model, path, fixed_horizon=3)
    session = open_session(path)
    assert [value.name for value in session.get_inputs()] == ["image"]
    assert "Loop" not in op_types(path)
    assert facts["fixed_horizon"] == "3"
    for batch in (1, 5):
        images = images_for(model, batch)
        assert_same(run(session, images), torch_logits(model, images, 3), f"batch {batch}")


# ---- int8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "horizon", "products"),  # five in a block for each evaluation of it, and the head
    [
        ("plain", None, 5 + 1),
        ("depth3", None, 3 * 5 + 1),
        ("heun2-black_box", None, 2 * 5 + 1),
        ("rk4-state_subtracted", None, 4 * 5 + 1),
        ("plain", 3, 3 * 5 + 1),
    ],
)
def test_the_products_with_weights_are_quantised(tmp_path, case, horizon, products):
    model, path = tiny(**CASES[case]), tmp_path / "model.onnx"
    facts = export_onnx(model, path, fixed_horizon=horizon, int8=True)
    assert op_types(path).count("MatMulInteger") == products
    assert facts["precision"] == "int8"
    assert "onnxruntime" in json.loads(facts["versions"])
    session, images = open_session(path), images_for(model, 5)
    assert session.get_modelmeta().custom_metadata_map == facts
    for steps in (3,) if horizon else (1, 12):
        found = run(session, images, None if horizon else steps)
        expected = torch_logits(model, images, steps)
        assert (found - expected).norm() < 0.1 * expected.norm(), f"{case}, {steps} steps"


def test_the_last_layer_of_an_mlp_is_quantised_token_by_token():
    x = torch.randn(1, 50, 64)
    x[0, 7] *= 1000
    x[0, 8] = 0
    errors = {}
    for name in ("fc1", "fc2"):
        layer = nn.Sequential(OrderedDict([(name, nn.Linear(64, 32))])).eval()
        session = start_session(export.module_to_onnx(layer, x, {0: "batch"}, int8=True), threads=1)
        found, expected = torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), layer(x).detach()
        errors[name] = ((found - expected).norm(dim=-1) / expected.norm(dim=-1))[0]
        torch.testing.assert_close(found[0, 8], expected[0, 8])  # the bias
    assert errors["fc2"].max() < 0.03
    assert errors["fc1"][9:].min() > 0.3, "a large token sets the scale of all, or the test sees nothing"


def test_a_product_that_is_left_out_is_an_error(tmp_path, monkeypatch, plain_file):
    import onnxruntime.quantization as quantization

    quantize = quantization.quantize_dynamic
    monkeypatch.setattr(export, "_to_onnx", lambda model, horizon: onnx.load(plain_file))
    monkeypatch.setattr(
        quantization, "quantize_dynamic", lambda *args, extra_options, **kwargs: quantize(*args, **kwargs)
    )
    with pytest.raises(RuntimeError, match="1 of 6 products were quantised"):
        export_onnx(tiny(), tmp_path / "model.onnx", int8=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["bvit", "bvit_ds"])
def test_the_published_models(name, tmp_path):
    """The sizes that the README states, and the trained weights."""
    model = timm.create_model(name, pretrained=True).eval()
    facts = export_onnx(model, tmp_path / "fp32.onnx")
    export_onnx(model, tmp_path / "int8.onnx", int8=True)
    assert 3_397_392 < (tmp_path / "fp32.onnx").stat().st_size < 3_450_000
    assert (tmp_path / "int8.onnx").stat().st_size < 1_000_000
    session, images = open_session(tmp_path / "fp32.onnx"), images_for(model, 2)
    for steps in STEPS:
        assert_same(run(session, images, steps), torch_logits(model, images, steps), f"{steps} steps")
    quantised, prepare = open_session(tmp_path / "int8.onnx"), classify.transform(model)
    photographs = torch.stack([prepare(classify.open_image(path)) for path in classify.samples()])
    for steps in (12, 48):
        expected, found = torch_logits(model, photographs, steps), run(quantised, photographs, steps)
        assert (found - expected).norm() < 0.1 * expected.norm(), f"int8, {steps} steps"
        if steps == model.steps * model.stages:
            assert torch.equal(found.argmax(-1), expected.argmax(-1)), f"int8, {steps} steps"
    row = checkpoints(name)[0]
    assert (facts["checkpoint"], facts["sha256"], facts["license"]) == (row.id, row.sha256, row.license)
    assert json.loads(facts["classes"]) == list(cifar.FINE_NAMES)


def test_of_weights_with_two_names_the_file_has_the_name_of_the_model(tmp_path):
    for name in ("bvit", "bvit_ode_euler"):
        model = timm.create_model(name, pretrained=True)
        assert export_onnx(model, tmp_path / "model.onnx")["checkpoint"] == checkpoints(name)[0].id


def test_the_callers_autocast_and_default_dtype_play_no_part(tmp_path):
    model = tiny()
    images = images_for(model, 3)
    expected = torch_logits(model, images, 3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            export_onnx(model, tmp_path / "model.onnx")
            program = export_program(model).module()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(run(open_session(tmp_path / "model.onnx"), images, 3), expected, "onnx")
    assert_same(program(images, torch.tensor(3)).detach(), expected, "torch.export")


@pytest.mark.parametrize("int8", [False, True])
def test_weights_that_are_not_finite_are_named(int8, tmp_path):
    model = tiny()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"weights that are not finite: blocks\.0\.mlp\.fc2\.weight"):
        export_onnx(model, tmp_path / "model.onnx", int8=int8)
    assert not list(tmp_path.iterdir())


# ---- the model it is made of -----------------------------------------------------------------------------------------


class Hook:
    """A hook that cannot be copied, and counts its calls."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def __call__(self, *_):
        self.calls += 1


def test_the_model_stays_as_it_is(tmp_path):
    model, hook = tiny(drop_path_rate=0.1, proj_drop_rate=0.1).bfloat16().train(), Hook()
    model.set_grad_checkpointing()
    model.taps[3].eval()
    model.register_forward_hook(hook)
    model.blocks[0].register_forward_pre_hook(hook)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    kinds = [type(module) for module in model.modules()]
    export_onnx(model, tmp_path / "model.onnx")
    assert hook.calls == 0
    assert len(model._forward_hooks) == len(model.blocks[0]._forward_pre_hooks) == 1
    assert [module.training for module in model.modules()] == modes
    assert [type(module) for module in model.modules()] == kinds
    assert model.horizon == len(model.taps) == 12
    assert model.blocks[0].grad_checkpointing
    assert all(parameter.requires_grad for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16, key
        assert torch.equal(value, state[key]), key

    images, twin = images_for(model, 2), tiny()
    twin.load_state_dict({key: value.float() for key, value in state.items()})
    assert_same(run(open_session(tmp_path / "model.onnx"), images, 12), torch_logits(twin, images, 12), "bfloat16")


# ---- torch.export ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "rk4-black_box"])
def test_the_program_gives_the_logits_of_the_model_after_any_steps_for_any_batch(case):
    model = tiny(**CASES[case])
    program = export_program(model).module()
    for steps in (0, *STEPS):
        for batch in (1, 5):
            images = images_for(model, batch)
            with torch.no_grad():
                found = program(images, torch.tensor(steps))
            assert_same(found, torch_logits(model, images, steps), f"{steps} steps, batch {batch}")


def test_the_program_of_a_fixed_horizon_takes_images_alone():
    model = tiny()
    program = export_program(model, fixed_horizon=3).module()
    for batch in (1, 5):
        images = images_for(model, batch)
        with torch.no_grad():
            assert_same(program(images), torch_logits(model, images, 3), f"batch {batch}")


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("model.txt", ValueError, r"model\.txt' must end in \.onnx"),
        ("model", ValueError, r"model' must end in \.onnx"),
        ("none/model.onnx", FileNotFoundError, "there is no folder '.*none'"),
        ("folder.onnx", IsADirectoryError, "is a folder"),
    ],
)
def test_a_target_that_cannot_be_is_refused_before_the_work(tmp_path, monkeypatch, name, error, message):
    (tmp_path / "folder.onnx").mkdir()
    monkeypatch.setattr(export, "_to_onnx", lambda *_: pytest.fail("the work was done"))
    with pytest.raises(error, match=message):
        export_onnx(tiny(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


@pytest.mark.parametrize("horizon", [0, -1, True, 1.5, "3", 10**9])
def test_a_horizon_that_cannot_be_is_refused(tmp_path, horizon):
    for refuse in (lambda: export_onnx(tiny(), tmp_path / "x.onnx", fixed_horizon=horizon),
                   lambda: export_program(tiny(), fixed_horizon=horizon)):  # fmt: skip
        with pytest.raises(ValueError, match=f"horizon={horizon!r} must be an integer from 1 to 10000"):
            refuse()
    assert not list(tmp_path.iterdir())


def test_a_horizon_too_long_to_be_unrolled_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"would write 1,200 block applications .* is an input of the file"):
        export_onnx(tiny(solver="rk4"), tmp_path / "x.onnx", fixed_horizon=300)


def pruned():
    model = tiny()
    model.prune_intermediate_layers([2], prune_head=False)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "model must be a RecurrentVisionTransformer, .*got Linear"),
        (lambda: timm.create_model("vit_tiny_patch16_224", device="meta"), "got VisionTransformer"),
        (pruned, "this model was pruned"),
        (lambda: timm.create_model("bvit", device="meta"), "meta device"),
    ],
    ids=["module", "timm", "pruned", "meta"],
)
def test_a_model_that_cannot_be_exported_is_refused(tmp_path, build, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        export_onnx(model, tmp_path / "x.onnx")
    with pytest.raises(ValueError, match=message):
        export_program(model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("missing", "int8"), [("onnx", False), ("onnxscript", False), ("onnxruntime", True)])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, missing, int8):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf'{missing}: pip install "recurrent-vit\[export\]"'):
        export_onnx(tiny(), tmp_path / "x.onnx", int8=int8)


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch, plain_file):
    def full(file):
        raise OSError(28, "No space left on device")

    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    monkeypatch.setattr(export, "_to_onnx", lambda model, horizon: onnx.load(plain_file))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            export_onnx(tiny(), path)
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    export_onnx(tiny(), path)
    onnx.checker.check_model(str(path), full_check=True)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_writes_the_file(tmp_path, capsys):
    model, path = tiny(), tmp_path / "model.onnx"
    save_for_hf(model, tmp_path / "hub", safe_serialization=True)
    assert main(["export", f"local-dir:{tmp_path / 'hub'}", str(path), "--int8", "--fixed-horizon", "2"]) == 0
    size = f"{path.stat().st_size:,}"
    assert capsys.readouterr().out == f"{path}: {size} bytes, int8, plain; number of steps: built in\n"
    images = images_for(model, 2)
    expected = torch_logits(model, images, 2)
    assert (run(open_session(path), images) - expected).norm() < 0.2 * expected.norm()


def test_the_command_line_passes_on_what_it_was_asked_for(tmp_path, capsys, monkeypatch):
    model, asked = tiny(), []

    def write(*arguments, **kwargs):
        asked.append((*arguments[1:], kwargs))
        path.write_bytes(b"12345")
        return {"precision": "fp32", "solver": "plain", "trained_horizon": "12"}

    path = tmp_path / "model.onnx"
    save_for_hf(model, tmp_path / "hub", safe_serialization=True)
    monkeypatch.setattr(export, "export_onnx", write)
    assert main(["export", f"local-dir:{tmp_path / 'hub'}", str(path)]) == 0
    assert asked == [(str(path), {"fixed_horizon": None, "int8": False})]
    shown = f"{path}: 5 bytes, fp32, plain; number of steps: an input, trained with 12\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bvit", "x.txt"], "file 'x.txt' must end in .onnx"),
        (["bvit", "no/x.onnx"], "file 'no/x.onnx': there is no folder 'no'"),
        (["bvitt", "x.onnx"], "'bvitt' is neither a folder nor a name of the zoo"),
        (["bvit_small_patch16_224", "x.onnx"], "has no published weights"),
        ([".", "x.onnx"], "has no run.json"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_copy_for_export_is_independent_of_its_model():
    model = tiny()
    twin = export.copy_for_inference(model)
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
