"""The control of the field: F(z) - z beside the mis-specified F(z), trained alike by each solver.

    python -m benchmarks.fields --data DIR --runs runs/fields     # 12 runs; appended to results/fields.jsonl
    python -m benchmarks.tables                                   # the rows as a table

Each run trains a variant at a small budget on 45,000 training images, and is measured on the other 5,000: accuracy at
the trained number of steps. A row is a run; the gap is a matter of the table. A run that has its row is not trained
again, and one that was interrupted is resumed: the same command goes on. Runs of another budget are other runs.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from recurrent_vit import RecurrentVisionTransformer, calibration, cifar, evaluate, plots, runs, train
from recurrent_vit.limits import FIELDS
from recurrent_vit.printing import percent
from recurrent_vit.recipes import RECIPES, make_plan

from . import rows, usage
from .measure import report
from .rows import Row
from .usage import check_out, usage_errors

__all__ = ["ALL", "BENCHMARK", "BUDGET", "KEYS", "NAMES", "SEEDS", "Run", "main", "measure", "plan", "summary"]

BENCHMARK = "fields"
NAMES = ("bvit_ode_euler", "bvit_ode_heun", "bvit_ode_rk4")
SEEDS = (0, 1)
BUDGET = 0.12  # PFLOP of a run
# `short` with all steps in every phase. Where the number of steps grows, weights are scaled so that a step of F(z) - z
# becomes several smaller ones; the identity in F(z) cannot be scaled, so that schedule would break the control.
RECIPE = replace(
    RECIPES["short"],
    name="short, all steps",
    phases=tuple(replace(phase, fraction=Fraction(1)) for phase in RECIPES["short"].phases),
)
HELD_OUT = calibration.HELD_OUT
KEYS = ("benchmark", "pflop", "subject", "field", "seed")  # of a cell
ALL = "all"  # the seed of a row of `summary`


class Run(NamedTuple):
    """One training."""

    name: str
    field: str
    seed: int
    pflop: float = BUDGET

    @property
    def folder(self) -> str:
        return f"{self.name}.{self.field}.{self.pflop:g}_pflop.seed_{self.seed}"


def plan(pflop: float = BUDGET) -> list[Run]:
    """All runs; those of a seed together, so that a table of one seed is complete before the next begins."""
    return [Run(name, field, seed, pflop) for seed, name, field in product(SEEDS, NAMES, FIELDS)]


# ---- what is measured ------------------------------------------------------------------------------------------------


def measure(run: Run, split: cifar.Split, folder: Path) -> Row:
    """Train on all but the held-out images, or go on with it, and measure on those.

    Raises:
        ValueError: The folder holds another run.
    """
    rest, kept = _held_out(split)
    asked: dict[str, Any] = {"seed": run.seed, "pflop": run.pflop, "model_kwargs": {"field": run.field}}
    if (folder / "run.json").is_file():  # written last
        model = _finished(train.make_job(run.name, RECIPE, split[rest], **asked), folder)
    else:
        model = train.fit(run.name, RECIPE, split[rest], folder, resume=True, **asked)
    (row,) = evaluate.evaluate(model, split[kept])
    begin = {"benchmark": BENCHMARK, "subject": run.name, "seed": run.seed, "pflop": run.pflop}
    return {**begin, "split": f"held out {len(kept)}", **row}


def _held_out(split: cifar.Split) -> tuple[torch.Tensor, torch.Tensor]:
    return cifar.held_out(split.labels, min(HELD_OUT, len(split) // 10))


def _finished(job: train.Job, folder: Path) -> RecurrentVisionTransformer:
    """The model of a run that has ended, if it is this one."""
    found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for key, value in job.identity().items():
        if found.get(key) != value:
            raise ValueError(f"{folder} holds another run: its {key} is {found.get(key)!r}, asked for is {value!r}")
    return runs.load_result(folder)


def remaining(planned: Iterable[Run], done: Iterable[Row]) -> list[Run]:
    """The runs that have no row yet."""
    there = {
        Run(row["subject"], row["field"], row["seed"], row["pflop"]) for row in done if row["benchmark"] == BENCHMARK
    }
    return [run for run in planned if run not in there]


# ---- what the runs come to -------------------------------------------------------------------------------------------


def summary(measured: Iterable[Row]) -> Iterator[Row]:
    """A row of seed `ALL` for each variant and field of each budget, from the latest row of each seed.

    Returns:
        An iterator of rows: what the seeds have in common, as it is in the last, and

        - mean: of top1 over the seeds
        - gap, gap_min, gap_max: top1 of F(z) - z minus that of F(z) with the same seed, the mean and the extremes over
          the seeds that have both; None where none has

    Example:
        >>> runs = {("state_subtracted", 0): 0.5, ("black_box", 0): 0.25, ("state_subtracted", 1): 0.75}
        >>> same = {"benchmark": "fields", "device": "cpu", "pflop": 0.12, "subject": "bvit_ode_rk4"}
        >>> made = [{**same, "field": field, "seed": seed, "top1": top1} for (field, seed), top1 in runs.items()]
        >>> [(row["field"], row["mean"], row["gap"]) for row in summary(made)]
        [('state_subtracted', 0.625, 0.25), ('black_box', 0.25, 0.25)]
    """
    found: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in measured:
        if row["benchmark"] == BENCHMARK:
            place = (row["device"], row["pflop"], row["subject"], row["field"])
            found.setdefault(place, {})[row["seed"]] = row
    for (*variant, _), by_seed in found.items():
        ours, theirs = (found.get((*variant, field), {}) for field in FIELDS)
        gaps = [ours[seed]["top1"] - theirs[seed]["top1"] for seed in ours if seed in theirs]
        statistics = (fmean(gaps), min(gaps), max(gaps)) if gaps else (None, None, None)
        last = list(by_seed.values())[-1]
        mean = fmean(row["top1"] for row in by_seed.values())
        yield {**last, "seed": ALL, "mean": mean, **dict(zip(("gap", "gap_min", "gap_max"), statistics))}


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Train and measure what has no row yet, and append a row after each."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with usage_errors(parser):
        planned, split = _prepare(arguments)
    torch.set_flush_denormal(True)
    origin = rows.provenance("cpu", command(arguments))
    diverged = []
    for number, run in enumerate(planned, start=1):
        report(f"{number} of {len(planned)}: {run.name}, {run.field}, seed {run.seed}")
        try:
            row = measure(run, split, arguments.runs / run.folder)
        except FloatingPointError as error:  # a result too: the others are still run
            report(f"  {error}")
            diverged.append(run.folder)
            continue
        rows.append(arguments.out, [{**row, **origin}])
        report(f"  held-out top-1 {percent(row, 'top1')} %")
    if diverged:
        sys.exit(f"without a finite loss, and so without a row: {', '.join(diverged)}")


def command(arguments: argparse.Namespace) -> str:
    """As of `usage.command`."""
    return usage.command("fields", [], arguments, _parser())


def _prepare(arguments: argparse.Namespace) -> tuple[list[Run], cifar.Split]:
    """What is to be trained, and on what; checked before the hours that it takes."""
    check_out(arguments.out)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    plots.import_figure()  # for the learning curves
    split = cifar.load(arguments.data, "train")
    images, planned = len(_held_out(split)[0]), plan(arguments.pflop)
    for run in planned:
        try:
            make_plan(run.name, RECIPE, images, run.pflop, field=run.field)
        except ValueError as error:
            raise ValueError(f"--pflop {arguments.pflop:g}: {error}") from error
    return remaining(planned, rows.read(arguments.out) if arguments.out.exists() else ()), split


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fields", description=first)
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/fields"), help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument("--pflop", type=float, default=BUDGET, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "fields.jsonl", help="default: results/fields.jsonl")
    return parser


if __name__ == "__main__":
    main()
