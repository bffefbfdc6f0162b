"""Checkpoints: the manifest against files, registry and documents; what is loaded, and what is refused."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import timm
import torch

import recurrent_vit
from recurrent_vit import augment, card, cifar, hub, machine, weights
from recurrent_vit.__main__ import main
from recurrent_vit.weights import FILE, checkpoints

ROOT = Path(__file__).resolve().parent.parent
HUB = ROOT / "hub"


@pytest.fixture(params=checkpoints(), ids=lambda row: row.id)
def row(request):
    return request.param


@pytest.fixture
def first():
    return checkpoints()[0]


@pytest.fixture
def folder(first, tmp_path):
    """A copy of a repository folder, to be damaged."""
    return Path(shutil.copytree(first.path.parent, tmp_path / first.id))


# ---- the manifest says what is there ---------------------------------------------------------------------------------


def test_the_file_is_what_the_manifest_says(row):
    content = row.path.read_bytes()
    state = safetensors.torch.load(content)
    assert (len(content), weights.sha256(row.path)) == (row.bytes, row.sha256)
    assert sum(tensor.numel() for tensor in state.values()) == row.parameters
    assert {tensor.dtype for tensor in state.values()} == {getattr(torch, row.dtype)}
    assert state.keys() == timm.create_model(row.name, device="meta").state_dict().keys()
    with safetensors.safe_open(row.path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_row_is_complete(row):
    assert re.fullmatch(r"[0-9a-f]{64}", row.sha256)
    assert row.repo or not row.commit, "a commit is one of a repository"
    assert re.fullmatch(r"([0-9a-f]{40})?", row.commit)
    assert row.model_kwargs == {}, "a registered name builds its default arguments"
    assert row.metrics["count"] == 10_000
    assert row.metrics["top1"] == row.sweep[str(row.metrics["horizon"])]["top1"]
    assert len(row.golden.split()) == 100


def test_configuration_and_card_are_those_of_the_row(row):
    assert (row.path.parent / "config.json").read_bytes() == hub._json(hub.config(row))
    assert (row.path.parent / "README.md").read_text() == card.card(row)
    assert sorted(path.name for path in row.path.parent.iterdir()) == sorted(hub.FILES)


def test_the_manifest_is_the_list_of_folders():
    assert sorted(path.name for path in HUB.iterdir()) == sorted(row.id for row in checkpoints())


def test_timm_knows_every_checkpoint(row):
    cfg = timm.get_pretrained_cfg(row.id)
    assert row.id in timm.list_pretrained(row.name)
    assert (cfg.file, cfg.tag, cfg.num_classes, cfg.license) == (str(row.path), row.tag, 100, row.license)
    assert cfg.hf_hub_id == (f"{row.repo}@{row.commit}" if row.commit else None)
    assert cfg.label_names == cifar.FINE_NAMES


def test_the_documents_name_every_checkpoint(row, capsys):
    assert main(["list", "--weights", "--markdown"]) == 0
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()
    assert row.sha256 in (ROOT / "CHANGELOG.md").read_text()


def test_a_row_gives_its_transforms(row):
    from PIL import Image

    image = Image.new("RGB", (32, 32), (255, 0, 128))
    expected = (torch.tensor([1.0, 0.0, 128 / 255]) - torch.tensor(augment.MEAN)) / torch.tensor(augment.STD)
    torch.testing.assert_close(row.transforms()(image)[:, 7, 9], expected)
    assert row.meta["metrics"] == row.metrics


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["name", "name.tag", "local-dir", "file"])
def test_every_source_gives_the_same_weights(row, source):
    expected = safetensors.torch.load_file(row.path)
    arguments = {
        "name": (row.name, {}),
        "name.tag": (row.id, {}),
        "local-dir": (f"local-dir:{row.path.parent}", {}),
        "file": (row.name, {"pretrained_cfg_overlay": {"file": str(row.path)}}),
    }
    name, kwargs = arguments[source]
    state = timm.create_model(name, pretrained=True, **kwargs).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


ALONE = """
import sys
seen = []
def hook(event, arguments):
    written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if written or event in EVENTS:
        seen.append((event, str(arguments)))
