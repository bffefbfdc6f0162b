"""What the programs check of their arguments, and how they tell of a mistake: in one line, before the long work."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from recurrent_vit import weights

from . import rows
from .measure import report
from .rows import Row

__all__ = ["check_amounts", "check_device", "check_out", "record", "usage_errors"]


@contextmanager
def usage_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """While entered, what a user can mend (an argument, a file, a package) ends the program as wrong usage does.

    It is for the preparation alone: an error of the work itself wants its traceback.

    Example:
        >>> with usage_errors(argparse.ArgumentParser(prog="python -m benchmarks.speed")):
        ...     check_device("gpu")
        Traceback (most recent call last):
        ...
        SystemExit: 2
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def check_amounts(arguments: argparse.Namespace) -> None:
    """Whether --rounds and --limit make sense, the latter together with --out.

    Raises:
        ValueError: One is below 1, or the rows of a smoke run are to be recorded.
    """
    for option in ("rounds", "limit"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option} {value}: give at least 1")
    if arguments.limit and arguments.out:
        raise ValueError(f"--limit {arguments.limit}: such rows are not recorded; leave --out away")


def check_device(text: str) -> None:
    """Whether there is such a device.

    Raises:
        ValueError: torch knows none of that name, or finds none here.
    """
    if text.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {text}: torch finds no CUDA device")
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # the latter from a build of torch without that kind
        raise ValueError(f"--device {text}: {weights.first_line(error)}") from error


def check_out(path: Path) -> None:
    """Whether rows could be appended to that file.

    Raises:
        FileNotFoundError: Its folder doesn't exist.
        OSError: It is a folder, or may not be written.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"--out {str(path)!r} is a folder; give a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"--out {str(path)!r} may not be written")


def record(measured: Sequence[Row], out: Path | None) -> None:
    """Append the rows to a file, or print them as JSON lines where there is none."""
    if out is None:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in measured)
        return
    rows.append(out, measured)
    report(f"{len(measured)} rows appended to {out}")
