"""Tables of the measured rows, in Markdown: the latest row of each cell, and below each table where the rows come from.

    python -m benchmarks.tables                  # all of benchmarks/results
    python -m benchmarks.tables FILE.jsonl ...   # these files

A cell without a row says "not run".
"""

import sys
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

from recurrent_vit import weights
from recurrent_vit.limits import FIELDS
from recurrent_vit.printing import percent

from . import accuracy, cross, fields, rows
from .markdown import NOT_RUN, Cell, Column, Columns, Table, latest, render
from .measure import TIMM_VIT, Settings
from .processes import COMPILE, COMPILE_REFERENCE, MEMORY_TASKS, TOOLCHAIN, stage_subjects
from .rows import Row
from .speed import GEMM, INFERENCE, ODE
from .speed import torchdiffeq_name as theirs

__all__ = ["TABLES", "accuracy_tables", "anytime_tables", "cross_tables", "engine_tables", "fields_tables", "tables"]

FULL = Settings()


def _median(row: Row) -> str:
    median, least, most = (_short(row[name]) for name in ("median", "min", "max"))
    return f"{median} {row['unit']} ({least} to {most})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ratio(row: Row) -> str:
    if row["ratio"] is None:
        return ""
    return f"{row['ratio']:.3f} x {row['reference']} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"


def _top1(row: Row) -> str:
    """Per cent, with what must be known of it."""
    broken = f" ({row['non_finite']:,} not finite)" if row["non_finite"] else ""
    return f"{percent(row, 'top1')}{broken}"


def _top1_marked(row: Row) -> str:
    return f"**{_top1(row)}**" if row["horizon"] == row["trained_horizon"] else _top1(row)


def _top1_and_lost(row: Row) -> str:
    text = f"{_top1(row)} (lost {percent(row, 'lost')})"
    return f"**{text}**" if cross.is_trained_setting(row) else text


def _gap(row: Row) -> str:
    """In points, on the line of F(z) - z alone."""
    if row["field"] != FIELDS[0]:
        return ""
    if row["gap"] is None:
        return NOT_RUN
    gap, least, most = (f"{100 * row[name]:+.2f}" for name in ("gap", "gap_min", "gap_max"))
    return f"{gap} ({least} to {most})"


def _engine(row: Row) -> str:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} x, "
    return f"{row['images_per_s']:,.0f} ({ratio}{row['gemm_fraction']:.0%})"


def _threshold(row: Row) -> str:
    return "never" if row["threshold"] is None else f"{row['threshold']:.4g}"


def _number(name: str, form: str) -> Column:
    """A column of plain numbers; empty where the row has none."""
    return Column(lambda row: "" if row.get(name) is None else format(row[name], form))


MEDIAN: Columns = {"median (min to max)": Column(_median)}
RATIO: Columns = {
    "ratio (min to max)": Column(_ratio),
    "rounds x inner": Column(lambda row: f"{row['rounds']} x {row['inner']}"),
}
IMAGES: Columns = {"images/s": _number("images_per_s", ",.0f")}
GFLOPS: Columns = {"GFLOP/s": _number("gflops", ",.0f"), "of the matrix product": _number("gemm_fraction", ".1%")}
ACCURACY: Columns = {
    "top-1 %": Column(_top1),
    "top-5 %": Column(lambda row: f"{100 * row['top5']:.2f}"),
    "loss": _number("loss", ".4f"),
    "not finite": _number("non_finite", ",d"),
    "images": _number("count", ",d"),
    "NFE": _number("NFE", "d"),
    "MACs": _number("MACs", ",d"),
    "parameters": _number("parameters", ",d"),
}
SWEEP: Columns = {str(horizon): Column(_top1_marked, at=(horizon,)) for horizon in accuracy.HORIZONS}
CROSS: Columns = {
    "NFE at step size 1": Column(lambda row: str(row["NFE"]), at=(1.0,)),
    **{f"step size {Fraction(size)}": Column(_top1_and_lost, at=(size,)) for size in cross.STEP_SIZES},
}
CONTROL: Columns = {
    "NFE": Column(lambda row: str(row["NFE"]), at=(fields.ALL,)),
    **{f"seed {seed}": Column(_top1, at=(seed,)) for seed in fields.SEEDS},
    "mean": Column(lambda row: f"{100 * row['mean']:.2f}", at=(fields.ALL,)),
    f"{FIELDS[0]} - {FIELDS[1]} (min to max)": Column(_gap, at=(fields.ALL,)),
}


