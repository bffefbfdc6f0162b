"""The command line as a user meets it: output, exit codes, and what it does not import."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf

import recurrent_vit
from recurrent_vit import cifar, commands, evaluate, machine, plots, train
from recurrent_vit.__main__ import main

HUB = Path(__file__).resolve().parents[1] / "hub" / "bvit.short_c100"


def run(*arguments, **kwargs):
    command = [sys.executable, "-m", "recurrent_vit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list"], "bvit_ds"),
        (["list", "--weights"], "bvit.short_c100"),
        (["verify", "bvit.short_c100"], "bvit.short_c100: sha256"),
        (["classify"], "raccoon.jpg"),
        (["push", str(HUB), "--repo-id", "org/name", "--dry-run"], "nothing was uploaded"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_stands_on_its_own_in_a_new_process(arguments, said, tmp_path):
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout


def test_list_has_a_row_for_every_name(capsys):
    assert main(["list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "depth", "steps", "stages", "solver", "NFE", "parameters", "MACs", "weights"]
    assert [row.split()[0] for row in rows] == list(recurrent_vit.VARIANTS)
    assert rows[1].split() == ["bvit", "1", "12", "1", "plain", "12", "849,348", "633,103,360", "short_c100"]


def test_list_of_weights(capsys, monkeypatch):
    rows = recurrent_vit.checkpoints()
    assert main(["list", "--weights"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [row.id for row in rows]
    assert main(["list", "--weights", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [row.meta for row in rows]
    monkeypatch.setattr("recurrent_vit.weights.checkpoints", lambda: [])
    assert main(["list", "--weights"]) == 0
    assert capsys.readouterr().out == "none\n"


def test_list_as_json(capsys):
    assert main(["list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == list(recurrent_vit.VARIANTS)
    assert rows[4]["solver"] == "rk4"
    assert rows[4]["steps"] == 3


SCRIPT = """
import sys, timm, helper
print(timm.is_model("bvit"), sys.argv, __name__, helper.VALUE)
"""


def test_run_gives_a_script_our_names_its_arguments_and_its_folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VALUE = 7")
    path = str(tmp_path / "script.py")
    result = run("run", path, "--model", "bvit", "-h")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"True {[path, '--model', 'bvit', '-h']} __main__ 7\n"


def test_run_passes_on_the_exit_code_of_the_script(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    assert run("run", str(tmp_path / "script.py")).returncode == 7


def test_run_lets_an_error_of_the_script_show_its_traceback(tmp_path):
    (tmp_path / "script.py").write_text("raise ValueError('of the script')")
    result = run("run", str(tmp_path / "script.py"))
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "script.py" in result.stderr


def test_run_without_a_file_is_one_clear_line():
    result = run("run", "no/such.py")
    assert result.returncode == 1
    assert result.stderr == "recurrent-vit: SCRIPT 'no/such.py' is not a file; give the path of a Python script\n"
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["list", "--json", "--markdown"], ["run"]])
def test_wrong_usage_is_exit_code_two(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert "usage: recurrent-vit" in result.stderr


LOADED = (
    "import sys; sys.argv = [{program!r}]; import recurrent_vit; print('timm' in sys.modules, 'torch' in sys.modules)"
)


@pytest.mark.parametrize(
    ("program", "loaded"),
    [("/usr/bin/recurrent-vit", False), ("C:\\\\x\\\\recurrent-vit.exe", False), ("train.py", True), ("-c", True)],
)
def test_only_our_own_program_starts_without_torch(program, loaded):
    result = subprocess.run(
        [sys.executable, "-c", LOADED.format(program=program)], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{loaded} {loaded}\n"


def test_help_as_a_module_does_not_load_torch():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "recurrent_vit", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: recurrent-vit" in result.stdout
    assert "argparse" in result.stderr
    assert "torch" not in result.stderr


def test_help_as_a_module_spelled_in_one_word():
    command = [sys.executable, "-X", "importtime", "-mrecurrent_vit", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage: recurrent-vit" in result.stdout
    assert "torch" not in result.stderr


@pytest.mark.parametrize(
    "flags",
    [["-m", "package.module"], ["-mpackage.module"], ["-um", "package.module"], ["-m", "recurrent_vit_of_ours.module"]],
)
def test_a_package_that_imports_us_registers_the_names(tmp_path, flags):
    # while Python looks for package.module, argv[0] is "-m" as it is when it looks for us
    package = tmp_path / flags[-1].removeprefix("-m").split(".")[0]
    package.mkdir()
    (package / "__init__.py").write_text("import recurrent_vit")
    (package / "module.py").write_text("import timm\nprint(timm.is_model('bvit'))")
    command = [sys.executable, *flags, "-m", "recurrent_vit"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout == "True\n"


def test_a_module_that_imports_us_registers_the_names(tmp_path):
    (tmp_path / "other.py").write_text("import recurrent_vit, timm\nprint(timm.is_model('bvit'))")
    result = subprocess.run([sys.executable, "-m", "other"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout == "True\n"


def test_a_closed_pipe_is_not_an_error():
    shell = f"{sys.executable} -m recurrent_vit list | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_not_an_error(closed):
    command = f"{sys.executable} -m recurrent_vit list {closed}"
    assert subprocess.run(["bash", "-c", command], timeout=120, check=False).returncode == 0


def test_a_terminal_without_unicode_still_gets_its_table(data, tmp_path, monkeypatch):
    import io

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["train", "bvit", "--out", str(tmp_path / "run"), "--pflop", "2e-5", *TINY]) == 0
    assert b"\\xb1" in out.buffer.getvalue()


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(*arguments, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("recurrent_vit.zoo.describe", interrupt)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "recurrent-vit: interrupted\n"


def test_public_names_are_there_and_unknown_ones_are_an_attribute_error():
    for name in recurrent_vit.__all__:
        assert getattr(recurrent_vit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = recurrent_vit.nonsense


# ---- train and evaluate, on a data set of a few pictures -------------------------------------------------------------


@pytest.fixture
def data(monkeypatch):
    """A CIFAR-100 of five hundred noisy pictures in place of the real one."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8, generator=generator)
    split = cifar.Split(images, torch.arange(500) % 100)
    monkeypatch.setattr(cifar, "load", lambda root, split_name="train": split)
    return split


