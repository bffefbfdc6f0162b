"""Staging and pushing repository folders, and loading from a Hub: real clients against a local one."""

import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import ModelCard

from recurrent_vit import card, hub
from recurrent_vit.__main__ import main
from recurrent_vit.weights import FILE, GOLDEN_TOLERANCE, checkpoints


@pytest.fixture(params=checkpoints(), ids=lambda row: row.id)
def row(request):
    return request.param


KEPT = ("recipe", "precision", "seed", "pflop", "seconds", "hardware", "versions", "date")


def made_by(row):
    """What run.json has of the command, to judge by the published card: nothing, if `recurrent-vit train` made it."""
    shown = (row.path.parent / "README.md").read_text().split("```bash\n")[1].splitlines()[0]
    return {} if shown.startswith("recurrent-vit train ") else {"command": shown}


def change_facts(run, **changes):
    """Put these into run.json."""
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, **changes}))


def write_run(folder, row, **changes):
    """The folder of the run that a checkpoint came from, as far as staging looks at it."""
    folder.mkdir()
    facts = {
        "name": (row.same_as or row.name).split(".")[0],
        "model_kwargs": row.model_kwargs,
        "images": 50_000,
        **{key: getattr(row, key) for key in KEPT},
        **made_by(row),
    }
    (folder / "run.json").write_text(json.dumps(facts))
    shutil.copy(row.path, folder / FILE)
    model = timm.create_model(row.name, device="meta", **row.model_kwargs)
    ran = {key: getattr(model, key) for key in ("solver", "field", "step_size")}
    common = {"split": "test", "precision": "fp32", **ran, **row.metrics}
    results = [{**common, "horizon": int(steps), **result} for steps, result in row.sweep.items()]
    (folder / "test.jsonl").write_text("".join(json.dumps({**result, **changes}) + "\n" for result in results))
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", checkpoints()[0])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- staging ---------------------------------------------------------------------------------------------------------


def test_staging_its_run_gives_the_published_folder_byte_for_byte(row, tmp_path, capsys):
    run = write_run(tmp_path / "run", row)
    command = ["stage", str(run), "--name", row.name, "--tag", row.tag, "--hub", str(tmp_path / "hub")]
    for _ in range(2):
        assert main([*command, "--repo-id", row.repo]) == 0
        assert contents(tmp_path / "hub" / row.id) == contents(row.path.parent)
        assert [path.name for path in (tmp_path / "hub").iterdir()] == [row.id]
    printed = json.loads(capsys.readouterr().out.partition("}\n{")[0] + "}")
    golden, expected = (torch.tensor([*map(float, text.split())]) for text in (printed.pop("golden"), row.golden))
    assert (golden - expected).abs().max() < GOLDEN_TOLERANCE
    assert printed == {key: value for key, value in row.meta.items() if key != "golden"} | {"commit": ""}


def test_a_tag_never_changes_its_weights(run, tmp_path):
    (first,) = checkpoints()[:1]
    state = safetensors.torch.load_file(run / FILE)
    hub.stage(run, first.name, "other", tmp_path / "hub")
    before = contents(tmp_path / "hub" / f"{first.name}.other")
    state["norm.bias"] += 1
    safetensors.torch.save_file(state, run / FILE)
    for tag in ("other", first.tag):  # in the folder; in the manifest
        with pytest.raises(FileExistsError, match=f"{first.name}.{tag} exists with other weights"):
            hub.stage(run, first.name, tag, tmp_path / "hub")
    assert contents(tmp_path / "hub" / f"{first.name}.other") == before
    assert [path.name for path in (tmp_path / "hub").iterdir()] == [f"{first.name}.other"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "held out 5000"}, "split='held out 5000'"),
        ({"count": 500}, "count=500"),
        ({"solver": "rk4"}, "solver='rk4'"),
        ({"precision": "bf16"}, "precision='bf16'"),
        ({"horizon": 13}, "no row for the trained 12 steps"),
        ({"horizon": 12}, "has the trained number of steps only, .* run `recurrent-vit evaluate"),
    ],
)
def test_results_of_anything_else_are_refused(tmp_path, changes, message):
    run = write_run(tmp_path / "run", checkpoints("bvit")[0], **changes)
    with pytest.raises(ValueError, match=message):
        hub.stage(run, "bvit", "x", tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("missing", ["run.json", FILE, "test.jsonl"])
def test_an_unfinished_run_is_refused(run, tmp_path, missing, capsys):
    (run / missing).unlink()
    assert main(["stage", str(run), "--name", "bvit", "--tag", "x", "--hub", str(tmp_path / "hub")]) == 1
    assert missing in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


def test_a_run_that_was_stopped_before_its_end_is_refused(run, tmp_path, capsys):
    command = ["stage", str(run), "--name", "bvit", "--tag", "x", "--hub", str(tmp_path / "hub")]
    change_facts(run, updates=5, planned_updates=13)
    assert main(command) == 1
    told = capsys.readouterr().err
    assert f"{run} was stopped after update 5 of 13; whole runs alone are published" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "hub").exists()
    change_facts(run, updates=13)
    assert main(command) == 0


