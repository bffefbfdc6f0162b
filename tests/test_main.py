"""The command line as a user meets it: output, exit codes, and what it does not import."""

import json
import subprocess
import sys

import pytest

import recurrent_vit
from recurrent_vit.__main__ import main


def run(*arguments, **kwargs):
    command = [sys.executable, "-m", "recurrent_vit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **kwargs)


def test_list_has_a_row_for_every_name(capsys):
    assert main(["list"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "depth", "steps", "stages", "solver", "NFE", "parameters", "MACs"]
    assert [row.split()[0] for row in rows] == list(recurrent_vit.VARIANTS)
    assert rows[1].split() == ["bvit", "1", "12", "1", "plain", "12", "849,348", "633,103,360"]


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


@pytest.mark.parametrize(("program", "loaded"), [("/usr/bin/recurrent-vit", False), ("train.py", True), ("-c", True)])
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


def test_a_module_that_imports_us_registers_the_names(tmp_path):
    (tmp_path / "other.py").write_text("import recurrent_vit, timm\nprint(timm.is_model('bvit'))")
    result = subprocess.run([sys.executable, "-m", "other"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout == "True\n"


def test_a_closed_pipe_is_not_an_error():
    shell = f"{sys.executable} -m recurrent_vit list | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr == ""


def test_public_names_are_there_and_unknown_ones_are_an_attribute_error():
    for name in recurrent_vit.__all__:
        assert getattr(recurrent_vit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = recurrent_vit.nonsense