EVENTS = ("socket.connect", "socket.getaddrinfo", "os.mkdir", "os.rename", "os.remove", "os.truncate", "shutil.move")
import os, timm, recurrent_vit
sys.addaudithook(hook)
model = timm.create_model({name!r}, pretrained=True)
print(seen, model.pretrained_cfg["tag"])
"""


def test_a_name_makes_no_request_and_writes_no_file(row):
    done = subprocess.run([sys.executable, "-c", ALONE.format(name=row.name)], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == f"[] {checkpoints(row.name)[0].tag}", done.stderr


@pytest.mark.parametrize(
    ("kwargs", "adapted"),
    [
        ({"num_classes": 7}, {"head.weight", "head.bias"}),
        ({"num_classes": 0}, set()),
        ({"in_chans": 1}, {"patch_embed.proj.weight"}),
        ({"img_size": 64}, {"pos_embed"}),
        ({"num_classes": 7, "in_chans": 4}, {"head.weight", "head.bias", "patch_embed.proj.weight"}),
    ],
)
@pytest.mark.parametrize("source", ["name", "local-dir"])
def test_another_head_or_input_adapts_and_nothing_else_changes(first, source, kwargs, adapted):
    name = first.name if source == "name" else f"local-dir:{first.path.parent}"
    model = timm.create_model(name, pretrained=True, **kwargs)
    state, expected = model.state_dict(), safetensors.torch.load_file(first.path)
    same = {key for key in state if state[key].shape == expected[key].shape and torch.equal(state[key], expected[key])}
    assert state.keys() - same == adapted


def test_a_new_head_is_initialised_as_without_weights(first):
    heads = []
    for pretrained in (True, False):
        torch.manual_seed(0)
        heads.append(timm.create_model(first.name, pretrained=pretrained, num_classes=7).head.weight)
    assert torch.equal(*heads)


def test_features_come_from_the_weights(first):
    features = timm.create_model(first.name, pretrained=True, features_only=True)
    whole = timm.create_model(first.name, pretrained=True)
    for key, value in features.model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[key]), key


def test_one_checkpoint_runs_under_any_solver(first):
    images, cfg = torch.randn(2, 3, 32, 32), timm.get_pretrained_cfg(first.name).to_dict()
    euler = timm.create_model("bvit_ode_euler", pretrained_cfg=cfg, pretrained=True)
    torch.testing.assert_close(euler.eval()(images), timm.create_model("bvit", pretrained=True).eval()(images))


def test_a_saved_model_loads_again(first, tmp_path):
    model = timm.create_model(first.name, pretrained=True, num_classes=5)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"file", "hf_hub_id", "url"} & config["pretrained_cfg"].keys(), "no path of this machine goes out"


# ---- what is refused -------------------------------------------------------------------------------------------------


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


DAMAGES = {
    "one tensor is missing": (lambda s: without(s, "blocks.0.norm1.weight"), "blocks.0.norm1.weight missing"),
    "half of it is missing": (lambda s: dict(list(s.items())[::2]), "missing"),
    "a tensor too much": (
        lambda s: {**s, "blocks.1.norm1.weight": torch.zeros(256)},
        "blocks.1.norm1.weight not known to",
    ),
    "another shape": (lambda s: {**s, "norm.weight": torch.ones(255)}, "norm.weight has shape"),
    "transposed": (lambda s: {**s, "blocks.0.mlp.fc2.weight": s["blocks.0.mlp.fc2.weight"].T.contiguous()}, "fc2"),
    "float16": (lambda s: {name: value.half() for name, value in s.items()}, "is of dtype"),
    "int8": (lambda s: {**s, "norm.bias": s["norm.bias"].to(torch.int8)}, "norm.bias is of dtype"),
    "NaN": (lambda s: {**s, "norm.bias": s["norm.bias"] * torch.nan}, "values are not finite in norm.bias"),
    "infinite": (lambda s: {**s, "pos_embed": s["pos_embed"] / 0}, "values are not finite in pos_embed"),
}


@pytest.mark.parametrize("num_classes", [100, 7])
@pytest.mark.parametrize("source", ["local-dir", "file", "pth", "state_dict"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit_are_refused_from_every_source(first, folder, damage, source, num_classes):
    change, message = DAMAGES[damage]
    state = change(safetensors.torch.load_file(first.path))
    safetensors.torch.save_file(state, folder / FILE, metadata={"format": "pt"})
    torch.save(state, folder / "model.pth")
    name, overlay = {
        "local-dir": (f"local-dir:{folder}", None),
        "file": (first.name, {"file": str(folder / FILE)}),
        "pth": (first.name, {"file": str(folder / "model.pth")}),
        "state_dict": (first.name, {"state_dict": state}),
    }[source]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        timm.create_model(name, pretrained=True, num_classes=num_classes, pretrained_cfg_overlay=overlay)
    assert str(caught.value).startswith("the state dict: " if source == "state_dict" else str(folder))


def test_a_head_of_another_size_than_the_configuration_says_is_refused(first, folder):
    state = safetensors.torch.load_file(first.path)
    state["head.weight"] = torch.zeros(7, 256)
    safetensors.torch.save_file(state, folder / FILE)
    with pytest.raises(ValueError, match=r"head.weight has shape \(7, 256\), the model \(100, 256\)"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


@pytest.fixture
def installed(folder, monkeypatch):
    """The package as if its files were in a place that can be damaged."""
    monkeypatch.setattr(weights, "PACKAGE", folder.parent / "package")
    shutil.copytree(folder, folder.parent / "package" / "hub" / folder.name)
    return folder.parent / "package" / "hub" / folder.name / FILE


def overlay(path):
    return {"file": str(path)}


def test_a_flipped_bit_in_the_package_is_refused_with_both_sums(first, installed):
    content = bytearray(installed.read_bytes())
    content[-1000] ^= 1
    installed.write_bytes(content)
    with pytest.raises(ValueError, match=f"has sha256 {weights.sha256(installed)}, .* {first.sha256}; .*reinstall"):
        timm.create_model(first.name, pretrained=True, pretrained_cfg_overlay=overlay(installed))


def test_a_truncated_file_in_the_package_is_refused(first, installed):
    os.truncate(installed, 1000)
    with pytest.raises(ValueError, match=f"has 1,000 bytes, the checkpoint {first.id} has {first.bytes:,}"):
        timm.create_model(first.name, pretrained=True, pretrained_cfg_overlay=overlay(installed))


def test_a_missing_file_is_named(first, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PACKAGE", tmp_path / "nowhere" / "package")
    missing = weights.find(first.id).path
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(missing))} is missing.*reinstall"):
        timm.create_model(first.name, pretrained=True, pretrained_cfg_overlay=overlay(missing))
    with pytest.raises(FileNotFoundError, match="which is not a file"):
        timm.create_model(first.name, pretrained=True, pretrained_cfg_overlay=overlay(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match="read from safetensors files only"):
        timm.create_model(
            first.name, pretrained=True, pretrained_cfg_overlay={"file": None, "url": "https://example.org/w.pth"}
        )


def test_a_folder_of_the_package_is_checked_like_its_name(first, installed):
    timm.create_model(f"local-dir:{installed.parent}", pretrained=True)
    content = bytearray(installed.read_bytes())
    content[-1000] ^= 1
    installed.write_bytes(content)
    with pytest.raises(ValueError, match=f"has sha256 .* {first.sha256}; .*reinstall"):
        timm.create_model(f"local-dir:{installed.parent}", pretrained=True)


@pytest.mark.parametrize("number", [16, 63, 65])
def test_positions_of_another_grid_than_the_configuration_says_are_refused(first, folder, number):
    state = safetensors.torch.load_file(first.path)
    state["pos_embed"] = torch.zeros(1, number, 256)
    safetensors.torch.save_file(state, folder / FILE)
    with pytest.raises(ValueError, match=rf"pos_embed has shape \(1, {number}, 256\), the model \(1, 64, 256\)"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_a_source_of_the_callers_own_stands_before_the_package(first):
    with pytest.raises(OSError, match=r"someone/nowhere: .*HF_HUB_OFFLINE is set"), offline():
        timm.create_model(first.name, pretrained=True, pretrained_cfg_overlay={"hf_hub_id": "someone/nowhere"})
    timm.create_model(first.name, pretrained=True, pretrained_cfg_overlay={"hf_hub_id": None})


@contextlib.contextmanager
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.mark.parametrize(
    "changes",
    [
        {"classifier": ["head", "blocks.0.attn.qkv"]},
        {"classifier": "blocks.0.attn.qkv"},
        {"first_conv": "blocks.0.attn.qkv"},
        {"custom_load": True},
        {"label_offset": 0, "url": "http://127.0.0.1:9/x.pth"},
    ],
)
@pytest.mark.parametrize("kwargs", [{}, {"num_classes": 7}, {"features_only": True}])
def test_what_a_configuration_says_of_loading_changes_nothing(first, folder, changes, kwargs):
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    state = timm.create_model(f"local-dir:{folder}", pretrained=True, **kwargs).state_dict()
    expected = safetensors.torch.load_file(first.path)
    for name, value in state.items():
        name = name.removeprefix("model.")
        if not (kwargs.get("num_classes") and name.startswith("head.")):
            assert torch.equal(value, expected[name]), name


def test_a_name_without_weights_says_so():
    assert "bvit_small_patch16_224" not in {row.name for row in checkpoints()}
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model("bvit_small_patch16_224", pretrained=True)
    with pytest.raises(ValueError, match="has no checkpoint; there are bvit"):
        weights.find("bvit_small_patch16_224")


# ---- hostile folders -------------------------------------------------------------------------------------------------

HOSTILE = """
import json, pickle, resource, struct, sys, time
from pathlib import Path
import safetensors.torch, timm, torch, recurrent_vit

