"""Tables of the measured rows, in Markdown: the latest row of each cell, and below each table where the rows come from.

    python -m benchmarks.tables                  # all of benchmarks/results
    python -m benchmarks.tables FILE.jsonl ...   # these files

A cell without a row says "not run".
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import rows
from .rows import Row
from .speed import COMPILE, COMPILE_REFERENCE, GEMM, INFERENCE, MEMORY_TASKS, ODE, TIMM_VIT, TOOLCHAIN, Settings
from .speed import torchdiffeq_name as theirs

__all__ = ["TABLES", "Table", "latest", "render", "tables"]

NOT_RUN = "not run"
FULL = Settings()

Cell = tuple[str, str, str | None, int | None]  # benchmark, subject, reference, batch
Columns = Mapping[str, Callable[[Row], str]]


def _median(row: Row) -> str:
    median, least, most = (_short(row[name]) for name in ("median", "min", "max"))
    return f"{median} {row['unit']} ({least} to {most})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ratio(row: Row) -> str:
    if row["ratio"] is None:
        return ""
    return f"{row['ratio']:.3f} x {row['reference']} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"


def _number(name: str, form: str) -> Callable[[Row], str]:
    """A column of plain numbers; empty where the row has none."""
    return lambda row: "" if row.get(name) is None else format(row[name], form)


MEDIAN: Columns = {"median (min to max)": _median}
RATIO: Columns = {
    "ratio (min to max)": _ratio,
    "rounds x inner": lambda row: f"{row['rounds']} x {row['inner']}",
}
IMAGES: Columns = {"images/s": _number("images_per_s", ",.0f")}
GFLOPS: Columns = {"GFLOP/s": _number("gflops", ",.0f"), "of the matrix product": _number("gemm_fraction", ".1%")}


@dataclass(frozen=True)
class Table:
    """One table: which cells it shows, in order, and what it says about each."""

    title: str
    caption: str
    cells: Sequence[Cell]
    columns: Columns


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
        {"backend": lambda row: row["backend"], **MEDIAN, **RATIO},
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
)


def latest(measured: Iterable[Row], device: str) -> dict[Cell, Row]:
    """The last row of each cell on that device."""
    return {
        (row["benchmark"], row["subject"], row["reference"], row["batch"]): row
        for row in measured
        if row["device"] == device
    }


def render(table: Table, found: Mapping[Cell, Row], device: str) -> str:
    """The table in Markdown, with a line for each run that it draws on."""
    head = ("batch", "subject", *table.columns)
    lines = [f"### {table.title}, {device}", "", table.caption, "", _line(head), _line(["---"] * len(head))]
    lines += [_line(_cells(cell, found.get(cell), table.columns)) for cell in table.cells]
    sources = {source(found[cell]): None for cell in table.cells if cell in found}
    return "\n".join([*lines, "", *(f"- {line}" for line in sources)]).rstrip() + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(cell: Cell, row: Row | None, columns: Columns) -> list[str]:
    _, subject, _, batch = cell
    values = [NOT_RUN for _ in columns] if row is None else [show(row) for show in columns.values()]
    return ["" if batch is None else str(batch), subject, *values]


def source(row: Row) -> str:
    """Where a row comes from, in one line."""
    hardware = row["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    gpu = f", {hardware['gpu']}" if hardware["gpu"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    commit = f"commit {row['commit'][:12]}{' with changes' if row['dirty'] else ''}" if row["commit"] else "no commit"
    return f"{row['date'][:10]}; {machine}{gpu}; {versions}; {commit}; `{row['command']}`"


def tables(measured: Iterable[Row]) -> str:
    """All tables, for every device that was measured (the CPU if none was); other rows are passed over."""
    ours = {cell[0] for table in TABLES for cell in table.cells}
    measured = [row for row in measured if row.get("benchmark") in ours]
    devices = dict.fromkeys(row["device"] for row in measured) or ["cpu"]
    return "\n".join(render(table, latest(measured, device), device) for device in devices for table in TABLES)


if __name__ == "__main__":
    files: list[str | Path] = [*sys.argv[1:]] or [*sorted(rows.RESULTS.glob("*.jsonl"))]
    print(tables(rows.read(*files)), end="")
