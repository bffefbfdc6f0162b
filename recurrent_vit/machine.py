"""What a process is part of and runs on: its place among others, signals, packages, hardware."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import __version__

__all__ = ["check_device", "hardware", "place", "stop_signals", "versions"]


def place() -> tuple[int, int]:
    """(rank, world size) of this process: (0, 1) unless torch.distributed is initialised."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], str]]:
    """While entered, SIGTERM and SIGINT are noted instead of ending the process; yields what tells of one.

    The function it yields gives the name of the signal that came, to any of the processes, or "".
    """
    came: list[int] = []

    def stopped() -> str:
        number = torch.tensor(came[-1] if came else 0)
        if dist.is_initialized():
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return signal.Signals(int(number)).name if number else ""

    def note(number: int, frame: object) -> None:
        if came:  # a second one does not wait
            signal.default_int_handler(number, None)
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_device(text: str) -> torch.device:
    """The device of that name, if there is one.

    Raises:
        ValueError: torch knows none of that name, or finds none here.
    """
    if text.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {text}: torch finds no CUDA device")
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # the latter from a build of torch without that kind
        raise ValueError(f"--device {text}: {str(error).splitlines()[0]}") from error


def versions() -> dict[str, str]:
    """Of Python and of the packages that a result depends on."""
    packages = {name: metadata.version(name) for name in ("torch", "timm")}
    return {"python": platform.python_version(), "recurrent-vit": __version__, **packages}


def hardware(device: str | torch.device) -> dict[str, Any]:
    """What computes: the processor's name, its cores, torch's threads, and the GPU if the device is one."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
    }


def _cpu_name() -> str:
    """The processor's model name, as precisely as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