ENGINES = ("engines", "engines int8", "engine accuracy")
ANYTIME = ("anytime", "anytime time")
ANYTIME_KEYS = ("benchmark", "subject", "criterion", "max_lost")
LOST: Columns = {
    "top-1 %": Column(lambda row: percent(row, "top1")),
    "lost, points": Column(lambda row: percent(row, "lost")),
}


TABLES = (
    Table(
        "Inference",
        "One forward pass; the ratio is speed, above 1 faster than the reference.",
        [
            ("inference", subject, None if subject == TIMM_VIT else TIMM_VIT, batch)
            for batch in FULL.batches
            for subject in (TIMM_VIT, *INFERENCE)
        ],
        {**MEDIAN, **IMAGES, **RATIO},
    ),
    Table(
        "Training step",
        "Forward, cross-entropy, backward and AdamW; the ratio is speed, above 1 faster than the reference.",
        [
            ("training", TIMM_VIT, None, FULL.train_batch),
            ("training", "bvit", TIMM_VIT, FULL.train_batch),
            ("training", GEMM, None, None),
        ],
        {**MEDIAN, **IMAGES, **GFLOPS, **RATIO},
    ),
    Table(
        "ODE variants and torchdiffeq",
        "The same forward pass at as many evaluations (NFE); the ratio is speed, above 1 faster than the reference. "
        "torchdiffeq's rk4 is the 3/8 rule.",
        [
            ("ode", subject, reference, batch)
            for variant, method in ODE.items()
            for batch in FULL.ode_batches
            for subject, reference in ((theirs(method), None), (variant, theirs(method)))
        ],
        {"NFE": _number("nfe", "d"), **MEDIAN, **IMAGES, **RATIO},
    ),
    Table(
        "Compile time",
        "First call of the compiled model in a new process, without caches, once the toolchain has started; the ratio "
        "is speed, above 1 sooner than the reference.",
        [
            ("compile", COMPILE_REFERENCE, None, FULL.compile_batch),
            *(("compile", subject, COMPILE_REFERENCE, FULL.compile_batch) for subject in COMPILE),
            ("compile", TOOLCHAIN, None, None),
        ],
        {"backend": Column(lambda row: row["backend"]), **MEDIAN, **RATIO},
    ),
    Table(
        "Peak memory",
        "What one call adds to the memory of the built model, gradients and AdamW's moments included; above a ratio of "
        "1 it is less than the reference adds.",
        [
            ("memory", f"{name} {task}", None if name == TIMM_VIT else f"{TIMM_VIT} {task}", FULL.train_batch)
            for task in MEMORY_TASKS
            for name in (TIMM_VIT, "bvit")
        ],
        {**MEDIAN, **RATIO},
    ),
    Table(
        "Peak memory of stage-wise supervision",
        "What one backward pass of K stages of twelve steps adds to the memory of the built model. The stages are "
        "taken one at a time (`losses.backward_stages`); in the last line all are kept for one backward pass from the "
        "averaged loss. Below a ratio of 1 it is more than the reference adds.",
        [
            ("stages", subject, None if i == 0 else stage_subjects(FULL)[0], FULL.stage_batch)
            for i, subject in enumerate(stage_subjects(FULL))
        ],
        {**MEDIAN, **RATIO},
    ),
)


def accuracy_tables(measured: Iterable[Row]) -> list[Table]:
    """The tables of accuracy: a line for each function of the package and for all else that has rows; [] without any.

    Args:
        measured: Rows of one device.
    """
    lines = _accuracy_lines(row for row in measured if row["benchmark"] == accuracy.BENCHMARK)
    if not lines:
        return []
    same = "".join(f" {row.id} is the same function as {row.same_as}." for row in weights.checkpoints() if row.same_as)
    where = f"CIFAR-100's test images; ±: standard error.{same}"
    return [
        Table(
            "Accuracy",
            f"After the trained number of steps (horizon), on {where}",
            [(*line, line[-1]) for line in lines],
            ACCURACY,
            keys=rows.STEPS,
            shown=("subject", "precision", "horizon"),
        ),
        Table(
            "Horizon sweep",
            f"Top-1 accuracy in per cent after other numbers of steps with the same weights, on {where} The trained "
            "number, where it is one of these, is in bold.",
            lines,
            SWEEP,
            keys=rows.STEPS,
            shown=("subject", "precision", "trained_horizon"),
        ),
    ]


