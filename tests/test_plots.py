"""The picture of a horizon sweep shows its rows, and appears whole or not (that of early exit: test_calibration.py)."""

import sys

import pytest

from recurrent_vit import files, plots
from recurrent_vit.plots import check_plot, plot_sweep


def sweep(**kwargs):
    return [
        {"horizon": h, "trained_horizon": 12, "top1": 0.5 / h, "top1_stderr": 0.01, "non_finite": 0, **kwargs}
        for h in (1, 4, 12, 96)
    ]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_plot_is_written_whole_or_not_at_all(tmp_path, monkeypatch, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sweep{suffix}"
    plot_sweep(sweep(), path)
    whole = path.read_bytes()
    assert whole.startswith(magic)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        plot_sweep(sweep(non_finite=1), path)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_plot_shows_the_rows():
    pytest.importorskip("matplotlib")
    rows = sweep()
    rows[-1]["non_finite"] = 3
    (axes,) = plots._draw_sweep(rows, "a title", 12).axes
    curve, *_, marks, trained = axes.lines
    assert curve.get_xydata().tolist() == [[row["horizon"], 100 * row["top1"]] for row in rows]
    bars = axes.containers[0].lines[2][0].get_segments()
    assert [high - low for (_, low), (_, high) in bars] == pytest.approx([2.0] * 4)
    assert marks.get_xdata().tolist() == [96]
    assert set(trained.get_xdata()) == {12}
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "12", "96"]
    assert axes.get_title() == "a title"


@pytest.mark.parametrize(("trained", "label"), [(12, "trained horizon (12)"), (24.0, "trained time (24)")])
def test_another_step_size_takes_other_steps_for_the_trained_time(trained, label):
    pytest.importorskip("matplotlib")
    (axes,) = plots._draw_sweep(sweep(), "", trained).axes
    assert label in [text.get_text() for text in axes.get_legend().get_texts()]


def test_plot_of_one_row_and_of_many(tmp_path):
    pytest.importorskip("matplotlib")
    plot_sweep(sweep()[:1], tmp_path / "one.png")
    plot_sweep([{**sweep()[0], "horizon": h} for h in range(1, 97)], tmp_path / "many.png")
    assert len(list(tmp_path.iterdir())) == 2


def test_plot_errors_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"sweep\.gif' must end in one of \.pdf, \.png, \.svg"):
        check_plot(tmp_path / "sweep.gif")
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nowhere'"):
        check_plot(tmp_path / "nowhere" / "sweep.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.png' is a folder"):
        check_plot(tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ImportError, match=r'pip install "recurrent-vit\[train\]"'):
        plot_sweep(sweep(), tmp_path / "sweep.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="rows is empty"):
        plot_sweep([], tmp_path / "sweep.png")