def test_names_and_tags_are_checked(run, tmp_path):
    with pytest.raises(ValueError, match="is a run of bvit, not of bvit_ds"):
        hub.stage(run, "bvit_ds", "x", tmp_path / "hub")
    for tag in ("../x", "a.b", "", "a b"):
        with pytest.raises(ValueError, match="must be made of letters"):
            hub.stage(run, "bvit", tag, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def scored(run, **changes):
    """What the run scored, as another model would have."""
    rows = [json.loads(line) for line in (run / "test.jsonl").read_text().splitlines()]
    file = run / "other.jsonl"
    file.write_text("".join(json.dumps({**row, **changes}) + "\n" for row in rows))
    return str(file)


def test_a_name_that_is_the_same_function_has_the_same_weights_and_says_so(run, tmp_path, capsys):
    first = checkpoints("bvit")[0]
    command = ["stage", str(run), "--name", "bvit_ode_euler", "--hub", str(tmp_path / "hub")]
    assert main([*command, "--tag", first.tag, "--results", scored(run, solver="euler")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["sha256"], row["same_as"]) == (first.sha256, first.id)
    folder = tmp_path / "hub" / f"bvit_ode_euler.{first.tag}"
    assert (folder / FILE).read_bytes() == first.path.read_bytes()
    assert json.loads((folder / "config.json").read_text())["architecture"] == "bvit_ode_euler"
    card = (folder / "README.md").read_text()
    assert f"these are the weights of `{first.id}`, bit for bit" in card
    assert "recurrent-vit train bvit --recipe" in card
    assert "recurrent-vit evaluate runs/bvit --solver euler --data DIR" in card
    assert "--json runs/bvit/test.euler.jsonl\n```" in card
    plain = timm.create_model("bvit", pretrained=True)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), plain.eval()(images), rtol=1e-4, atol=1e-4)
    assert model.solver == "euler"


@pytest.mark.parametrize("name", ["bvit_ode_heun", "bvit_ode_rk4", "bvit_ds", "vit_cifar", "resnet18"])
def test_a_name_that_is_another_function_is_refused(name, run, tmp_path):
    with pytest.raises(ValueError, match=f"is a run of bvit, not of {name}, which is another function"):
        hub.stage(run, name, checkpoints("bvit")[0].tag, tmp_path / "hub")


def test_shared_weights_must_be_in_the_manifest(run, tmp_path):
    with pytest.raises(ValueError, match=r"the manifest has no bvit\.mine with these weights"):
        hub.stage(run, "bvit_ode_euler", "mine", tmp_path / "hub", results=scored(run, solver="euler"))
    assert not (tmp_path / "hub").exists()


def test_weights_that_the_manifest_pins_are_not_replaced_by_way_of_the_folder(run, tmp_path):
    first = checkpoints()[0]
    state = safetensors.torch.load_file(run / FILE)
    state["norm.bias"] += 1
    safetensors.torch.save_file(state, run / FILE, metadata={"format": "pt"})
    (tmp_path / "hub" / first.id).mkdir(parents=True)
    shutil.copy(run / FILE, tmp_path / "hub" / first.id / FILE)
    with pytest.raises(FileExistsError, match=f"exists with other weights .sha256 {first.sha256}"):
        hub.stage(run, first.name, first.tag, tmp_path / "hub")


def test_a_run_of_ones_own_gets_a_card_that_loads_its_repository_and_says_how_it_was_made(run, tmp_path):
    kwargs = {"steps": 12, "drop_path_rate": 0.1}
    change_facts(run, images=45_000, pflop=0.1234, precision="bf16", model_kwargs=kwargs)
    row = hub.stage(run, "bvit", "mine", tmp_path / "hub", repo_id="someone/mine")
    card = (tmp_path / "hub" / row.id / "README.md").read_text()
    assert 'timm.create_model("hf-hub:someone/mine", pretrained=True)' in card
    options = "--pflop 0.1234 --held-out 5000 --precision bf16 --model-kwargs steps=12 drop_path_rate=0.1"
    assert f"recurrent-vit train bvit --recipe short --seed 0 {options} --data DIR" in card
    assert "45,000 training images" in card
    config = json.loads((tmp_path / "hub" / row.id / "config.json").read_text())
    assert config["model_args"] == kwargs


