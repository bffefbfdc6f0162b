"""The benchmark of early exit: its rows, where they go, and its tables."""

import json

import pytest

from benchmarks import anytime, figures, rows, tables
from recurrent_vit import plots
from recurrent_vit.anytime import CRITERIA


def test_the_benchmark_appends_its_rows(command, monkeypatch):
    monkeypatch.setattr(anytime, "BATCH", 16)
    out, picture = command.folder / "anytime.jsonl", command.folder / "curve.png"
    words = [command.words[1], "--data", "D", "--rounds", "2", "--out", str(out)]
    anytime.main([*words, "--plot", str(picture)])
    found = list(rows.read(out))
    kinds = {
        name: [row for row in found if row["benchmark"] == name] for name in sorted({r["benchmark"] for r in found})
    }
    assert list(kinds) == ["anytime", "anytime curve", "anytime time"]
    pairs = [(row["criterion"], row["max_lost"]) for row in kinds["anytime"]]
    assert pairs == [(criterion, loss) for criterion in CRITERIA for loss in anytime.MAX_LOST]
    for row in kinds["anytime"]:
        assert row["count"] == 60
        assert row["calibrated_on"] == "100 training images"
        assert 0 <= row["saved"] < 1
        assert 0 <= row["uniform_top1"] <= 1
    assert {row["criterion"] for row in kinds["anytime curve"]} == {*CRITERIA, "uniform"}
    plain, *others = kinds["anytime time"]
    assert (plain["subject"], plain["reference"]) == ("local-dir:model plain", None)
    assert len(others) == len(pairs)
    for row in others:
        assert row["reference"] == plain["subject"]
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    columns = ("criterion", "max_lost", "threshold", "saved")
    assert [[row[name] for name in columns] for row in others] == [
        [row[name] for name in columns] for row in kinds["anytime"]
    ]
    for row in found:
        assert {"date", "hardware", "versions", "commit", "command", "sha256"} <= set(row)
        assert row["command"] == "python -m benchmarks.anytime local-dir:model --data DIR --rounds 2"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    again, panels = command.folder / "again.png", []
    monkeypatch.setattr(plots, "draw_curve", lambda axes, *arguments: panels.append(arguments))
    other = [{**row, "subject": "another"} for row in found]
    rows.append(out, [*other, *({**row, "date": "9999-01-01", "top1": 1.0} for row in other)])
    figures.main([str(again), str(out), "--of", "anytime"])
    assert [title for _, title, _ in panels] == ["local-dir:model", "another"]
    curves, _, points = panels[0]
    assert (curves, points) == (kinds["anytime curve"], kinds["anytime"])
    assert {row["top1"] for row in panels[1][0]} == {1.0}, "of the last run"
    text = tables.tables(found)
    for title, count in (("Early exit", len(pairs)), ("Early exit: time", len(others) + 1)):
        part = text.partition(f"### {title}, cpu\n")[2].partition("###")[0]
        assert part.count("\n| local-dir:model") == count, title
        assert "not run" not in part


def test_a_smoke_run_is_printed_not_recorded(command, monkeypatch, capsys):
    monkeypatch.setattr(anytime, "BATCH", 8)
    monkeypatch.setattr(rows, "RESULTS", command.folder / "results")
    anytime.main([command.words[1], "--rounds", "1", "--limit", "10"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["benchmark"] for row in printed} == {"anytime", "anytime curve", "anytime time"}
    assert not (command.folder / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds 0: give at least 1"),
        (["--limit", "0"], "--limit 0: give at least 1"),
        (["--limit", "5", "--out", "rows.jsonl"], "--limit 5: such rows are not recorded; leave --out away"),
        (["--out", "no/such/rows.jsonl"], "there is no folder 'no/such'"),
        (["--plot", "curve.gif"], "must end in one of .pdf, .png, .svg"),
        (["--held-out", "7"], "size must be a multiple of the number of classes"),
    ],
)
def test_wrong_usage_of_the_benchmark(command, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        anytime.main([command.words[1], *arguments])
    assert message in capsys.readouterr().err