good, place = Path(sys.argv[1]), Path(sys.argv[2])
config, content = json.loads((good / "config.json").read_text()), (good / "model.safetensors").read_bytes()
state = safetensors.torch.load(content)

class Bomb:
    def __reduce__(self):
        return (Path.touch, (place / "executed",))

def header(value, length=None):
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text

def cfg(**changes):
    return {**config, "pretrained_cfg": {**config["pretrained_cfg"], **changes}}

def args(**arguments):
    return {**config, "model_args": arguments}

half = safetensors.torch.save(dict(list(state.items())[::2]))
tensors = {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(1_000_000)}
CASES = {
    "a header of 67 MB": (config, header(tensors)),
    "a header longer than the file": (config, header({}, 2**40)),
    "a header of negative length": (config, header({}, 2**64 - 1)),
    "a tensor beyond the end": (config, header({"t": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})),
    "nested brackets": (config, struct.pack("<Q", 10**6) + b"[" * 10**6),
    "empty": (config, b""),
    "truncated": (config, content[:-1]),
    "a pickle by that name": (config, pickle.dumps(Bomb())),
    "only a pickle": (config, None),
    "a million steps": (args(steps=10**6), content),
    "steps and horizon out of range": (args(steps=10**9, horizon=10**9), content),
    "a huge width": (args(embed_dim=2**20, num_heads=1), content),
    "a wide model within bounds": (args(embed_dim=2048, depth=8, num_heads=8), content),
    "many blocks": (args(depth=1000), content),
    "loose loading": (args(pretrained_strict=False), half),
    "a filter of its own": (args(pretrained_filter_fn=None, kwargs_filter=["steps"]), half),
    "half a backbone for another head": ({**config, "num_classes": 7}, half),
    "unknown keys": (cfg(surprise=1), content),
    "another architecture of ours": ({**config, "architecture": "vit_cifar"}, content),
    "another architecture of timm's": ({**config, "architecture": "resnet18"}, content),
    "no architecture": ({**config, "architecture": "no_such_model"}, content),
    "deep JSON": ("[" * 10**5, content),
    "JSON of another kind": ("[1, 2]", content),
    "not JSON": ("\\x00\\xff", content),
    "huge JSON": ('{"architecture": "bvit", "x": "' + "y" * 50_000_000, content),
}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

