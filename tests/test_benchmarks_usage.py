"""What the measuring programs have in common: mistakes are told in one line, and the README knows them all."""

import argparse

import pytest

from benchmarks import accuracy, anytime, cross, paper, rows, speed, usage

PROGRAMS = [path.stem for path in sorted((rows.ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("error", [FileNotFoundError("no file"), ValueError("no number"), ImportError("no module")])
def test_what_a_user_can_mend_is_told_in_one_line(error, capsys):
    with pytest.raises(SystemExit, match="2"), usage.usage_errors(argparse.ArgumentParser(prog="program")):
        raise error
    assert capsys.readouterr().err.endswith(f"\nprogram: error: {error}\n")


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="a bug"), usage.usage_errors(argparse.ArgumentParser()):
        raise RuntimeError("a bug")


@pytest.mark.parametrize("program", [accuracy, anytime, cross, paper, speed], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "Expected one of cpu, cuda,"),
        ("cpu:x", "Invalid device string: 'cpu:x'"),
        ("cuda:0", "torch finds no CUDA device"),
    ],
)
def test_a_device_that_is_not_there_is_told(program, device, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    needed = ["bvit", "--out", str(tmp_path / "run")] if program is paper else []
    with pytest.raises(SystemExit, match="2"):
        program.main([*needed, "--device", device])
    assert f"error: --device {device}: {message}" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(tmp_path):
    usage.check_out(tmp_path / "rows.jsonl")
    with pytest.raises(FileNotFoundError, match=r"--out '.*none/rows\.jsonl': there is no folder '.*none'"):
        usage.check_out(tmp_path / "none" / "rows.jsonl")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_readme_has_every_program(name):
    text = (rows.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert f"`python -m benchmarks.{name}" in text
