"""The folder of a training run: checkpoints that survive, a history, a result.

    runs/x/run.json                          what was asked for and, at the end, what came out
    runs/x/history.jsonl                     a line every few seconds: update, loss, learning rate, speed
    runs/x/checkpoint-00001200-1f2e3d4c.pt   update number and the head of the file's sha256; the last two are kept
    runs/x/model.safetensors                 the result
    runs/x/history.png                       the learning curve

Every file but the history is written beside its place, flushed to the disk, and renamed: a process that dies leaves the
old file or the new one, never half of it. Of the history it may cut the last line short, which is then passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import timm
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from .files import write_atomically
from .machine import place, versions
from .model import RecurrentVisionTransformer
from .plots import import_figure, save_figure
from .recipes import PFLOP, Leg
from .zoo import MODEL_ARGS, VARIANTS

__all__ = [
    "Reporter", "find_checkpoints", "is_folder", "load_checkpoint", "load_model", "load_result", "open_folder",
    "plot_history", "read_history", "save_checkpoint", "write_result",
]  # fmt: skip

KEPT = 2
LOG_SECONDS = 5.0
BAR_SECONDS = 60.0  # where the bar goes into a file, which keeps every state of it
HISTORY = "history.jsonl"
_NAME = re.compile(r"checkpoint-(\d{8})-([0-9a-f]{8})\.pt")


@contextlib.contextmanager
def open_folder(path: str | Path, resume: bool) -> Iterator[Path]:
    """Make the folder of a run, or find the one to resume, and keep other runs out of it while entered.

    Raises:
        FileExistsError: It holds a run, and `resume` is false; or another process is training in it.
        OSError: It cannot be made, or not written to.
    """
    folder, error = Path(path), None
    with contextlib.ExitStack() as stack:
        if place()[0] == 0:
            try:
                stack.enter_context(_owned(folder, resume))
            except OSError as caught:
                error = caught
        if dist.is_initialized():  # the other processes wait for the first, and share its error
            shared = [error]
            dist.broadcast_object_list(shared)
            error = shared[0]
        if error is not None:
            raise error
        yield folder


@contextlib.contextmanager
def _owned(folder: Path, resume: bool) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        _lock(lock, folder)
        history = folder / HISTORY
        if not resume and (find_checkpoints(folder) or (history.exists() and history.stat().st_size)):
            raise FileExistsError(f"{folder} holds a run already; give --resume to go on with it, or another --out")
        for part in folder.glob(".*.part"):  # of a process that was killed while it wrote
            part.unlink()
        try:
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)


def _lock(file: IO[str], folder: Path) -> None:
    """Own the file until it is closed or the process dies (where the system has such locks: not on Windows)."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            return
    except (BlockingIOError, FileNotFoundError) as error:
        raise FileExistsError(f"another process is training in {folder}; give another --out") from error
    raise FileExistsError(f"another process has just begun to train in {folder}; give another --out")


def save_checkpoint(folder: Path, update: int, state: dict[str, Any]) -> None:
    """Write the state after `update` updates, then remove all but the last two checkpoints (first process only)."""
    if place()[0] != 0:
        return
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    path = folder / f"checkpoint-{update:08d}-{hashlib.sha256(content).hexdigest()[:8]}.pt"
    write_atomically(path, lambda file: file.write(content))
    for old in find_checkpoints(folder)[:-KEPT]:
        old.unlink()


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint and check it against the sum in its name. Tensors and plain containers only: no code is run.

    Raises:
        ValueError: The content is not what was written; says which file, both sums, and what to do.
    """
    match = _NAME.fullmatch(path.name)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()[:8]
    if match is None or match[2] != found:
        raise ValueError(
            f"{path} is damaged or not a checkpoint of ours: its sha256 begins with {found}, its name says "
            f"{match[2] if match else 'nothing'}; remove it to resume from the checkpoint before it"
        )
    # a file of this machine's own, never a download; weights_only leaves no way to run code
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def write_result(folder: Path, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write model.safetensors, then run.json, which so never tells of updates that the weights don't have."""
    content = safetensors.torch.save(weights, metadata={"format": "pt"})
    write_atomically(folder / "model.safetensors", lambda file: file.write(content))
    date = datetime.now(timezone.utc).date().isoformat()
    text = json.dumps({**facts, "date": date, "versions": versions()}, indent=2) + "\n"
    write_atomically(folder / "run.json", lambda file: file.write(text.encode()))


def is_folder(text: str) -> bool:
    """Whether the folder of a run is meant: there is one, and its name is not that of a model; `./bvit` is not."""
    return bool(text) and Path(text).expanduser().is_dir() and text.partition(".")[0] not in VARIANTS


def load_model(source: str) -> RecurrentVisionTransformer:
    """The model that is meant by a name with weights, the folder of a run, "local-dir:PATH" or "hf-hub:ORG/NAME".

    Raises:
        ValueError: It is none of them, or no model of the zoo with its weights.
        OSError: A file is missing, or cannot be downloaded.
    """
    if is_folder(source):
        return load_result(Path(source))
    if not source.startswith(("local-dir:", "hf-hub:")):
        if source.partition(".")[0] not in VARIANTS:
            raise ValueError(f"{source!r} is neither a folder nor a name of the zoo ({', '.join(VARIANTS)})")
        if not timm.is_model_pretrained(source):
            raise ValueError(f"{source!r} has no published weights; give the folder of a run, or local-dir:PATH")
    model = timm.create_model(source, pretrained=True)
    if not isinstance(model, RecurrentVisionTransformer):
        raise ValueError(f"{source!r} is a {type(model).__name__}; give a model of the zoo")
    return model


