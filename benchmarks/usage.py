"""What programs share: checks of arguments, mistakes told before the long work, and where rows go and come from."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from recurrent_vit.files import check_target

from . import rows
from .measure import report
from .rows import Row

__all__ = ["check_amounts", "check_out", "check_smoke", "command", "record", "usage_errors"]

# arguments that a command repeats by other means, or that change no number
NOT_REPEATED = {"name", "names", "data", "out", "plot", "runs", "seconds", "seed"}


@contextmanager
def usage_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """While entered, what a user can mend (an argument, a file, a package) ends the program as wrong usage does.

    It is for the preparation alone: an error of the work itself wants its traceback.

    Example:
        >>> with usage_errors(argparse.ArgumentParser(prog="python -m benchmarks.speed")):
        ...     raise ValueError("--device gpu: there is none")
        Traceback (most recent call last):
        ...
        SystemExit: 2
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def check_amounts(arguments: argparse.Namespace) -> None:
    """Whether --rounds, --limit and --batch-size make sense, where a program has them.

    Raises:
        ValueError: One is below 1.
    """
    for option in ("rounds", "limit", "batch_size"):
        value = getattr(arguments, option, None)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} {value}: give at least 1")


def check_smoke(arguments: argparse.Namespace) -> None:
    """As `check_amounts`, for a program whose --limit makes a smoke run.

    Raises:
        ValueError: One is below 1, or the rows of a smoke run are to be recorded.
    """
    check_amounts(arguments)
    if arguments.limit and arguments.out:
        raise ValueError(f"--limit {arguments.limit}: such rows are not recorded; leave --out away")


def check_out(path: Path) -> None:
    """Whether rows could be appended to that file.

    Raises:
        FileNotFoundError: Its folder doesn't exist.
        OSError: It is a folder, or may not be written.
    """
    check_target(path, "--out")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"--out {str(path)!r} may not be written")


def command(program: str, words: Sequence[str], arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command that makes it again, without the paths of one machine: the folder of the data is called DIR.

    Args:
        program: Name of the module.
        words: What follows it: positional arguments, and options that are always given.
        arguments: What was given. Those that aren't at their default are repeated, but `NOT_REPEATED`;
            none of them may be a path or a flag.
        parser: What knows the defaults.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> for option in ("--data", "--limit", "--rounds", "--out"):
        ...     action = parser.add_argument(option, default=6)
        >>> command("cross", ["bvit"], parser.parse_args(["--data=/data", "--limit=100", "--out=rows.jsonl"]), parser)
        'python -m benchmarks.cross bvit --data DIR --limit 100'
    """
    options = []
    for name, value in vars(arguments).items():
        if name not in NOT_REPEATED and value != parser.get_default(name):
            options += [
                f"--{name.replace('_', '-')}",
                ",".join(map(str, value)) if isinstance(value, tuple) else str(value),
            ]
    return shlex.join(["python", "-m", f"benchmarks.{program}", *words, "--data", "DIR", *options])


def record(measured: Sequence[Row], out: Path | None) -> None:
    """Append the rows to a file, or print them as JSON lines where there is none."""
    if out is None:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in measured)
        return
    rows.append(out, measured)
    report(f"{len(measured)} rows appended to {out}")
