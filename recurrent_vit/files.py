"""Writing a file so that it appears whole or not at all."""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["check_target", "write_atomically"]


def check_target(path: str | os.PathLike, what: str) -> None:
    """Whether there can be a file of that name: to be asked before the minutes that its content takes.

    Args:
        path: The file.
        what: What to call it in an error: the argument or option that it comes from.

    Raises:
        FileNotFoundError: Its folder doesn't exist.
        IsADirectoryError: It is a folder.

    Example:
        >>> check_target("no/such/rows.jsonl", "--out")
        Traceback (most recent call last):
        ...
        FileNotFoundError: --out 'no/such/rows.jsonl': there is no folder 'no/such'
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{what} {str(path)!r}: there is no folder {str(folder)!r}")
    if Path(path).is_dir():
        raise IsADirectoryError(f"{what} {str(path)!r} is a folder; give a file")


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a file beside `path`, flush it to the disk, and rename it to `path`.

    A link keeps pointing to its file. Where `path` is a device or a pipe, or this process's standard output by a name
    like /dev/stdout, there is nothing to rename: it is written to.

    Raises:
        OSError: The disk is full or the folder cannot be written; `path` is then as it was, and nothing else is left.
    """
    if (stream := _standard_stream(path)) is not None:
        for printed in filter(None, (sys.stdout, sys.stderr)):
            printed.flush()
        with open(stream, "wb", closefd=False) as file:
            write(file)
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            write(file)
        return
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.stem[:30]}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _standard_stream(path: Path) -> int | None:
    """The descriptor of standard output or error, if that is the file; opening it by its name again would empty it."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(stream)):
                return stream
    return None