def _accuracy_lines(measured: Iterable[Row]) -> list[Cell]:
    """All but the horizon of the cells: every function in the order of the manifest, then the rest."""
    found: list[Cell] = [tuple(row[key] for key in rows.STEPS[:-1]) for row in measured]
    lines: list[Cell] = []
    for checkpoint in accuracy.default_checkpoints():
        untouched: Cell = (accuracy.BENCHMARK, checkpoint.id, "fp32", int(checkpoint.metrics["horizon"]))
        lines += [cell for cell in found if cell[1] == checkpoint.id] or [untouched]
    return list(dict.fromkeys([*lines, *found]))


def cross_tables(measured: Iterable[Row]) -> list[Table]:
    """The table of cross-evaluation: a line for each solver under each checkpoint that has rows; [] without any.

    Args:
        measured: Rows of one device.
    """
    found = [tuple(row[key] for key in cross.KEYS[:4]) for row in measured if row["benchmark"] == cross.BENCHMARK]
    if not found:
        return []
    return [
        Table(
            "Cross-evaluation",
            "Top-1 accuracy in per cent under other solvers and step sizes than those of the training, with the same "
            "weights, integrated along R(z) = F(z) - z over the trained time, on so many (count) of "
            "CIFAR-100's test images; ±: standard error. In parentheses the accuracy lost against the checkpoint as "
            "trained, with the standard error of the difference paired by image. Half the step size takes twice the "
            "evaluations (NFE). The setting of the training, where it is one of these, is in bold; plain is Euler with "
            "step size 1.",
            [(*line, False, solver) for line in dict.fromkeys(found) for solver in cross.SOLVERS],
            CROSS,
            keys=cross.KEYS,
            shown=("subject", "trained_solver", "count", "solver"),
        )
    ]


def fields_tables(measured: Iterable[Row]) -> list[Table]:
    """The table of the control of the field: a line for each variant and field at each budget; [] without rows.

    Args:
        measured: Rows of one device.
    """
    budgets = dict.fromkeys(row["pflop"] for row in measured if row["benchmark"] == fields.BENCHMARK)
    if not budgets:
        return []
    return [
        Table(
            "Control of the field",
            "Top-1 accuracy in per cent of variants trained alike along F(z) - z (state_subtracted) and along F(z) "
            f"(black_box), each run with a budget in PFLOP, after the trained number of steps on {fields.HELD_OUT:,} "
            "training images that were held out; ±: standard error. The mean is over the seeds that were run, the "
            "difference, in points, over those that both fields have, with its extremes.",
            [(fields.BENCHMARK, pflop, name, field) for pflop in budgets for name in fields.NAMES for field in FIELDS],
            CONTROL,
            keys=fields.KEYS,
            shown=("pflop", "subject", "field"),
        )
    ]


