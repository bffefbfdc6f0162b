"""A table in Markdown: the latest row of each of its cells, and below it where the rows come from.

A cell without a row says "not run". Which tables there are is in `tables`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import rows
from .rows import Row

__all__ = ["NOT_RUN", "Cell", "Column", "Columns", "Table", "latest", "markdown_line", "render", "source"]

NOT_RUN = "not run"

Cell = tuple[str | float | None, ...]  # what identifies a row: the values of a table's keys


class Column(NamedTuple):
    """What a column says of a row.

    Args:
        show: The row as text.
        at: What the column adds to the cell that its line names.
    """

    show: Callable[[Row], str]
    at: Cell = ()


Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Table:
    """One table: which cells it shows, in order, and what it says about each.

    Args:
        title: Its heading.
        caption: What a reader must know of all of it.
        cells: A line each, by the values of `keys`; the last of them may be left to the columns (`Column.at`).
        columns: What a line says.
        keys: The columns of a row that identify it; the benchmark comes first.
        shown: Those of them that a line begins with.
    """

    title: str
    caption: str
    cells: Sequence[Cell]
    columns: Columns
    keys: Sequence[str] = rows.ROUNDS
    shown: Sequence[str] = ("batch", "subject")

    @property
    def benchmark(self) -> str:
        """Where its rows come from."""
        return str(self.cells[0][0])


def latest(measured: Iterable[Row], device: str, keys: Sequence[str] = rows.ROUNDS) -> dict[Cell, Row]:
    """The last row of each cell on that device."""
    return {tuple(row.get(key) for key in keys): row for row in measured if row["device"] == device}


def render(table: Table, found: Mapping[Cell, Row], device: str) -> str:
    """The table in Markdown, with a line for each run that it draws on; `found` is by the table's keys."""
    head = [*(key.replace("_", " ") for key in table.shown), *table.columns]
    rule = ["---"] * len(head)
    lines = [f"### {table.title}, {device}", "", table.caption, "", markdown_line(head), markdown_line(rule)]
    sources: dict[str, None] = {}
    for cell in table.cells:
        named = dict(zip(table.keys, cell))
        here = [(column, found.get((*cell, *column.at))) for column in table.columns.values()]
        begin = ["" if named[key] is None else str(named[key]) for key in table.shown]
        lines.append(markdown_line([*begin, *(NOT_RUN if row is None else column.show(row) for column, row in here)]))
        sources |= {source(row): None for _, row in here if row is not None}
    return "\n".join([*lines, "", *(f"- {line}" for line in sources)]).rstrip() + "\n"


def markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def source(row: Row) -> str:
    """Where a row comes from, in one line."""
    hardware = row["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    gpu = f", {hardware['gpu']}" if hardware["gpu"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    commit = f"commit {row['commit'][:12]}{' with changes' if row['dirty'] else ''}" if row["commit"] else "no commit"
    return f"{row['date'][:10]}; {machine}{gpu}; {versions}; {commit}; `{row['command']}`"
