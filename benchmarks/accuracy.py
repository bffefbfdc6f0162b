"""Accuracy of every checkpoint on the test images of CIFAR-100, after its own number of steps and after others.

    python -m benchmarks.accuracy --data DIR                  # every checkpoint that is a function of its own;
                                                              # appended to results/accuracy.jsonl
    python -m benchmarks.accuracy bvit runs/mine --data DIR   # these: a name with weights, the folder of a run,
                                                              # local-dir:PATH or hf-hub:ORG/NAME
    python -m benchmarks.accuracy --data DIR --limit 100      # a smoke run on 100 images; printed, never recorded
    python -m benchmarks.tables                               # the rows as tables
    python -m benchmarks.figures FILE.png                     # the sweeps as a picture, as --plot FILE does at the end

What is notable:

- One pass serves all numbers of steps (`recurrent_vit.evaluate`). The trained one is always among them.
- The rows of a checkpoint are appended when its pass is done: a run that is cut short has recorded whole passes only.
- The command in a row says DIR for the folder of the data, and leaves out where rows and picture were written.

A step of `vit_cifar` is twelve blocks, one of `bvit_ode_rk4` four evaluations: beyond their horizon these cost most.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from recurrent_vit import RecurrentVisionTransformer, cifar, evaluate, plots, runs, weights
from recurrent_vit.machine import check_device
from recurrent_vit.printing import percent

from . import figures, rows, usage
from .measure import report
from .rows import Row
from .usage import check_out, check_smoke, record, usage_errors

__all__ = [
    "BENCHMARK", "HORIZONS", "Subject", "check_places", "command", "default_checkpoints", "load", "main", "measure",
    "resolve", "resolve_all",
]  # fmt: skip

BENCHMARK = "accuracy"
HORIZONS = (1, 2, 4, 8, 12, 24, 48, 96)


class Subject(NamedTuple):
    """What is evaluated.

    Args:
        name: What the rows call it: NAME.TAG, or what was given, of an absolute path the last part.
        source: For `load`.
        sha256: Of its weights, where there is a file to look at.
    """

    name: str
    source: str
    sha256: str | None


def resolve(text: str) -> Subject:
    """What is meant by a NAME, a NAME.TAG, the folder of a run, local-dir:PATH, or hf-hub:ORG/NAME.

    Raises:
        ValueError: It is none of them.
    """
    prefix = "local-dir:" if text.startswith("local-dir:") else ""
    folder = Path(text.removeprefix(prefix)).expanduser()
    if prefix or runs.is_folder(text):
        file = folder / weights.FILE
        digest = weights.sha256(file) if file.is_file() else None
        name = folder.name if folder.is_absolute() else folder.as_posix()
        return Subject(f"{prefix}{name}", f"{prefix}{folder}" if prefix else text, digest)
    if text.startswith("hf-hub:"):
        return Subject(text, text, None)
    try:
        row = weights.find(text)
    except ValueError as error:
        raise ValueError(f"NAME {error}; or give the folder of a run, local-dir:PATH or hf-hub:ORG/NAME") from error
    return Subject(row.id, row.id, row.sha256)


def resolve_all(names: Sequence[str]) -> list[Subject]:
    """What is meant by each.

    Raises:
        ValueError: One is none of what `resolve` knows, or two have the same name.
    """
    subjects = [resolve(name) for name in names]
    called = [subject.name for subject in subjects]
    if twice := {name for name in called if called.count(name) > 1}:
        raise ValueError(f"NAME: {', '.join(sorted(twice))} is there twice; rows could not be told apart")
    return subjects


def default_checkpoints() -> list[weights.Checkpoint]:
    """Every function once: the checkpoints but those whose row says that another is the same function."""
    return [row for row in weights.checkpoints() if not row.same_as]


def load(subject: Subject) -> RecurrentVisionTransformer:
    """The model with its weights, on the CPU.

    Raises:
        ValueError: It is no recurrent Vision Transformer, or its weights don't fit.
        OSError: A file is missing, or cannot be downloaded.
    """
    return runs.load_model(subject.source)


def measure(
    subject: Subject,
    model: RecurrentVisionTransformer,
    split: cifar.Split,
    *,
    horizons: Sequence[int] = HORIZONS,
    device: str = "cpu",
    precision: str = "fp32",
    batch_size: int = 250,
) -> Iterator[Row]:
    """A row for each number of steps, ascending, the trained one among them; one pass.

    Args:
        subject: What the model is.
        model: Moved to the device.
        split: Labelled images.
        horizons: Numbers of steps.
        device: A torch device.
        precision: "fp32" or "bf16".
        batch_size: Images in a batch.
    """
    found = evaluate.evaluate(
        model.to(device),
        split,
        horizons={*horizons, model.trained_horizon},
        batch_size=batch_size,
        precision=precision,
        progress=True,
    )
    for row in found:
        yield {"benchmark": BENCHMARK, "subject": subject.name, **row, "sha256": subject.sha256}


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate one checkpoint after another, and append the rows of each, or print them if --limit is given."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with usage_errors(parser):
        subjects, models, split = _prepare(arguments)
    out = None if arguments.limit else arguments.out or rows.RESULTS / "accuracy.jsonl"
    origin = rows.provenance(arguments.device, command(arguments, subjects))
    options = {name: getattr(arguments, name) for name in ("device", "precision", "batch_size")}
    measured: list[Row] = []
    for subject, model in zip(subjects, models):
        report(subject.name)
        part = [{**row, **origin} for row in measure(subject, model, split, horizons=arguments.horizon, **options)]
        _record(part, out)
        measured += part
    if arguments.plot:
        figures.plot(rows.read(out) if out else measured, arguments.plot)


def _record(part: list[Row], out: Path | None) -> None:
    for row in part:
        report(f"  {row['horizon']} steps: top-1 {percent(row, 'top1')} %")
    record(part, out)


def command(arguments: argparse.Namespace, subjects: Sequence[Subject]) -> str:
    """As of `usage.command`; the names of the subjects where they were chosen."""
    names = [subject.name for subject in subjects] if arguments.names else []
    return usage.command("accuracy", names, arguments, _parser())


def _prepare(arguments: argparse.Namespace) -> tuple[list[Subject], list[RecurrentVisionTransformer], cifar.Split]:
    """All that the passes need, checked before the minutes that they take."""
    check_smoke(arguments)
    check_places(arguments)
    names = arguments.names or [row.id for row in default_checkpoints()]
    if not names:
        raise ValueError("NAME is missing, and the package has no checkpoints; give the folder of a run")
    subjects = resolve_all(names)
    split = cifar.sample(cifar.load(arguments.data, "test"), arguments.limit)
    return subjects, [load(subject) for subject in subjects], split


def check_places(arguments: argparse.Namespace) -> None:
    """Whether --device, --out and --plot will do: to be asked before the minutes that the rows take.

    Raises:
        ValueError, OSError, ImportError: One will not; says which.
    """
    check_device(arguments.device)
    if arguments.out:
        check_out(arguments.out)
    if arguments.plot:
        plots.check_plot(arguments.plot)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=first)
    names = "what to evaluate (default: every checkpoint, the same function once)"
    parser.add_argument("names", metavar="NAME", nargs="*", help=names)
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--precision", choices=evaluate.PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument(
        "--horizon",
        type=_horizons,
        default=HORIZONS,
        metavar="1,2,4,...",
        help=f"numbers of steps, beside the trained one (default: {','.join(map(str, HORIZONS))})",
    )
    parser.add_argument("--batch-size", type=int, default=250, help="default: %(default)s")
    parser.add_argument("--limit", type=int, metavar="N", help="a smoke run on N images, always the same, only printed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="to append to (default: results/accuracy.jsonl here)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the sweeps of all rows recorded there so far")
    return parser


def _horizons(text: str) -> tuple[int, ...]:
    try:
        return evaluate.parse_horizons(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
