"""Early exit on the test images of CIFAR-100: accuracy against mean evaluations, and the time that is really saved.

    python -m benchmarks.anytime --data DIR               # bvit_ds; appended to results/anytime.jsonl
    python -m benchmarks.anytime runs/mine --data DIR     # a name with weights, the folder of a run, local-dir:PATH
    python -m benchmarks.anytime --data DIR --plot FILE.png
    python -m benchmarks.anytime --data DIR --limit 256   # a smoke run on 256 images; printed, never recorded

Three kinds of rows, by `benchmark`:

- "anytime": a criterion whose threshold was chosen on training images to lose at most so much there, run on the test
  images with a batch that shrinks (`recurrent_vit.calibration.measure`). `lost` is the accuracy of the plain model
  minus its own, `uniform_top1` that of stopping all images after as many steps as it takes in the mean, interpolated,
  and `calibrated_on` what the threshold was chosen on.
- "anytime curve": all thresholds on the test images, thinned out, from one pass without exits
  (`recurrent_vit.calibration.curve`); criterion "uniform" is what stopping all images after the same step gives. They
  are for the picture: no threshold is chosen here.
- "anytime time": milliseconds for a batch of test images, the mean over `BATCHES` of them, the plain model and each
  criterion in turn within a round and backwards in the next; the ratio is speed, so 1 - 1 / ratio of the time is saved.

The published weights were trained on all training images, so that thresholds come out too lax, which `calibrated_on`
says; a run of `recurrent-vit train NAME --held-out 5000` has never seen them.
It wants an otherwise idle machine.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recurrent_vit import RecurrentVisionTransformer, augment, calibration, cifar, plots
from recurrent_vit.anytime import Anytime
from recurrent_vit.printing import percent

from . import accuracy, rows, usage
from .measure import Settings, alternate, infer, milliseconds, report
from .rows import Row
from .usage import check_smoke, record, usage_errors

__all__ = ["BATCH", "MAX_LOST", "main", "outcomes", "plot", "times"]

MAX_LOST = (0.0025, 0.005)  # the first leaves room for chance: on 5,000 images a loss has an error of about that size
BATCH, BATCHES = 128, 8
POINTS = 32


def outcomes(
    name: str,
    model: RecurrentVisionTransformer,
    held: cifar.Split,
    test: cifar.Split,
    max_lost: Sequence[float] = MAX_LOST,
) -> Iterator[Row]:
    """Rows of "anytime" and "anytime curve".

    Args:
        name: What the rows call the model.
        model: On its device.
        held: Images to choose thresholds on.
        test: Images to report on.
        max_lost: Of accuracy that may be lost on `held`, as fractions.
    """
    chosen_on = calibration.record(model, held, batch_size=BATCH, progress=True)
    on_test = calibration.record(model, test, batch_size=BATCH, progress=True)
    plain = calibration.at(on_test["confidence"], None)
    for criterion, records in chosen_on.items():
        for most in max_lost:
            threshold = calibration.choose(records, most)["threshold"]
            anytime = Anytime(model, criterion, threshold)
            row = calibration.measure(anytime, test, batch_size=BATCH, progress=True)
            compared = {
                "max_lost": most,
                "lost": plain["top1"] - row["top1"],
                "lost_stderr": calibration.at(on_test[criterion], threshold)["lost_stderr"],
                "uniform_top1": calibration.uniform_top1(on_test[criterion], row["mean_steps"]),
            }
            yield {"benchmark": "anytime", "subject": name, **row, **compared}
    for records in on_test.values():
        for row in calibration.curve(records, POINTS):
            yield {"benchmark": "anytime curve", "subject": name, **row}
    for row in calibration.uniform(on_test["confidence"]):
        yield {"benchmark": "anytime curve", "subject": name, **row}


def times(
    name: str, model: RecurrentVisionTransformer, test: cifar.Split, measured: Sequence[Row], rounds: int, device: str
) -> Iterator[Row]:
    """Rows of "anytime time": the plain model, and each criterion at the thresholds of the rows of "anytime"."""
    images = augment.normalize(cifar.sample(test, BATCH * BATCHES).images.to(device)).split(BATCH)
    modules: dict[str, nn.Module] = {f"{name} plain": model.eval()}
    about: dict[str, Row] = {f"{name} plain": {"saved": 0}}
    for row in measured:
        if row["benchmark"] == "anytime":
            subject = f"{name} {row['criterion']}, {100 * row['max_lost']:g} points"
            modules[subject] = Anytime(model, row["criterion"], row["threshold"])
            about[subject] = {column: row[column] for column in ("criterion", "max_lost", "threshold", "saved")}
    settings = Settings(device=device)
    calls = {subject: partial(_per_batch, module, images, settings) for subject, module in modules.items()}
    alternate(calls, rounds=1)  # warm-up
    for row in rows.compared_cells("anytime time", alternate(calls, rounds), batch=BATCH, batches=len(images)):
        yield {**row, **about[row["subject"]]}


def _per_batch(module: nn.Module, images: Sequence[Tensor], settings: Settings) -> float:
    """Milliseconds for a batch, the mean over all of them: exits depend on the images."""
    return milliseconds(lambda: [infer(module, part) for part in images], settings) / len(images)


# ---- the picture -----------------------------------------------------------------------------------------------------


def plot(measured: Iterable[Row], path: str | Path) -> None:
    """Draw accuracy against mean evaluations, a panel for each model, into a .pdf, .png or .svg file.

    Raises:
        ValueError: There are no rows of early exit, or the file has another suffix.
        OSError: The file can't be written; an existing one is as it was.
        ImportError: matplotlib isn't installed.
    """
    plots.check_plot(path)
    latest = _latest(measured)
    if not latest:
        raise ValueError("there are no rows of early exit to draw; run python -m benchmarks.anytime first")
    figure = plots.import_figure()(figsize=(5.2 * len(latest), 3.9), layout="constrained")
    every_axes = figure.subplots(1, len(latest), squeeze=False)[0]
    for axes, (subject, found) in zip(every_axes, latest.items()):
        curves, points = ([row for row in found if row["benchmark"] == kind] for kind in ("anytime curve", "anytime"))
        plots.draw_curve(axes, curves, subject, points)
    plots.save_figure(figure, path)


def _latest(measured: Iterable[Row]) -> dict[str, list[Row]]:
    """By model, the rows of its last run, those of time left out."""
    by_run: dict[str, dict[str, list[Row]]] = {}
    for row in measured:
        if row.get("benchmark") in ("anytime", "anytime curve"):
            by_run.setdefault(row["subject"], {}).setdefault(row["date"], []).append(row)
    return {subject: found[max(found)] for subject, found in by_run.items()}


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append the rows when all is done, or print them if --limit is given."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with usage_errors(parser):
        subject, model, held, test = _prepare(arguments)
    origin = rows.provenance(arguments.device, usage.command("anytime", [subject.name], arguments, parser))
    origin["sha256"] = subject.sha256
    measured: list[Row] = []
    chosen_on = calibration.calibrated_on(subject.source, len(held))
    for row in outcomes(subject.name, model, held, test):
        more = {"calibrated_on": chosen_on} if row["benchmark"] == "anytime" else {}
        measured.append({**row, **more, **origin})
        if row["benchmark"] == "anytime":
            report(f"  {_describe(row)}")
    for row in times(subject.name, model, test, list(measured), arguments.rounds, arguments.device):
        measured.append({**row, **origin})
        ratio = f", {row['ratio']:.3f} times as fast" if row["ratio"] else ""
        report(f"  {row['subject']}: {row['median']:.4g} ms{ratio}")
    out = None if arguments.limit else arguments.out or rows.RESULTS / "anytime.jsonl"
    record(measured, out)
    if arguments.plot:
        plot(rows.read(out) if out else measured, arguments.plot)


def _describe(row: Row) -> str:
    return (
        f"{row['criterion']}, {100 * row['max_lost']:g} points allowed: threshold {row['threshold']}, "
        f"{100 * row['saved']:.1f} % of the evaluations saved, "
        f"{percent(row, 'lost')} points lost; "
        f"all stopped alike: {100 * row['uniform_top1']:.2f} %"
    )


def _prepare(arguments: argparse.Namespace) -> tuple[accuracy.Subject, Any, cifar.Split, cifar.Split]:
    """Whatever can go wrong, before the minutes that it takes."""
    _check(arguments)
    subject = accuracy.resolve(arguments.name)
    model = accuracy.load(subject).to(arguments.device)
    train, test = cifar.load(arguments.data, "train"), cifar.load(arguments.data, "test")
    held = train[cifar.held_out(train.labels, arguments.held_out)[1]]
    return subject, model, cifar.sample(held, arguments.limit), cifar.sample(test, arguments.limit)


def _check(arguments: argparse.Namespace) -> None:
    check_smoke(arguments)
    accuracy.check_places(arguments)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.anytime", description=first)
    parser.add_argument("name", metavar="NAME", nargs="?", default="bvit_ds", help="default: %(default)s")
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument(
        "--held-out",
        type=int,
        default=calibration.HELD_OUT,
        metavar="N",
        help="choose on the N training images that train --held-out N set aside (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=6, help="of the timing; even (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="a smoke run on N images, only printed")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append to (default: benchmarks/results/anytime.jsonl)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw all curves recorded there so far",
    )
    return parser


if __name__ == "__main__":
    main()