TINY = ["--model-kwargs", "embed_dim=16", "num_heads=2"]


def test_train_then_evaluate(data, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "bvit_ds", "--out", str(out), "--pflop", "2e-5", "--held-out", "100", *TINY]) == 0
    assert "bvit_ds on 100 held-out training images:" in capsys.readouterr().out
    (last,) = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
    assert (last["split"], last["count"], last["horizon"]) == ("held out 100", 100, 12)
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "sweep.png"
    options = ["--horizon", "1,12,24", "--limit", "200", "--json", str(rows), "--plot", str(picture)]
    assert main(["evaluate", str(out), *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["steps", "1", "12", "24"]
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["horizon"], row["NFE"], row["count"]) for row in written] == [
        (1, 1, 200),
        (12, 12, 200),
        (24, 24, 200),
    ]
    assert {row["split"] for row in written} == {"test"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_evaluate_under_another_solver(data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    assert main(["train", "bvit", "--out", str(out), "--pflop", "2e-5", *TINY]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--solver", "rk4", "--step-size", "0.5", "--horizon", "2", "--json", "-"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["horizon"], row["NFE"], row["trained_horizon"]) == (2, 8, 12)
    assert (row["solver"], row["step_size"]) == ("rk4", 0.5)
    assert json.loads((out / "test.jsonl").read_text())["solver"] == "plain"

    drawn = []
    monkeypatch.setattr(plots, "plot_sweep", lambda rows, *arguments: drawn.append(arguments))
    picture = str(tmp_path / "sweep.png")
    assert (
        main(["evaluate", str(out), "--solver", "rk4", "--step-size", "0.5", "--horizon", "2", "--plot", picture]) == 0
    )
    assert drawn == [(picture, f"{out}, solver rk4, step size 0.5", 24.0)]  # as long as twelve steps of size 1


def test_an_odd_step_size_keeps_the_trained_number_of_steps(data, tmp_path, monkeypatch):
    """0.1 * 3 / 0.1 is a little more than 3."""
    out, drawn = tmp_path / "run", []
    kwargs = ["solver=rk4", "steps=3", "step_size=0.1"]
    assert main(["train", "bvit", "--out", str(out), "--pflop", "2e-5", *TINY, *kwargs]) == 0
    monkeypatch.setattr(plots, "plot_sweep", lambda rows, path, title, trained: drawn.append(trained))
    assert main(["evaluate", str(out), "--plot", str(tmp_path / "sweep.png")]) == 0
    assert drawn == [3]


def test_a_finished_run_is_refused_without_resume(data, tmp_path, capsys):
    command = ["train", "bvit", "--out", str(tmp_path / "run"), "--pflop", "2e-5", *TINY]
    assert main(command) == 0
    capsys.readouterr()
    assert main(command) == 1
    assert "holds a run already; give --resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evaluate", "bvit_small_patch16_224"],
            "'bvit_small_patch16_224' has no published weights; give the folder of a run, or local-dir:PATH",
        ),
        (["evaluate", "bvitt"], "'bvitt' is neither a folder nor a name of the zoo (vit_cifar, bvit,"),
        (["evaluate", "."], "has no run.json: it is not the folder of a finished run"),
        (["evaluate", "bvit", "--horizon", "1,x"], "horizon='1,x': 'x' is not a whole number"),
        (["evaluate", "bvit", "--plot", "sweep.txt"], "plot 'sweep.txt' must end in one of .pdf, .png, .svg"),
        (["train", "bvit", "--out", "OUT", "--pflop", "-1"], "pflop=-1.0 must be a number above 0"),
        (["train", "bvit", "--out", "OUT", "--model-kwargs", "steps"], "--model-kwargs 'steps': give KEY=VALUE"),
        (["train", "bvit", "--out", "OUT", "--model-kwargs", "steps=0"], "steps=0 must be an integer from 1"),
        (["train", "bvitt", "--out", "OUT"], "'bvitt' is not a name of the zoo (vit_cifar, bvit,"),
        (["train", "bvit", "--out", "OUT", "--model-kwargs", "stepz=3"], "--model-kwargs: "),
        (["train", "bvit", "--out", "OUT", "--device", "gpu"], "--device gpu: Expected one of cpu, cuda,"),
        (["train", "bvit", "--out", "OUT", "--device", "meta"], "--device meta: give cpu or cuda"),
        (
            ["train", "bvit", "--out", "OUT", "--model-kwargs", "pretrained=True"],
            "--model-kwargs: pretrained is not an",
        ),
        (["train", "bvit", "--out", "OUT", "--model-kwargs", "act_layer=bogus"], "--model-kwargs: "),
        (["train", "bvit", "--out", "OUT", "--seed", "-1"], "seed=-1 must be from 0 to 2^32 - 1"),
        (["evaluate", "bvit", "--json", "no/such/rows.jsonl"], "--json 'no/such/rows.jsonl': there is no folder"),
        (["train", "bvit", "--out", "OUT", "--held-out", "7"], "size must be a multiple of the number of classes"),
    ],
)
def test_a_mistake_is_one_line(data, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_missing_data_says_where_it_was_looked_for(tmp_path, capsys):
    assert main(["train", "bvit", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "run")]) == 1
    assert f"was not found in {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so that asking for one is no mistake")
