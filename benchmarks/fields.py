"""The control of the field: F(z) - z beside the mis-specified F(z), trained alike by each solver.

    python -m benchmarks.fields --data DIR --runs runs/fields     # 12 runs; appended to results/fields.jsonl

Each run trains a variant by the recipe `short` at a small budget on 45,000 training images, and is measured on the
other 5,000: accuracy at the trained number of steps. A row is a run; the gap is a matter of the table. A run that has
its row is not trained again, and one that was interrupted is resumed: the same command goes on.
"""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recurrent_vit import cifar, evaluate, runs, train
from recurrent_vit.limits import FIELDS
from recurrent_vit.recipes import RECIPES

from . import rows
from .measure import report
from .rows import Row

__all__ = ["BENCHMARK", "NAMES", "PFLOP", "SEEDS", "Run", "main", "measure", "plan"]

BENCHMARK = "fields"
NAMES = ("bvit_ode_euler", "bvit_ode_heun", "bvit_ode_rk4")
SEEDS = (0, 1)
PFLOP = 0.12
HELD_OUT = 5000


class Run(NamedTuple):
    """One training."""

    name: str
    field: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.name}.{self.field}.{self.seed}"


def plan(seeds: Sequence[int] = SEEDS) -> list[Run]:
    """All runs; those of a seed together, so that a table of one seed is complete before the next begins."""
    return [Run(name, field, seed) for seed, name, field in product(seeds, NAMES, FIELDS)]


def measure(run: Run, split: cifar.Split, folder: Path, pflop: float = PFLOP, **model_kwargs: Any) -> Row:
    """Train on all but the held-out images, or go on with it, and measure on those."""
    rest, kept = cifar.held_out(split.labels, min(HELD_OUT, len(split) // 10))
    if (folder / "run.json").is_file():  # written last
        model = runs.load_result(folder)
    else:
        model = train.fit(
            run.name, RECIPES["short"], split[rest], folder,
            seed=run.seed, pflop=pflop, resume=True, model_kwargs={"field": run.field, **model_kwargs},
        )  # fmt: skip
    (row,) = evaluate.evaluate(model, split[kept])
    return {"benchmark": BENCHMARK, "subject": run.name, "seed": run.seed, "pflop": pflop, "split": "held out", **row}


def remaining(planned: Sequence[Run], done: Iterator[Row]) -> list[Run]:
    """The runs that have no row yet."""
    there = {Run(row["subject"], row["field"], row["seed"]) for row in done if row["benchmark"] == BENCHMARK}
    return [run for run in planned if run not in there]


def main(argv: Sequence[str] | None = None) -> None:
    """Train and measure what has no row yet, and append a row after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fields", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/fields"), help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument("--pflop", type=float, default=PFLOP, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "fields.jsonl", help="default: results/fields.jsonl")
    arguments = parser.parse_args(argv)
    split = cifar.load(arguments.data, "train")
    torch.set_flush_denormal(True)
    words = ["python", "-m", "benchmarks.fields", "--data", "DIR"]
    if arguments.pflop != PFLOP:
        words += ["--pflop", f"{arguments.pflop:g}"]
    origin = rows.provenance("cpu", shlex.join(words))
    planned = remaining(plan(), rows.read(arguments.out) if arguments.out.exists() else iter(()))
    for number, run in enumerate(planned, start=1):
        report(f"{number} of {len(planned)}: {run.name}, {run.field}, seed {run.seed}")
        row = measure(run, split, arguments.runs / run.folder, arguments.pflop)
        rows.append(arguments.out, [{**row, **origin}])
        report(f"  held-out top-1 {100 * row['top1']:.2f} ± {100 * row['top1_stderr']:.2f} %")


if __name__ == "__main__":
    main()
