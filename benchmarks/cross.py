"""Cross-evaluation: each checkpoint under solvers and step sizes that it was not trained with.

    python -m benchmarks.cross --data DIR                    # every checkpoint of one block, on 2,000 test images
                                                             # drawn once; appended to results/cross.jsonl
    python -m benchmarks.cross bvit runs/mine --data DIR     # these: as for benchmarks.accuracy
    python -m benchmarks.cross --data DIR --limit 10000      # on all test images
    python -m benchmarks.cross --data DIR --plot FILE.png    # and a picture of all rows recorded so far
    python -m benchmarks.tables                              # the rows as a table

The question is whether the solver is a refinement or an architecture. If a trained block were the field of a flow, a
method of higher order or a smaller step would follow that flow more closely and answer alike; if block and solver were
trained into one function, another solver is another function.

What is notable:

- The weights stay, and so does the time that is integrated over, trained steps times trained step size: half the step
  size takes twice the steps. All methods run along R(z) = F(z) - z; the plain recurrence is Euler with step size 1.
- Each setting is compared with the checkpoint as trained on the same images. The accuracy that it loses has the
  standard error of a paired difference, which is small where both answer alike.
- By default checkpoints of several blocks are left out, and so are those that are the same function as another.
- A time of 12 takes 600 evaluations of the block an image. By the rates in README.md that is about 20 minutes on 2
  cores for 2,000 images and an hour and a half for all 10,000: hence the default of --limit. Rows have the number of
  images as count, and other numbers are other cells.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recurrent_vit import VARIANTS, RecurrentVisionTransformer, cifar, evaluate, plots
from recurrent_vit.limits import FIELDS, LIMITS, PLAIN
from recurrent_vit.printing import percent

from . import accuracy, figures, rows, usage
from .accuracy import Subject
from .measure import report
from .rows import Row
from .usage import usage_errors

__all__ = [
    "BENCHMARK", "KEYS", "SOLVERS", "STEP_SIZES", "Setting", "command", "default_names", "draw", "is_trained_setting",
    "main", "measure", "paired", "panels", "plot", "predict", "settings",
]  # fmt: skip

BENCHMARK = "cross"
SOLVERS = ("euler", "heun2", "rk4")
STEP_SIZES = (1.0, 0.5, 0.25)
FIELD = FIELDS[0]
LIMIT = 2000
KEYS = ("benchmark", "subject", "trained_solver", "count", "as_trained", "solver", "step_size")  # of a cell


# ---- what is measured ------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """How to integrate."""

    solver: str
    step_size: float
    steps: int


def settings(time: float) -> list[Setting]:
    """The solvers and step sizes that cover this time by whole steps.

    Raises:
        ValueError: None does.

    Example:
        >>> [setting[1:] for setting in settings(1.5) if setting.solver == "rk4"]
        [(0.5, 3), (0.25, 6)]
    """
    found = [
        Setting(solver, step_size, round(time / step_size))
        for solver, step_size in product(SOLVERS, STEP_SIZES)
        if math.isclose(time / step_size, max(1, round(time / step_size))) and time / step_size <= LIMITS["horizon"]
    ]
    if not found:
        sizes = ", ".join(str(Fraction(step_size)) for step_size in STEP_SIZES)
        raise ValueError(f"the trained time of {time:g} is no whole number of steps of any size among {sizes}")
    return found


def default_names() -> list[str]:
    """The checkpoints of one block, every function once."""
    return [row.id for row in accuracy.default_checkpoints() if VARIANTS[row.name].args["depth"] == 1]


def measure(
    subject: Subject,
    model: RecurrentVisionTransformer,
    split: cifar.Split,
    *,
    device: str = "cpu",
    batch_size: int = 250,
) -> Iterator[Row]:
    """A row for the checkpoint as trained, then one for each of the `settings`, each from a pass of its own.

    Args:
        subject: What the model is.
        model: Moved to the device.
        split: Labelled images.
        device: A torch device.
        batch_size: Images in a batch.

    Returns:
        An iterator of rows. Beside the columns of `recurrent_vit.evaluate.evaluate` they have

        - as_trained: whether it is the checkpoint's own solver, field and step size that ran
        - lost, lost_stderr, agreement: against the checkpoint as trained, as `paired` describes them
        - trained_solver, trained_field, trained_time: of the checkpoint; the time is that of all rows
        - sha256: of its weights, where there is a file to look at
    """
    model, trained = model.to(device), _trained(model)
    begin = {"benchmark": BENCHMARK, "subject": subject.name}
    end = {**trained, "sha256": subject.sha256}
    row, reference = predict(model, split, model.trained_horizon, batch_size)
    yield {**begin, "as_trained": True, **row, **paired(reference, reference, split.labels), **end}
    for solver, step_size, steps in settings(trained["trained_time"]):
        other = evaluate.rebuild(model, solver=solver, field=FIELD, step_size=step_size)
        row, classes = predict(other, split, steps, batch_size)
        yield {**begin, "as_trained": False, **row, **paired(classes, reference, split.labels), **end}


def _trained(model: RecurrentVisionTransformer) -> Row:
    return {"trained_solver": model.solver, "trained_field": model.field, "trained_time": model.trained_time}


def predict(
    model: RecurrentVisionTransformer, split: cifar.Split, steps: int, batch_size: int = 250
) -> tuple[Row, Tensor]:
    """The row of `evaluate` after so many steps and, from the same pass, the class that each image was given.

    The classes are int64 (N,), on the CPU; -1 where `evaluate` counts an image as not finite.
    """
    classes: list[Tensor] = []
    broken: list[Tensor] = []
    watched: Any = model  # timm's attributes on it are dynamic

    def see_state(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        broken.append(evaluate.overflows(inputs[0]))

    def see_logits(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        classes.append(logits.argmax(-1).masked_fill(~logits.isfinite().all(-1), -1))

    # with one number of steps, a batch goes through the final norm and the head once
    with watched.norm.register_forward_pre_hook(see_state), watched.head.register_forward_hook(see_logits):
        (row,) = evaluate.evaluate(model, split, horizons=[steps], batch_size=batch_size, progress=True)
    return row, torch.cat(classes).masked_fill(torch.cat(broken), -1).cpu()


def paired(classes: Tensor, reference: Tensor, labels: Tensor) -> Row:
    """What is lost against the reference, image by image.

    Args:
        classes: int64 (N,), -1 where there is none.
        reference: The same of the checkpoint as trained.
        labels: int64 (N,).

    Returns:
        - lost, lost_stderr: as of `recurrent_vit.evaluate.paired_loss`
        - agreement: the fraction of images to which both give the same class

    Example:
        >>> row = paired(torch.tensor([0, 1, 0, -1]), torch.tensor([0, 1, 2, 0]), labels=torch.tensor([0, 1, 2, 3]))
        >>> {name: round(value, 3) for name, value in row.items()}
        {'lost': 0.25, 'lost_stderr': 0.217, 'agreement': 0.5}
    """
    same = (classes == reference) & (classes >= 0)
    return {
        **evaluate.paired_loss(classes == labels, reference == labels),
        "agreement": same.double().mean().item(),
    }


def is_trained_setting(row: Row) -> bool:
    """Whether solver, field and step size are those of the training; the plain recurrence is Euler with step size 1."""
    solver = "euler" if row["trained_solver"] == PLAIN else row["trained_solver"]
    trained = (solver, row["trained_field"], row["trained_horizon"])
    return (row["solver"], row["field"], row["horizon"]) == trained


# ---- the picture -----------------------------------------------------------------------------------------------------


def plot(measured: Iterable[Row], path: str | Path) -> None:
    """Draw accuracy against step size into a .pdf, .png or .svg file. It appears whole or not at all.

    Raises:
        ValueError: There are no rows of cross-evaluation, or the file has another suffix.
        OSError: The file can't be written; an existing one is as it was.
        ImportError: matplotlib isn't installed.
    """
    plots.check_plot(path)
    found = panels(measured)
    if not found:
        raise ValueError("there are no rows of cross-evaluation to draw; run python -m benchmarks.cross first")
    plots.save_figure(draw(found), path)


def panels(measured: Iterable[Row]) -> dict[str, list[Row]]:
    """The latest rows by checkpoint; by number of images and device too where these differ."""
    found: dict[tuple[str, str, str], dict[tuple[Any, ...], Row]] = {}
    for row in measured:
        if row.get("benchmark") == BENCHMARK:
            panel = found.setdefault((row["subject"], f"{row['count']:,} images", row["device"]), {})
            panel[row["as_trained"], row["solver"], row["step_size"]] = row
    names = figures.labels(found)
    return {names[key]: list(panel.values()) for key, panel in found.items()}


def draw(found: Mapping[str, Sequence[Row]]) -> Any:
    """A matplotlib Figure with a panel for each checkpoint, made without pyplot."""
    figure = plots.import_figure()(figsize=(0.8 + 3.2 * len(found), 3.8), layout="constrained")
    every_axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (title, panel) in zip(every_axes, found.items()):
        _draw_panel(axes, panel)
        axes.set_xscale("log", base=2)
        axes.set_xticks(STEP_SIZES, [str(Fraction(step_size)) for step_size in STEP_SIZES])
        axes.minorticks_off()
        axes.set_xlim(1.2 * max(STEP_SIZES), min(STEP_SIZES) / 1.2)  # finer to the right
        axes.set(xlabel="step size", title=title)
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    first, everything = every_axes[0], [row for panel in found.values() for row in panel]
    first.plot([], [], "o", color="0.3", **figures.RING, label="trained setting")
    if any(row["non_finite"] for row in everything):
        first.plot([], [], "X", color="tab:red", markersize=8, label="some outputs not finite")
    first.set_ylim(0, min(100, 115 * max(0.05, *(row["top1"] for row in everything))))
    first.set_ylabel("top-1 accuracy ± standard error, %")
    first.legend(frameon=False, fontsize="small")
    return figure


def _draw_panel(axes: Any, panel: Sequence[Row]) -> None:
    for solver, color in zip(SOLVERS, ("tab:blue", "tab:orange", "tab:green")):
        curve = [row for row in panel if row["solver"] == solver and not row["as_trained"]]
        curve.sort(key=lambda row: row["step_size"])
        if curve:
            sizes = [row["step_size"] for row in curve]
            top1, errors = ([100 * row[name] for row in curve] for name in ("top1", "top1_stderr"))
            style: Any = {"fmt": "o-", "color": color, "markersize": 4, "capsize": 2, "linewidth": 1.3}
            axes.errorbar(sizes, top1, errors, **style, label=solver)
    for row in panel:
        x, y = [row["step_size"]], [100 * row["top1"]]
        if row["as_trained"]:
            axes.axhline(*y, color="0.4", linestyle="--", linewidth=1, zorder=1, label="as trained")
        elif is_trained_setting(row):
            axes.plot(x, y, "o", color="0.3", **figures.RING)
        if row["non_finite"]:
            axes.plot(x, y, "X", color="tab:red", markersize=8, zorder=3)


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate one checkpoint after another, and append the rows of each when all its passes are done."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with usage_errors(parser):
        subjects, models, split = _prepare(arguments)
    out = arguments.out or rows.RESULTS / "cross.jsonl"
    origin = rows.provenance(arguments.device, command(arguments, subjects))
    for subject, model in zip(subjects, models):
        report(subject.name)
        part: list[Row] = []
        for row in measure(subject, model, split, device=arguments.device, batch_size=arguments.batch_size):
            part.append({**row, **origin})
            report(f"  {_describe(row)}")
        rows.append(out, part)
        report(f"  {len(part)} rows appended to {out}")
    if arguments.plot:
        plot(rows.read(out), arguments.plot)


def _describe(row: Row) -> str:
    what = "as trained" if row["as_trained"] else f"{row['solver']}, step size {Fraction(row['step_size'])}"
    return (
        f"{what}, NFE {row['NFE']}: top-1 {percent(row, 'top1')} %, "
        f"{percent(row, 'lost')} points lost, "
        f"{100 * row['agreement']:.1f} % answered alike"
    )


def command(arguments: argparse.Namespace, subjects: Sequence[Subject]) -> str:
    """As of `usage.command`; the names of the subjects where they were chosen."""
    names = [subject.name for subject in subjects] if arguments.names else []
    return usage.command("cross", names, arguments, _parser())


def _prepare(arguments: argparse.Namespace) -> tuple[list[Subject], list[RecurrentVisionTransformer], cifar.Split]:
    """All that the passes need, checked before the minutes that they take."""
    usage.check_amounts(arguments)
    accuracy.check_places(arguments)
    names = arguments.names or default_names()
    if not names:
        raise ValueError("NAME is missing, and the package has no checkpoints of one block; give the folder of a run")
    subjects = accuracy.resolve_all(names)
    models = [accuracy.load(subject) for subject in subjects]
    split = cifar.sample(cifar.load(arguments.data, "test"), arguments.limit)
    for subject, model in zip(subjects, models):
        try:
            evaluate.checked(model, split)
            settings(_trained(model)["trained_time"])
        except ValueError as error:
            raise ValueError(f"{subject.name}: {error}") from error
    return subjects, models, split


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cross", description=first)
    parser.add_argument("names", metavar="NAME", nargs="*", help="what to evaluate (default: checkpoints of one block)")
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=250, help="default: %(default)s")
    parser.add_argument(
        "--limit", type=int, default=LIMIT, metavar="N", help="on N test images, always the same (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="to append to (default: results/cross.jsonl here)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw all rows recorded there so far")
    return parser


if __name__ == "__main__":
    main()
