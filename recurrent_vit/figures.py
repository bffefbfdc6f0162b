"""The page that `recurrent-vit dynamics` writes: tables, and pictures, each with a caption that says what it shows.

A picture is a row of PICTURES: a file name, a caption, and a function that draws into an empty figure. Figures are made
without pyplot, so no window system and no global state play a part, and their files appear whole or not at all.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import plots
from .dynamics import Dynamics, Jacobians
from .equilibrium import Solution
from .files import write_atomically
from .measures import pca

__all__ = ["PICTURES", "Findings", "Picture", "draw", "write"]

PAGE = "dynamics.md"
LINES = 40  # trajectories in a picture; more would hide each other


class Findings(NamedTuple):
    """What the pictures are drawn from."""

    title: str
    seen: Dynamics
    jacobians: Jacobians
    controls: Mapping[str, Solution]  # by method


class Picture(NamedTuple):
    """One picture of the page."""

    file: str
    caption: str
    draw: Callable[[Any, Findings], None]  # into a matplotlib Figure


def write(folder: Path, findings: Findings, tables: Mapping[str, str]) -> list[Path]:
    """Write the pictures and dynamics.md, the page with the tables and them.

    Args:
        folder: An existing one; files of these names are replaced.
        findings: What to draw.
        tables: Markdown by heading.

    Returns:
        What was written, the page first.

    Raises:
        OSError: A file could not be written; an existing one of that name is as it was.
        ImportError: matplotlib isn't installed.
    """
    page = [f"# {findings.title}"]
    page += [f"## {heading}\n\n{table}" for heading, table in tables.items()]
    written = [folder / PAGE]
    for picture in PICTURES:
        written.append(folder / picture.file)
        plots.save_figure(draw(picture, findings), written[-1], dpi=150)
        page.append(f"![{picture.file}]({picture.file})\n\n{picture.caption}")
    text = "\n\n".join(page) + "\n"
    write_atomically(written[0], lambda file: file.write(text.encode()))
    return written


def draw(picture: Picture, findings: Findings) -> Any:
    """The matplotlib Figure of a picture, its caption below."""
    figure = plots.import_figure()(figsize=(9, 6), layout="constrained")
    picture.draw(figure, findings)
    figure.suptitle(findings.title, fontsize="medium", parse_math=False)
    figure.supxlabel(
        textwrap.fill(picture.caption, 125, break_on_hyphens=False), x=0.02, ha="left", fontsize=8.5, color="0.25"
    )
    return figure


# ---- the pictures ----------------------------------------------------------------------------------------------------


def _motion(figure: Any, findings: Findings) -> None:
    seen, (panels_above, panels_below) = findings.seen, figure.subplots(2, 2)
    size, straightness = panels_above
    growth, dimension = panels_below
    steps = range(seen.horizon + 1)
    for name, label, color in (
        ("step_norm", "step norm  |z(t) - z(t-1)| / |z(t-1)|", "tab:blue"),
        ("residual", "residual  |R(z(t))| / |z(t)|", "tab:orange"),
    ):
        _band(size, steps, seen.images[name], label, color)
    _log_scale(size, seen.images["residual"])
    size.set_ylabel("relative to the state")
    _band(straightness, steps, seen.images["cosine"], "cosine of successive updates", "tab:green")
    straightness.set(ylim=(-1.05, 1.05), ylabel="cosine")
    _band(growth, steps, seen.images["rms"], "state", "tab:purple")
    growth.set_ylabel("root mean square")
    _log_scale(growth, seen.images["rms"])
    for values, label, color in (
        (seen.participation_tokens, "tokens", "tab:brown"),
        (seen.participation_class, "class states", "tab:red"),
    ):
        dimension.plot(steps, values.tolist(), label=f"participation ratio of {label}", color=color)
    dimension.set_ylabel("dimensions")
    for axes in (size, straightness, growth, dimension):
        _finish(axes, seen)


def _decision(figure: Any, findings: Findings) -> None:
    seen, (accuracy, entropy) = findings.seen, figure.subplots(1, 2)
    steps, count = range(seen.horizon + 1), seen.images["correct"].shape[1]
    top1 = seen.images["correct"].mean(1)
    error = (top1 * (1 - top1) / count).sqrt()
    accuracy.plot(steps, (100 * top1).tolist(), color="tab:blue", label="accuracy ± standard error")
    low, high = ((100 * (top1 + sign * error)).tolist() for sign in (-1, 1))
    accuracy.fill_between(steps, low, high, color="tab:blue", alpha=0.2, linewidth=0)
    accuracy.axhline(100 / seen.num_classes, color="0.6", linestyle=":", label="chance")
    accuracy.set(ylim=(0, max(5.0, 115 * top1.max().item())), ylabel="correct, %")
    _band(entropy, steps, seen.images["entropy"], "entropy of the prediction", "tab:orange")
    entropy.axhline(math.log(seen.num_classes), color="0.6", linestyle=":", label="all classes alike")
    entropy.set(ylabel="nats", ylim=(0, 1.25 * max(math.log(seen.num_classes), 0.1)))
    for axes in (accuracy, entropy):
        _finish(axes, seen)


def _similarity(figure: Any, findings: Findings) -> None:
    seen, axes = findings.seen, figure.subplots()
    shown = axes.imshow(seen.cka.clamp(0, 1).numpy(), origin="lower", cmap="magma", vmin=0, vmax=1)
    for line in (axes.axhline, axes.axvline):
        line(seen.trained_horizon, color="white", linestyle="--", linewidth=1)
    axes.set(
        xlabel="step", ylabel="step", xlim=(-0.5, seen.horizon + 0.5), ylim=(-0.5, seen.horizon + 0.5),
    )  # fmt: skip
    figure.colorbar(shown, ax=axes, label="CKA")


def _trajectories(figure: Any, findings: Findings) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Normalize

    seen, panels = findings.seen, figure.subplots(1, 2, sharex=True, sharey=True)
    trained, norm = min(seen.trained_horizon, seen.horizon), Normalize(0, seen.horizon)
    whole = seen.class_states.isfinite().all(-1).all(0)
    states = seen.class_states[:, whole]
    if states.shape[1] < 2:
        panels[0].text(0.5, 0.5, "fewer than two trajectories are finite", ha="center", transform=panels[0].transAxes)
        return
    plane = pca(states.flatten(0, 1))
    paths = plane.project(states[:, :LINES]).transpose(0, 1)  # (images, H + 1, 2)
    correct = seen.images["correct"][trained, : len(whole)][whole][:LINES] == 1
    parts = (("up to the trained step", 0, trained), ("beyond it", trained, seen.horizon))
    for axes, (title, first, last) in zip(panels, parts):
        for path in paths if first < last else ():
            segments = torch.stack([path[first:last], path[first + 1 : last + 1]], 1).tolist()
            axes.add_collection(
                LineCollection(segments, array=range(first, last), norm=norm, cmap="viridis", linewidth=1)
            )
        for right, marker, color in ((True, "o", "tab:green"), (False, "X", "tab:red")):
            x, y = paths[correct == right, trained].T.tolist()
            axes.plot(x, y, marker, color=color, markersize=4, label=f"trained step, {'right' if right else 'wrong'}")
        shares = [f"{100 * share:.0f} % of the variance" for share in plane.explained.tolist()]
        axes.set(title=title, xlabel=f"first component, {shares[0]}")
        axes.set_ylabel(f"second component, {shares[1]}" if axes is panels[0] else "")
    margin = 0.05 * (paths.amax((0, 1)) - paths.amin((0, 1))) + 1e-9
    low, high = (paths.amin((0, 1)) - margin).tolist(), (paths.amax((0, 1)) + margin).tolist()
    panels[0].set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    panels[0].legend(frameon=False, fontsize="small")
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=list(panels), label="step")


def _growth(figure: Any, findings: Findings) -> None:
    found, axes = findings.jacobians, figure.subplots()
    _band(axes, range(1, len(found.growth) + 1), found.growth, "growth along the orbit, a step", "tab:blue")
    for values, label, marker, color in (
        (found.sigma_max, "largest singular value", "^", "tab:red"),
        (found.spectral_radius, "spectral radius", "o", "tab:green"),
    ):
        low, middle, high = _quantiles(values)
        spread = [[m - a for a, m in zip(low, middle)], [b - m for m, b in zip(middle, high)]]
        axes.errorbar(found.steps, middle, spread, fmt=marker, color=color, capsize=3, label=label)
    axes.axhline(1, color="0.3", linewidth=1, label="neither grows nor shrinks")
    _log_scale(axes, found.growth)
    axes.set_ylabel("factor")
    _finish(axes, findings.seen)


def _controls(figure: Any, findings: Findings) -> None:
    axes = figure.subplots()
    colors = ("tab:blue", "tab:orange", "tab:green", "tab:red")
    for (name, solution), color in zip(findings.controls.items(), colors):
        converged = int(solution.converged.sum())
        label = f"{name}: {converged} of {len(solution.converged)} images converged, NFE {solution.nfe}"
        _band(axes, solution.evaluations, solution.residuals, label, color, marker=".")
    if findings.controls:
        _log_scale(axes, torch.cat([solution.residuals for solution in findings.controls.values()]))
    axes.axhline(1, color="0.3", linewidth=1, label="as at the start")
    axes.set(xlabel="evaluations of the block set", ylabel="|f(z)| / |f(z(0))|")
    _tidy(axes)


BAND = "Lines are medians over the images, bands reach from the 10th to the 90th percentile. "
PICTURES: tuple[Picture, ...] = (
    Picture(
        "decision.png",
        "What is decided, step by step: the share of images that the head classifies correctly from the state after so "
        "many steps, and the entropy of its prediction (median; the band reaches from the 10th to the 90th "
        "percentile). The dashed line is the number of steps that the model was trained for.",
        _decision,
    ),
    Picture(
        "trajectories.png",
        f"Where the class state goes: for up to {LINES} images its path in the plane of its two largest principal "
        "components, which are those of all steps and images together; colour is time. A dot is an image that is "
        "classified correctly after the trained number of steps, a cross one that isn't.",
        _trajectories,
    ),
    Picture(
        "motion.png",
        f"How the state moves. {BAND}The residual is zero at a fixed point, the cosine 1 for a straight path and -1 "
        "for a swing back and forth. The participation ratio counts the directions that the variance is spread over: "
        "of all tokens of all images, and of the class states.",
        _motion,
    ),
    Picture(
        "similarity.png",
        "Which steps hold the same representation: centred kernel alignment (unbiased, linear kernel of the whole "
        "state) between every two steps; 1 is equal up to rotation and scale, 0 unrelated. Dashed: the trained step.",
        _similarity,
    ),
    Picture(
        "growth.png",
        "What becomes of a small change of the state, by the Jacobian of the step map. Blue: by what factor each step "
        "stretches the change that the steps before it have left. Red: the most that the step from here could stretch "
        f"any change. Green: growth per step if the state stood still here. {BAND}Above 1, nearby states part.",
        _growth,
    ),
    Picture(
        "controls.png",
        f"Solvers that look for a fixed point, and adaptive integration, on the same field f. {BAND}A method that "
        "converges falls below its tolerance; one that stays near 1 wanders, one that rises diverges. dopri5 "
        "integrates up to the trained time and has converged if it gets there.",
        _controls,
    ),
)


# ---- what they share -------------------------------------------------------------------------------------------------


def _quantiles(values: Tensor) -> tuple[list[float], list[float], list[float]]:
    """The 10th, 50th and 90th percentile over the images (T, n) that have a finite number; NaN where none has."""
    values = values.where(values.isfinite(), math.nan)
    low, middle, high = (torch.nanquantile(values, q, dim=1).tolist() for q in (0.1, 0.5, 0.9))
    return low, middle, high


def _band(axes: Any, x: Sequence[int], values: Tensor, label: str, color: str, marker: str = "") -> None:
    low, middle, high = _quantiles(values)
    axes.plot(x, middle, marker=marker, color=color, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _log_scale(axes: Any, values: Tensor) -> None:
    """Where there is something that such a scale can show."""
    if (values.isfinite() & (values > 0)).any():
        axes.set_yscale("log")


def _finish(axes: Any, seen: Dynamics) -> None:
    axes.axvline(seen.trained_horizon, color="0.4", linestyle="--", linewidth=1.2, zorder=1)
    axes.set(xlabel="step", xlim=(-0.02 * seen.horizon, 1.02 * seen.horizon))  # room for markers at the ends
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(color="0.93")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