def test_a_tilde_is_the_home_directory(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(run / "test.jsonl", tmp_path / "results.jsonl")
    row = hub.stage(f"~/{run.name}", "bvit", "mine", "~/hub", repo_id="org/name", results="~/results.jsonl")
    assert (tmp_path / "hub" / row.id / FILE).exists()
    assert hub.push(f"~/hub/{row.id}", "org/name", dry_run=True) == ""


def test_names_of_repositories_are_checked(run, tmp_path):
    for name in ("alone", "a/b/c", "a/b c", "-a/b"):
        with pytest.raises(ValueError, match="--repo-id"):
            hub.stage(run, "bvit", "x", tmp_path / "hub", repo_id=name)
    assert not (tmp_path / "hub").exists()


def test_a_failed_write_leaves_nothing(run, tmp_path, monkeypatch):
    def full(path, write):
        if path.name == hub.CARD:
            raise OSError(28, "No space left on device")
        path.write_bytes(b"half")

    monkeypatch.setattr(hub, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        hub.stage(run, "bvit", "x", tmp_path / "hub")
    assert list((tmp_path / "hub").iterdir()) == []


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_the_card_is_valid_and_says_what_was_measured(row):
    card = ModelCard.load(row.path.parent / "README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.license) == ("timm", "image-classification", row.license)
    assert data.datasets == ["uoft-cs/cifar100"]
    values = {result.metric_name: result.metric_value for result in data.eval_results}
    assert values == {
        "top-1 accuracy, %": round(100 * row.metrics["top1"], 2),
        "top-5 accuracy, %": round(100 * row.metrics["top5"], 2),
    }
    assert ModelCard(str(card)).data.to_dict() == data.to_dict()


def test_the_card_shows_the_command_of_another_program(run, tmp_path):
    command = "python -m benchmarks.paper bvit --data DIR --out runs/bvit --seed 0"
    change_facts(run, recipe="paper", updates=13, planned_updates=13, command=command)
    row = hub.stage(run, "bvit", "other", tmp_path / "hub")
    card = (tmp_path / "hub" / row.id / "README.md").read_text()
    first, second, *_ = card.split("```bash\n")[1].splitlines()
    assert first == command
    assert second.startswith("recurrent-vit evaluate runs/bvit --data DIR")
    assert "recurrent-vit train" not in card


PAPER_PFLOP = 200 * 50_000 * 3 * 2 * 633_103_360 / 1e15  # epochs, images, FLOP of an image


@pytest.mark.parametrize(
    ("recipe", "pflop", "option"),
    [
        ("short", 1.0, ""),
        ("short", 0.5, " --pflop 0.5"),
        ("paper", PAPER_PFLOP, ""),
        ("paper", 5.0, " --pflop 5"),
    ],
)
def test_the_card_has_the_budget_unless_it_is_the_recipes_own(recipe, pflop, option):
    row = replace(checkpoints("bvit")[0], recipe=recipe, pflop=round(pflop, 4), seed=0)
    command = f"recurrent-vit train bvit --recipe {recipe} --seed 0{option} --data DIR --out runs/bvit"
    assert command in card.card(row).splitlines()


def test_the_snippet_of_the_card_runs(row, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 60), "red").save("picture.png")
    snippet = (row.path.parent / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(snippet, names)
    assert len(snippet.splitlines()) == 5
    assert names["probabilities"].shape == (1, 100)
    torch.testing.assert_close(names["probabilities"].sum(-1), torch.ones(1))


def test_the_chart_shows_every_horizon(row):
    lines = card._chart(row).splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == [int(steps) for steps in row.sweep]
    assert [line for line in lines if "trained" in line] == [
        line for line in lines if int(line.split()[0]) == row.metrics["horizon"]
    ]
    best = max(result["top1"] for result in row.sweep.values())
    for line, result in zip(lines, row.sweep.values(), strict=True):
        assert abs(line.count("█") - 40 * result["top1"] / best) <= 1
        assert ("without finite logits" in line) == bool(result["non_finite"])


def test_the_chart_says_what_was_not_finite():
    row = replace(
        checkpoints()[0], sweep={"12": {"top1": 0.5, "non_finite": 0}, "96": {"top1": 0.01, "non_finite": 9_000}}
    )
    assert card._chart(row).splitlines()[-1].endswith("(9,000 images without finite logits)")
