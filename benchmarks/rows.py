"""A row: one measured cell with its statistics, and where, when and with what it was measured.

A row is a JSON object; a file of results holds one a line and only ever grows. A cell is what a table shows in one
place. Measuring it again appends a row, and tables show the latest. Every row has

    benchmark, subject           what was measured
    date, device, hardware, versions, commit, dirty, command
                                 of the run; dirty: the commit does not say it all

Rows of speed and memory, each a cell by benchmark, device, subject, reference and batch (`ROUNDS`):

    batch                        images in one call; null where none are involved
    median, min, max, unit       over the rounds
    reference                    the subject it was measured side by side with, or null
    ratio, ratio_min, ratio_max  reference / subject within a round, over the rounds: above 1, the subject is the better
    rounds, inner                rounds, and repetitions of which one round is the median
    images_per_s                 batch / median, where the unit is ms
    nfe, backend                 evaluations of the block set; the backend of torch.compile
    gflops, gemm_fraction        10^9 FLOP a second, and as a fraction of the rate of matrix products in these rounds
    note                         what a reader of the number must know

Rows of accuracy, each a cell by benchmark, device, subject, precision, trained_horizon and horizon (`STEPS`):

    subject, sha256              a checkpoint, and the sum of its file; null where that is not known
    horizon, trained_horizon, ...
                                 as `recurrent_vit.evaluate.evaluate` describes them

Rows of cross-evaluation (`cross.KEYS`) have these columns too, and

    as_trained, lost, agreement, trained_solver, ...
                                 as `benchmarks.cross.measure` describes them

Rows of the control of the field (`fields.KEYS`) have those of `evaluate`, and

    seed, pflop                  of the run, whose compute was to be so many units of 1e15 FLOP
    split                        what it was measured on, "held out N": N training images that were set aside

Rows of early exit are of three benchmarks, "anytime", "anytime curve" and "anytime time", which `benchmarks.anytime`
describes; those of engines of three, "engines", "engines int8" and "engine accuracy" (`benchmarks.engines`). The images
per second of the zoo are rows of speed. `benchmarks.paper` has no rows: it leaves the folder of a training run.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

import recurrent_vit
from recurrent_vit.machine import hardware

__all__ = ["RESULTS", "ROOT", "ROUNDS", "STEPS", "Row", "append", "cell", "compared_cells", "provenance", "read"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROUNDS = ("benchmark", "subject", "reference", "batch")
STEPS = ("benchmark", "subject", "precision", "trained_horizon", "horizon")

Row = dict[str, Any]


def cell(
    benchmark: str,
    subject: str,
    values: Sequence[float],
    *,
    reference: str | None = None,
    reference_values: Sequence[float] = (),
    batch: int | None = None,
    unit: str = "ms",
    inner: int = 1,
    note: str | None = None,
    **more: Any,
) -> Row:
    """The statistics of one cell.

    Args:
        benchmark: Which measurement it belongs to.
        subject: What was measured.
        values: One number a round, the smaller the better.
        reference: What was measured beside it in the same rounds.
        reference_values: Its numbers, round by round.
        batch: Images in one call.
        unit: Of the values.
        inner: Repetitions of which each value is the median.
        note: What a reader of the number must know.
        more: Further columns.

    Raises:
        ValueError: Subject and reference have different numbers of rounds.

    Example:
        >>> row = cell("inference", "ours", [10.0, 8.0, 10.0], reference="theirs", reference_values=[10.0, 12.0, 11.0])
        >>> row["median"], row["ratio"], row["ratio_min"], row["ratio_max"]
        (10.0, 1.1, 1.0, 1.5)
    """
    ratios = [theirs / ours for theirs, ours in zip(reference_values, values, strict=True)] if reference else []
    return {
        "benchmark": benchmark,
        "subject": subject,
        "reference": reference,
        "batch": batch,
        "unit": unit,
        **_spread("median", "min", "max", values),
        "images_per_s": round(1000 * batch / median(values), 1) if batch and unit == "ms" else None,
        **_spread("ratio", "ratio_min", "ratio_max", ratios),
        "rounds": len(values),
        "inner": inner,
        "note": note,
        **more,
    }


def compared_cells(benchmark: str, values: Mapping[str, Sequence[float]], **more: Any) -> Iterator[Row]:
    """A cell for each subject, measured in the same rounds; the first is the reference of the others."""
    reference, *others = values
    yield cell(benchmark, reference, values[reference], **more)
    for subject in others:
        yield cell(benchmark, subject, values[subject], reference=reference, reference_values=values[reference], **more)


def _spread(middle: str, least: str, most: str, values: Sequence[float]) -> Row:
    if not values:
        return dict.fromkeys((middle, least, most))
    return {name: round(f(values), 4) for name, f in ((middle, median), (least, min), (most, max))}


# ---- provenance ------------------------------------------------------------------------------------------------------


def provenance(device: str, command: str) -> Row:
    """What every row of a run says about it: date (UTC), device, hardware, versions, commit, command."""
    commit = _git("rev-parse", "--verify", "HEAD")
    # the results themselves change with every run
    changes = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "hardware": hardware(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": _version("timm"),
            "torchdiffeq": _version("torchdiffeq"),
            "onnxruntime": _version("onnxruntime"),
            "recurrent_vit": recurrent_vit.__version__,
        },
        "commit": commit,
        "dirty": None if commit is None else bool(changes),
        "command": command,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git prints; None outside a checkout of this repository, before its first commit, or without git."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# ---- files -----------------------------------------------------------------------------------------------------------


def append(path: str | Path, rows: Iterable[Row]) -> None:
    """Append the rows, one JSON object a line, in a single write: a run is recorded whole or not at all.

    Raises:
        ValueError: A number is not finite; nothing is written.
        OSError: The write failed or was cut short; the file is as it was.
    """
    data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(f"{path}: could not write {len(data)} bytes; is the disk full?")


def read(*paths: str | Path) -> Iterator[Row]:
    """The rows of the files, in order.

    Raises:
        ValueError: A line is not a JSON object; the message has file and line number.
    """
    for path in paths:
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            yield _parse(line, f"{path}:{number}")


def _parse(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    return row
