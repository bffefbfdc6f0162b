"""The pictures of the rows; here, of the horizon sweeps: accuracy against steps, a curve for each checkpoint.

    python -m benchmarks.figures FILE.png                  # all of benchmarks/results; also .pdf and .svg
    python -m benchmarks.figures FILE.png FILE.jsonl ...   # these rows
    python -m benchmarks.figures FILE.png --of cross       # or anytime: the pictures of these benchmarks

Of a cell that was measured again the latest row is drawn, as in the tables.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from recurrent_vit import plots

from . import rows
from .rows import Row
from .usage import usage_errors

__all__ = ["RING", "curves", "draw", "labels", "plot"]

Curves = Mapping[str, Sequence[Row]]


def plot(measured: Iterable[Row], path: str | Path) -> None:
    """Draw all sweeps into a .pdf, .png or .svg file. It appears whole or not at all.

    Raises:
        ValueError: There are no rows of accuracy, or the file has another suffix.
        OSError: The file can't be written; an existing one is as it was.
        ImportError: matplotlib isn't installed.
    """
    plots.check_plot(path)
    found = curves(measured)
    if not found:
        raise ValueError("there are no rows of accuracy to draw; run python -m benchmarks.accuracy first")
    plots.save_figure(draw(found), path)


def curves(measured: Iterable[Row]) -> dict[str, list[Row]]:
    """The latest rows of accuracy by subject, ascending in steps; by precision and device too where these differ."""
    found: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in measured:
        if row.get("benchmark") == "accuracy":
            found.setdefault((row["subject"], row["precision"], row["device"]), {})[row["horizon"]] = row
    names = labels(found)
    return {names[key]: [by_steps[n] for n in sorted(by_steps)] for key, by_steps in found.items()}


def labels(keys: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """What to call each of them: by its first part, and by those of the others in which they differ.

    Example:
        >>> list(labels([("a", "fp32", "cpu"), ("b", "bf16", "cpu")]).values())
        ['a, fp32', 'b, bf16']
    """
    keys = list(keys)
    differ = [len(set(part)) > 1 for part in list(zip(*keys))[1:]]
    return {key: ", ".join([key[0], *compress(key[1:], differ)]) for key in keys}


def draw(found: Curves) -> Any:
    """A matplotlib Figure, made without pyplot: no window system and no global state play a part."""
    figure = plots.import_figure()(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in found.items():
        _draw_curve(axes, label, curve)
    axes.plot([], [], "o", color="0.3", **RING, label="trained horizon")
    everything = [row for curve in found.values() for row in curve]
    if any(row["non_finite"] for row in everything):
        axes.plot([], [], "X", color="tab:red", markersize=8, label="some outputs not finite")

    plots.dress_sweep(axes, {row["horizon"] for row in everything}, 100 * max(row["top1"] for row in everything))
    axes.set(xlabel="steps", ylabel="top-1 accuracy ± standard error, %")
    axes.legend(frameon=False, fontsize="small")
    return figure


RING: dict[str, Any] = {"markersize": 11, "markeredgewidth": 1.5, "fillstyle": "none"}


def _draw_curve(axes: Any, label: str, curve: Sequence[Row]) -> None:
    steps = [row["horizon"] for row in curve]
    top1 = [100 * row["top1"] for row in curve]
    errors = [100 * row["top1_stderr"] for row in curve]
    bars = axes.errorbar(steps, top1, errors, fmt="o-", markersize=4, capsize=2, linewidth=1.3, label=label)
    color = bars.lines[0].get_color()
    for x, y, row in zip(steps, top1, curve):
        if row["horizon"] == row["trained_horizon"]:
            axes.plot([x], [y], "o", color=color, **RING)
        if row["non_finite"]:
            axes.plot([x], [y], "X", color="tab:red", markersize=8, zorder=3)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the file named first, of the rows in the others."""
    from . import anytime, cross  # which draw by means of this module

    pictures = {"accuracy": plot, "cross": cross.plot, "anytime": anytime.plot}
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=first)
    parser.add_argument("picture", type=Path, metavar="FILE", help=".pdf, .png or .svg; an existing one is replaced")
    parser.add_argument("rows", type=Path, metavar="FILE.jsonl", nargs="*", help="default: all of benchmarks/results")
    parser.add_argument("--of", choices=pictures, default="accuracy", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    with usage_errors(parser):
        pictures[arguments.of](rows.read(*(arguments.rows or sorted(rows.RESULTS.glob("*.jsonl")))), arguments.picture)


if __name__ == "__main__":
    main()