def test_a_gpu_that_is_not_there_is_one_line(data, tmp_path, capsys):
    assert main(["train", "bvit", "--out", str(tmp_path / "run"), "--device", "cuda"]) == 1
    assert capsys.readouterr().err == "recurrent-vit: --device cuda: torch finds no CUDA device\n"


@pytest.mark.skipif("RECURRENT_VIT_DATA" not in os.environ, reason="needs CIFAR-100: set RECURRENT_VIT_DATA")
def test_torchrun_trains_and_evaluates_in_two_processes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "recurrent_vit", "train", "bvit", "--out", str(tmp_path / "run"), "--pflop", "1e-5"]
    result = subprocess.run(
        [*command, "--held-out", "100", *TINY], capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("bvit on 100 held-out training images:") == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_train_passes_on_what_it_was_asked_for(data, tmp_path, monkeypatch, capsys):
    asked = []

    def fit(*arguments, **kwargs):
        asked.append((*arguments, kwargs))
        return timm.create_model("bvit", embed_dim=16, num_heads=2)

    monkeypatch.setattr(train, "fit", fit)
    splits = {"train": data[:300], "test": data[:200]}
    monkeypatch.setattr(cifar, "load", lambda root, split="train": splits[split])
    command = ["train", "bvit_ode_euler", "--data", "D", "--out", str(tmp_path)]
    model = ["--model-kwargs", "field=black_box", "step_size=0.5"]
    options = ["--recipe", "paper", "--seed", "7", "--pflop", "0.5", "--precision", "bf16", "--compile", "--resume"]
    assert main([*command, *options, *model]) == 0
    assert "bvit_ode_euler on 200 test images:" in capsys.readouterr().out
    assert main([*command, "--held-out", "100"]) == 0
    (name, recipe, split, out, kwargs), (_, default, rest, _, defaults) = asked
    assert (name, recipe.name, out, len(split)) == ("bvit_ode_euler", "paper", str(tmp_path), 300)
    assert [json.loads(line)["count"] for line in (tmp_path / "test.jsonl").read_text().splitlines()] == [200]
    assert kwargs == {
        "seed": 7, "pflop": 0.5, "device": "cpu", "precision": "bf16", "compile": True, "resume": True,
        "model_kwargs": {"field": "black_box", "step_size": 0.5},
    }  # fmt: skip
    assert (default.name, len(rest)) == ("short", 200)
    assert defaults == {
        "seed": 0, "pflop": None, "device": "cpu", "precision": None, "compile": False, "resume": False,
        "model_kwargs": {},
    }  # fmt: skip


def test_evaluate_passes_on_what_it_was_asked_for(data, tmp_path, monkeypatch, capsys):
    model, asked, real = timm.create_model("bvit", embed_dim=16, num_heads=2), [], evaluate.evaluate
    save_for_hf(model, tmp_path, safe_serialization=True)
    splits = {"train": data[:300], "test": data[:200]}
    monkeypatch.setattr(cifar, "load", lambda root, split="train": splits[split])

    def note(model, split, **kwargs):
        asked.append((model, split, kwargs))
        return real(model, split, **kwargs)

    monkeypatch.setattr(evaluate, "evaluate", note)
    command = ["evaluate", f"local-dir:{tmp_path}", "--horizon", "1"]
    assert main([*command, "--batch-size", "50", "--precision", "bf16"]) == 0
    _, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert main([*command, "--solver", "heun2", "--field", "black_box", "--step-size", "0.25"]) == 0
    assert main([*command, "--held-out", "100"]) == 0
    (_, split, kwargs), (rebuilt, _, _), (_, held, _) = asked
    assert (len(split), kwargs["batch_size"], kwargs["precision"]) == (200, 50, "bf16")
    [exact] = real(model.eval(), split, horizons=[1], precision="bf16", batch_size=50)
    assert row[1] == f"{100 * exact['top1']:.2f}"
    assert row[4] == f"{100 * exact['top5']:.2f}"
    assert (rebuilt.solver, rebuilt.field, rebuilt.step_size) == ("heun2", "black_box", 0.25)
    assert torch.equal(held.images, splits["train"][cifar.held_out(splits["train"].labels, 100)[1]].images)
    capsys.readouterr()
    assert main([*command, "--limit", "0"]) == 1
    assert capsys.readouterr().err == "recurrent-vit: limit=0 must be at least 1\n"
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 200  # and nothing else


def test_a_loss_that_is_not_finite_is_one_line(data, tmp_path, monkeypatch, capsys):
    def fit(*arguments, **kwargs):
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(train, "fit", fit)
    assert main(["train", "bvit", "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == "recurrent-vit: the loss is nan\n"


def test_a_name_of_the_zoo_is_the_model_whatever_folders_there_are(tmp_path, monkeypatch, capsys):
    (tmp_path / "bvit").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["classify"]) == 0
    capsys.readouterr()
    assert main(["classify", "--model", "./bvit"]) == 1
    assert capsys.readouterr().err == "recurrent-vit: bvit has no run.json: it is not the folder of a finished run\n"
    assert main(["classify", "--model", ""]) == 1
    assert capsys.readouterr().err.startswith("recurrent-vit: '' is neither a folder nor a name of the zoo")


def test_rows_into_a_folder_are_refused_before_the_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cifar, "load", lambda *arguments: pytest.fail("the images were loaded"))
    assert main(["evaluate", "bvit", "--json", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"recurrent-vit: --json '{tmp_path}' is a folder; give a file\n"


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"recurrent-vit {recurrent_vit.__version__}\n"


def test_modules_are_attributes_of_the_package():
    modules = sorted(file.stem for file in Path(recurrent_vit.__file__).parent.glob("[a-z]*.py"))
    for module in ("calibration", "export", "runs"):  # the first that is asked for
        code = f"import recurrent_vit as r; print(*[getattr(r, name).__name__ for name in {[module, *modules]}])"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown.split() == [f"recurrent_vit.{name}" for name in [module, *modules]]


@pytest.mark.parametrize(
    ("device", "backend", "uses"), [("cpu", "gloo", "cpu"), ("cuda", "cpu:gloo,cuda:nccl", "cuda:3")]
)
def test_processes_of_torchrun_have_a_gpu_each_and_talk_from_cpu_to_cpu_too(device, backend, uses, monkeypatch):
    called, asked = {}, []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(machine, "check_device", lambda text: asked.append(text) or torch.device(text))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.update(device=device))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: called.update(backend=backend))
    monkeypatch.setattr(commands.atexit, "register", lambda function: None)
    args = argparse.Namespace(device=device)
    commands._use_device(args)
    assert args.device == uses
    assert asked == [uses]  # and no other GPU is touched
    assert called == {"backend": backend, **({"device": "cuda:3"} if device == "cuda" else {})}


@pytest.mark.parametrize("command", ["classify --model", "evaluate", "export", "dynamics"])
def test_a_model_of_another_kind_is_one_line(command, tmp_path, monkeypatch, capsys, data):
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: torch.nn.Linear(1, 1))
    more = {"export": [str(tmp_path / "x.onnx")], "dynamics": ["--out", str(tmp_path / "out")]}
    assert main([*command.split(), "hf-hub:us/other", *more.get(command, [])]) == 1
    assert capsys.readouterr().err == "recurrent-vit: 'hf-hub:us/other' is a Linear; give a model of the zoo\n"
    assert list(tmp_path.glob("x*")) == []