def load_result(folder: Path) -> RecurrentVisionTransformer:
    """The model that a run made, in evaluation mode; a leading ~ is the home directory.

    Raises:
        FileNotFoundError: The run is not finished, or the folder is not one.
        ValueError: What is in the files is not a model of the zoo with its weights.
    """
    folder = folder.expanduser()
    for name in ("run.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: it is not the folder of a finished run")
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        name, kwargs = facts["name"], facts["model_kwargs"]
        if name not in VARIANTS or set(kwargs) - MODEL_ARGS:
            raise ValueError(f"{name!r} with {kwargs} is not a model of the zoo")
        model: Any = timm.create_model(name, **kwargs)
        model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder}: run.json and model.safetensors are not those of a run: {error}") from error
    return model.eval()


# ---- history ---------------------------------------------------------------------------------------------------------


class Reporter:
    """Shows the progress of a run and writes its history, a line every few seconds.

    Use as a context manager; call it after every update. The loss is looked at (on a GPU: waited for) only when a line
    is due.
    """

    def __init__(self, folder: Path, plan: list[Leg], leg: int, update: int, seconds: float) -> None:
        self.folder, self.plan, self.main = folder, plan, place()[0] == 0
        self.total = sum(leg.updates for leg in plan)
        self.losses: list[Tensor] = []
        self.last = self.now = self._at(leg, update, seconds)
        self.bar = tqdm(
            total=round(sum(leg.flop for leg in plan) / 1e9),
            initial=round(self.last.flop / 1e9),
            unit="GFLOP", unit_scale=True, dynamic_ncols=True, disable=not self.main,
            mininterval=0.1 if sys.stderr.isatty() else BAR_SECONDS, miniters=1,
        )  # fmt: skip
        if self.main:
            cut_history(folder, self.done)

    @property
    def done(self) -> int:
        """Updates since the beginning of the run."""
        return self.now.update

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def __call__(self, leg: int, update: int, loss: Tensor, seconds: float, lr_factor: float) -> None:
        self.now, self.lr_factor = self._at(leg, update, seconds), lr_factor
        self.losses.append(loss)
        if seconds - self.last.seconds >= LOG_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the line that is due.

        Raises:
            FloatingPointError: A loss since the last line is not finite.
        """
        if not self.losses:
            return
        loss = torch.stack(self.losses).mean().item()
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} between update {self.last.update + 1} and {self.done}; the last checkpoint in "
                f"{self.folder} is from before: a smaller learning rate, or fp32 precision, may help"
            )
        flop, seconds = self.now.flop - self.last.flop, max(self.now.seconds - self.last.seconds, 1e-9)
        row = {
            "update": self.done,
            "leg": self.now.leg,
            "size": self.plan[self.now.leg].phase.size,
            "epoch": round(self.now.epoch, 3),
            "pflop": round(self.now.flop / PFLOP, 6),
            "seconds": round(self.now.seconds, 2),
            "loss": round(loss, 5),
            "lr_factor": round(self.lr_factor, 5),
            "images_per_second": round(flop / self.plan[self.now.leg].flop_per_image / seconds, 1),
            "gflop_per_second": round(flop / seconds / 1e9, 1),
        }
        if self.main:
            append_history(self.folder, row)
        shown = {"px": row["size"], "loss": row["loss"], "lr": row["lr_factor"], "img/s": row["images_per_second"]}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(round(self.now.flop / 1e9) - self.bar.n)
        self.last, self.losses = self.now, []

    def _at(self, leg: int, update: int, seconds: float) -> _Position:
        row = self.plan[leg]
        done = sum(leg.updates for leg in self.plan[:leg]) + update
        return _Position(
            leg, done, row.spent + update * row.flop_per_update, row.first_epoch + update / row.per_epoch, seconds
        )


@dataclass(frozen=True)
class _Position:
    leg: int
    update: int
    flop: int
    epoch: float
    seconds: float


def append_history(folder: Path, row: dict[str, Any]) -> None:
    """Add a line to the history."""
    with (folder / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_history(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of the history, up to one that a killed process left incomplete."""
    path = folder / HISTORY
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def cut_history(folder: Path, update: int) -> None:
    """Forget the lines after `update`: a resumed run writes them again."""
    rows = [row for row in read_history(folder) if row["update"] <= update]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write_atomically(folder / HISTORY, lambda file: file.write(text))


def plot_history(folder: Path) -> None:
    """Draw the learning curve of a run into history.png: loss against compute, the legs apart.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    rows = list(read_history(folder))
    figure = import_figure()(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for leg in sorted({row["leg"] for row in rows}):
        part = [row for row in rows if row["leg"] == leg]
        axes.plot(
            [row["pflop"] for row in part],
            [row["loss"] for row in part],
            marker=".",
            markersize=2,
            label=f"{part[0]['size']} px",
        )
    axes.set(xlabel="compute, PFLOP", ylabel="training loss, nats")
    axes.grid(alpha=0.3)
    axes.legend(title="pictures")
    save_figure(figure, folder / "history.png", dpi=150)
