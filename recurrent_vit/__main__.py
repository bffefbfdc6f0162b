"""The command line: `recurrent-vit COMMAND ...`, also `python -m recurrent_vit COMMAND ...`.

Results go to standard output, progress and warnings to standard error. Exit codes: 0 done, 1 failed with one line that
says why, 2 wrong usage. torch and timm are imported by the commands, not by the parser.
"""

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Run one command; `argv` defaults to the program's own arguments. Returns the exit code.

    Example:
        >>> main(["run", "no/such/script.py"])
        1
    """
    args = _parser().parse_args(argv)
    try:
        args.command(args)
        sys.stdout.flush()  # a closed pipe shows here, not at exit
    except BrokenPipeError:  # `recurrent-vit list | head -1` is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(f"recurrent-vit: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recurrent-vit", description="Recurrent Vision Transformers for timm.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add = commands.add_parser("list", help="the zoo: size and cost of every name", description="The zoo, a row a name.")
    style = add.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="as a Markdown table")
    style.add_argument("--json", action="store_true", help="as JSON lines")
    add.set_defaults(command=_list)

    add = commands.add_parser(
        "run",
        help="run a script, such as timm's validate.py, with our names registered",
        description="Run a Python script with the names of the zoo registered with timm, e.g. "
        "`recurrent-vit run validate.py --model bvit ...`.",
    )
    add.add_argument("script", metavar="SCRIPT", help="path of the script")
    add.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    add.set_defaults(command=_run)
    return parser


def _list(args: argparse.Namespace) -> None:
    from . import zoo

    rows = [zoo.describe(name) for name in zoo.VARIANTS]
    if args.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        print(_markdown_table(rows) if args.markdown else _table(rows))


def _markdown_table(rows: list[dict[str, Any]]) -> str:
    head, *lines = _table(rows, gap=" | ").splitlines()
    rule = " | ".join("---:" if isinstance(value, int) else "---" for value in rows[0].values())
    return "\n".join(f"| {line} |" for line in [head, rule, *lines])


def _table(rows: list[dict[str, Any]], gap: str = "  ") -> str:
    """Rows as aligned text under their keys: words to the left, numbers to the right."""
    lines = [list(rows[0])] + [
        [f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows
    ]
    sides = [">" if isinstance(value, int) else "<" for value in rows[0].values()]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(gap.join(f"{cell:{s}{w}}" for cell, s, w in zip(line, sides, widths)) for line in lines)


def _run(args: argparse.Namespace) -> None:
    script = Path(args.script)
    if not script.is_file():
        raise FileNotFoundError(f"SCRIPT {args.script!r} is not a file; give the path of a Python script")
    from . import zoo  # noqa: F401 (registers the names with timm)

    sys.argv = [str(script), *args.arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:  # the script's own: as Python would show it, not as a mistake in using us
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