def engine_tables(measured: Iterable[Row]) -> list[Table]:
    """The tables of the engines: speed, and accuracy, a line for each engine that has rows; [] without any.

    Args:
        measured: Rows of one device.
    """
    found = [row for row in measured if row["benchmark"] in ENGINES]
    lines = dict.fromkeys((row["benchmark"], row["subject"]) for row in found)
    speed, quantised, answers = ([line for line in lines if line[0] == benchmark] for benchmark in ENGINES)
    every = [
        Table(
            "Engines",
            "Images per second on test images of CIFAR-100, by batch size; in parentheses the speed relative to the "
            "eager recurrent model in the same rounds, and the fraction of the machine's rate of fp32 matrix products "
            "that the arithmetic of all steps would be. timm_vit has twelve blocks of its own, of the same widths.",
            speed,
            {f"batch {batch}": Column(_engine, at=(batch,)) for batch in FULL.batches},
            keys=("benchmark", "subject", "batch"),
            shown=("subject",),
        ),
        Table(
            "Engines: int8",
            "Both in ONNX Runtime, of the same rounds; the ratio is speed, above 1 faster than the reference.",
            [(*line, batch) for batch in FULL.batches for line in quantised],
            {**MEDIAN, **IMAGES, **RATIO},
            keys=("benchmark", "subject", "batch"),
            shown=("subject", "batch"),
        ),
        Table(
            "Engines: accuracy",
            "On CIFAR-100's test images, of the engines that compute something else than eager; ±: standard error, of "
            "the accuracy lost that of the difference paired by image.",
            answers,
            {
                **LOST,
                "same answer": _number("agreement", ".1%"),
                "images": _number("count", ",d"),
                "threshold": _number("threshold", ".4g"),
                "chosen on": Column(lambda row: row.get("calibrated_on", "")),
            },
            keys=("benchmark", "subject"),
            shown=("subject",),
        ),
    ]
    return [table for table in every if table.cells]


def anytime_tables(measured: Iterable[Row]) -> list[Table]:
    """The tables of early exit: what each criterion saves and loses, and the time it takes; [] without rows.

    Args:
        measured: Rows of one device.
    """
    measured = list(measured)
    exits = [row for row in measured if row["benchmark"] == ANYTIME[0]]
    times = [row["subject"] for row in measured if row["benchmark"] == ANYTIME[1]]
    both = [
        Table(
            "Early exit",
            "On CIFAR-100's test images, with thresholds that were chosen on others (calibrated on) to lose at most "
            "max_lost of the accuracy after all steps there. saved: fraction of the evaluations that were not made. ±: "
            "standard error, of the accuracy lost that of the difference paired by image. all alike: accuracy if every "
            "image stopped after the same number of steps, at the same cost (interpolated).",
            list(dict.fromkeys(tuple(row[key] for key in ANYTIME_KEYS) for row in exits)),
            {
                "threshold": Column(_threshold),
                "mean NFE": _number("mean_NFE", ".2f"),
                "saved": _number("saved", ".1%"),
                **LOST,
                "all alike, top-1 %": Column(lambda row: f"{100 * row['uniform_top1']:.2f}"),
                "images": _number("count", ",d"),
                "calibrated on": Column(lambda row: str(row["calibrated_on"])),
            },
            keys=ANYTIME_KEYS,
            shown=("subject", "criterion", "max_lost"),
        ),
        Table(
            "Early exit: time",
            "Of a batch of test images, the mean over several; the ratio is speed, above 1 faster than the reference.",
            [(ANYTIME[1], subject) for subject in dict.fromkeys(times)],
            {"saved": _number("saved", ".1%"), **MEDIAN, **RATIO},
            keys=("benchmark", "subject"),
            shown=("subject",),
        ),
    ]
    return [table for table in both if table.cells]


def tables(measured: Iterable[Row]) -> str:
    """All tables, each for every device that it has rows of (the CPU if there are none); other rows are passed over."""
    ours = {
        accuracy.BENCHMARK,
        cross.BENCHMARK,
        fields.BENCHMARK,
        *ENGINES,
        *ANYTIME,
        *(table.benchmark for table in TABLES),
    }
    measured = [row for row in measured if row.get("benchmark") in ours]
    measured = [*measured, *fields.summary(measured)]
    places = {(row["benchmark"], row["device"]) for row in measured}
    places |= {(benchmark, "cpu") for benchmark in ours - {benchmark for benchmark, _ in places}}
    texts = []
    for device in sorted({device for _, device in places}):
        on_device = [row for row in measured if row["device"] == device]
        made = (accuracy_tables, cross_tables, fields_tables, anytime_tables, engine_tables)
        all_tables = [*TABLES, *(table for make in made for table in make(on_device))]
        here = [table for table in all_tables if (table.benchmark, device) in places]
        texts += [render(table, latest(measured, device, table.keys), device) for table in here]
    return "\n".join(texts)


if __name__ == "__main__":
    files: list[str | Path] = [*sys.argv[1:]] or [*sorted(rows.RESULTS.glob("*.jsonl"))]
    print(tables(rows.read(*files)), end="")
