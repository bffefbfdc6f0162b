"""What all pictures share, and those of accuracy: against steps, and against evaluations with early exit.

They are drawn into matplotlib Figures made without pyplot, so no window system and no global state play a part, and
their files appear whole or not at all.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .files import check_target, write_atomically

__all__ = ["check_plot", "draw_curve", "dress_sweep", "import_figure", "plot_curve", "plot_sweep", "save_figure"]

PLOT_SUFFIXES = (".pdf", ".png", ".svg")

Row = dict[str, Any]


# ---- any picture -----------------------------------------------------------------------------------------------------


def import_figure() -> Any:
    """matplotlib's Figure, used without pyplot, so that no window system and no global state play a part.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "recurrent-vit[train]"') from error
    return Figure


def check_plot(path: str | os.PathLike) -> None:
    """Whether a picture could be written there: to be asked before the minutes that its rows take.

    Raises:
        ValueError: The name doesn't end in .pdf, .png or .svg.
        FileNotFoundError: Its folder doesn't exist.
        IsADirectoryError: It is a folder.
        ImportError: matplotlib isn't installed.
    """
    if Path(path).suffix not in PLOT_SUFFIXES:
        raise ValueError(f"plot {str(path)!r} must end in one of {', '.join(PLOT_SUFFIXES)}")
    check_target(path, "plot")
    import_figure()


def _check(rows: Sequence[Row], path: str | os.PathLike) -> None:
    check_plot(path)
    if not rows:
        raise ValueError("rows is empty: there is nothing to draw")


def save_figure(figure: Any, path: str | os.PathLike, dpi: int = 200) -> None:
    """Write a matplotlib Figure in the format that its suffix names. The file appears whole or not at all."""
    path = Path(path)
    write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=dpi))


# ---- horizon sweeps --------------------------------------------------------------------------------------------------


def plot_sweep(rows: Sequence[Row], path: str | os.PathLike, title: str = "", trained: float | None = None) -> None:
    """Draw accuracy against steps, with standard errors and the trained horizon marked. The file appears whole or not.

    Args:
        rows: Of one model, from :func:`recurrent_vit.evaluate.evaluate`.
        path: A .pdf, .png or .svg file; an existing one is replaced.
        title: Written above.
        trained: Number of steps to mark; without it, that of the rows. With another step size than that of the
            training, it takes another number of steps to integrate as long.

    Raises:
        ValueError: There are no rows.
        OSError: The file could not be written; an existing one is as it was.
        ValueError, ImportError: As :func:`check_plot`.
    """
    _check(rows, path)
    save_figure(_draw_sweep(rows, title, rows[0]["trained_horizon"] if trained is None else trained), path)


def _draw_sweep(rows: Sequence[Row], title: str, trained: float) -> Any:
    figure = import_figure()(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps = [int(row["horizon"]) for row in rows]
    top1 = [100 * row["top1"] for row in rows]
    errors = [100 * row["top1_stderr"] for row in rows]
    axes.errorbar(
        steps, top1, errors, fmt="o-", color="tab:blue", markersize=5, capsize=3, label="top-1 ± standard error"
    )
    if broken := [(x, y) for x, y, row in zip(steps, top1, rows) if row["non_finite"]]:
        axes.plot(*zip(*broken), "X", color="tab:red", markersize=8, zorder=3, label="some outputs not finite")
    label = f"{'trained horizon' if trained == rows[0]['trained_horizon'] else 'trained time'} ({trained:g})"
    axes.axvline(trained, color="0.4", linestyle="--", linewidth=1.2, zorder=1, label=label)

    dress_sweep(axes, steps, max(top1))
    axes.set(xlabel="steps", ylabel="accuracy, %")
    axes.set_title(title, parse_math=False)  # a path may hold dollars
    axes.legend(frameon=False)
    return figure


def dress_sweep(axes: Any, steps: Collection[int], most: float) -> None:
    """Steps on a logarithmic axis to base 2, accuracy from 0 to just above `most` (per cent)."""
    axes.set_xscale("log", base=2)
    ticks = sorted(steps) if len(steps) <= 12 else [2**n for n in range(max(steps).bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, min(100, 1.15 * max(most, 5)))
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


# ---- early exit ------------------------------------------------------------------------------------------------------


def plot_curve(rows: Sequence[Row], path: str | os.PathLike, title: str = "", points: Sequence[Row] = ()) -> None:
    """Draw accuracy against mean evaluations, a line for each criterion. The file appears whole or not.

    Args:
        rows: From `curve` of `recurrent_vit.calibration`, and from its `uniform` to compare with; of one model.
        path: A .pdf, .png or .svg file; an existing one is replaced.
        title: Written above.
        points: Rows to mark, of its `measure` or `choose`.

    Raises:
        ValueError, OSError, ImportError: As :func:`plot_sweep`.
    """
    _check(rows, path)
    save_figure(_draw_curve(rows, title, points), path)


def _draw_curve(rows: Sequence[Row], title: str, points: Sequence[Row]) -> Any:
    figure = import_figure()(figsize=(6, 3.9), layout="constrained")
    draw_curve(figure.add_subplot(), rows, title, points)
    return figure


def draw_curve(axes: Any, rows: Sequence[Row], title: str, points: Sequence[Row]) -> None:
    """What :func:`plot_curve` draws, into matplotlib Axes."""
    colors: dict[str, Any] = {}
    for name in dict.fromkeys(row["criterion"] for row in rows):
        x, y = _places([row for row in rows if row["criterion"] == name])
        style: dict[str, Any] = {"color": "0.5", "marker": "s", "markersize": 4} if name == "uniform" else {}
        label = "same for all images" if name == "uniform" else name
        (line,) = axes.plot(x, y, linewidth=1.5, label=label, **style)
        colors[name] = line.get_color()
    for row in points:
        axes.plot(*_places([row]), "o", color=colors.get(row["criterion"], "0.2"), markersize=7, zorder=3)
    whole = max(rows, key=lambda row: row["mean_steps"])
    axes.axhline(100 * whole["top1"], color="0.4", linestyle="--", linewidth=1, zorder=1, label="all steps")
    axes.set(xlabel="mean evaluations of the block set", ylabel="accuracy, %")
    axes.set_title(title, parse_math=False)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _places(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["mean_NFE"] for row in rows], [100 * row["top1"] for row in rows]