timm.create_model(f"local-dir:{good}", pretrained=True)
before = peak()
for name, (configuration, weights) in CASES.items():
    folder = place / name.replace(" ", "_")
    folder.mkdir()
    text = configuration if isinstance(configuration, str) else json.dumps(configuration)
    (folder / "config.json").write_text(text, encoding="latin-1")
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    start = time.perf_counter()
    try:
        timm.create_model(f"local-dir:{folder}", pretrained=True)
        error = "loaded"
    except Exception as caught:
        error = type(caught).__name__
    print(json.dumps({"case": name, "error": error, "seconds": time.perf_counter() - start, "mib": peak() - before}))
"""


def test_nothing_hostile_is_loaded_executed_or_waited_for(first, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOSTILE, str(first.path.parent), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) > 22
    assert [case for case in cases if case["error"] == "loaded"] == []
    assert [case for case in cases if case["seconds"] > 10] == []
    assert max(case["mib"] for case in cases) < 1024
    assert not (tmp_path / "executed").exists()


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_passes_and_names_versions(row, capsys):
    assert main(["verify", row.id]) == 0
    out = capsys.readouterr().out
    assert f"{row.id}: sha256 {row.sha256[:12]}" in out
    assert f"torch {machine.versions()['torch']}" in out


def test_verify_fails_on_other_logits(first, monkeypatch, capsys):
    monkeypatch.setattr(weights, "golden_images", lambda size=(3, 32, 32): torch.zeros(1, *size))
    assert main(["verify", first.name]) == 1
    captured = capsys.readouterr()
    assert re.search(f"{first.id}: FAILED: .*differ from the recorded ones by", captured.out)
    assert "1 of 1 checkpoints failed" in captured.err


def test_golden_logits_do_not_depend_on_the_path_of_computation(row):
    model = timm.create_model(row.name, pretrained=True).eval()
    recorded = torch.tensor([float(value) for value in row.golden.split()])
    with torch.no_grad():
        alone = model(weights.golden_images())[0]
        many = model(weights.golden_images().repeat(16, 1, 1, 1))[7]
    assert (alone - recorded).abs().max() < weights.GOLDEN_TOLERANCE
    assert (many - recorded).abs().max() < weights.GOLDEN_TOLERANCE
    assert recorded.std() > 100 * weights.GOLDEN_TOLERANCE, "so that another model would be noticed"


@pytest.mark.parametrize("arguments", [["bvit_small_patch16_224"], ["bvit.no_such_tag"]])
def test_verify_of_an_unknown_checkpoint_is_an_error(arguments, capsys):
    assert main(["verify", *arguments]) == 1
    assert "has no checkpoint" in capsys.readouterr().err


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("RECURRENT_VIT_DATA" not in os.environ, reason="needs CIFAR-100: set RECURRENT_VIT_DATA")
def test_the_published_accuracy_is_that_of_the_file(row):
    """On 500 images, the count of a run of the same file on all 10,000 is matched within three standard errors."""
    from recurrent_vit.evaluate import evaluate

    split = cifar.load(split="test")[:500]
    (result,) = evaluate(timm.create_model(row.name, pretrained=True), split)
    p = row.metrics["top1"]
    assert abs(result["top1"] - p) < 3 * (p * (1 - p) / 500) ** 0.5


def test_public_names():
    assert recurrent_vit.checkpoints is checkpoints
    assert set(machine.versions()) == {"python", "recurrent-vit", "torch", "timm"}


def test_initial_weights_of_a_pretrained_model_are_those_of_timm_if_asked_for_later():
    mode = timm.create_model("bvit").weight_init_mode
    assert timm.create_model("bvit", pretrained=True).weight_init_mode == mode
    assert timm.create_model("bvit", pretrained=True, weight_init="skip").weight_init_mode == "reset"
