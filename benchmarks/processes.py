"""Measurements in a process for each number: compile time and peak memory depend on what a process did before.

Peak memory is what torch.cuda.max_memory_allocated says on a GPU, elsewhere the peak resident memory of the process.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recurrent_vit.losses import backward_stages, stage_loss

from . import rows
from .measure import (
    TIMM_VIT,
    Settings,
    alternate,
    build,
    infer,
    milliseconds,
    random_images,
    report,
    training_update,
)
from .rows import Row

COMPILE_REFERENCE = "timm_vit whole"
COMPILE = ("timm_vit by block", "bvit whole", "bvit by block")  # each against COMPILE_REFERENCE
TOOLCHAIN = "toolchain"
MEMORY_TASKS = ("inference", "training")
STAGE_STEPS = 12  # of each stage
AT_ONCE = "one backward"
# glibc lets the size grow from which it gives freed memory back at once; held at this one, the peak is the tensors' own
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}


# ---- the parts: generators of rows -----------------------------------------------------------------------------------


def compilation(settings: Settings) -> Iterator[Row]:
    """Seconds of the first call of a compiled model in inference, in a new process without any compiler cache.

    Compiled whole (fullgraph), or block by block in place (`block.compile()`). Before it the process compiles a trivial
    module, so that the start of the toolchain is not counted as the model's; it is a row of its own.
    """
    toolchain: list[float] = []

    def first_call(subject: str) -> float:
        with tempfile.TemporaryDirectory() as cache:
            cold = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            start_up, seconds = in_new_process(first_compiled_calls, subject, settings, cold)
        toolchain.append(start_up)
        return seconds

    subjects = (COMPILE_REFERENCE, *COMPILE)
    seconds = alternate({subject: partial(first_call, subject) for subject in subjects}, settings.process_rounds)
    more: dict[str, Any] = {"unit": "s", "backend": settings.backend}
    yield rows.cell("compile", TOOLCHAIN, toolchain, note="a round is one process", **more)
    yield from rows.compared_cells("compile", seconds, batch=settings.compile_batch, **more)


def memory(settings: Settings) -> Iterator[Row]:
    """How far one call raises the peak of memory above what the process holds with the model built (MiB)."""
    note = _peak_note("one image's inference", settings)
    for task in MEMORY_TASKS:
        subjects = [f"{name} {task}" for name in (TIMM_VIT, "bvit")]
        measures = {subject: partial(in_new_process, peak_memory, subject, settings) for subject in subjects}
        peaks = alternate(measures, settings.process_rounds)
        yield from rows.compared_cells("memory", peaks, batch=settings.train_batch, unit="MiB", note=note)


def stages(settings: Settings) -> Iterator[Row]:
    """How far one backward pass of K stages of twelve steps raises the peak of memory (MiB), by K.

    The stages are taken one at a time, by `losses.backward_stages`. The last row is for contrast: all graphs are kept,
    for one backward pass from the averaged loss.
    """
    note = _peak_note("one image's backward pass", settings)
    measures = {
        subject: partial(in_new_process, backward_peak, subject, settings, FREED_AT_ONCE)
        for subject in stage_subjects(settings)
    }
    peaks = alternate(measures, settings.process_rounds)
    yield from rows.compared_cells("stages", peaks, batch=settings.stage_batch, unit="MiB", note=note)


def _peak_note(warm_up: str, settings: Settings) -> str:
    what = "torch.cuda.max_memory_allocated" if settings.on_gpu else "peak resident memory of a new process"
    return f"{what}, above that after building the model and {warm_up}"


def stage_subjects(settings: Settings) -> list[str]:
    """What the rows of `stages` are about, the reference first."""
    by_stage = [f"bvit_ds K={count}" for count in settings.stages]
    return [*by_stage, f"{by_stage[-1]}, {AT_ONCE}"]


# ---- what is measured ------------------------------------------------------------------------------------------------


def first_compiled_calls(subject: str, settings: Settings) -> tuple[float, float]:
    """Seconds of the first call of a compiled trivial module, then of the subject, "NAME whole" or "NAME by block"."""
    options: dict[str, Any] = {"fullgraph": True, "backend": settings.backend}
    trivial: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(settings.device), **options)
    start_up = milliseconds(partial(infer, trivial, torch.ones(8, 8, device=settings.device)), settings)

    name, _, how = subject.partition(" ")
    model: Any = build(name, settings).eval()
    if how == "whole":
        model = torch.compile(model, **options)
    else:
        for block in model.blocks:
            block.compile(**options)
    images = random_images(settings.compile_batch, settings)
    return start_up / 1000, milliseconds(partial(infer, model, images), settings) / 1000


def peak_memory(subject: str, settings: Settings) -> float:
    """MiB by which one call raises the peak; the subject is "NAME inference" or "NAME training", on train_batch images.

    Training includes the gradients and AdamW's moments.
    """
    name, _, task = subject.partition(" ")
    model = build(name, settings)
    images = random_images(settings.train_batch, settings)
    call = training_update(model, settings) if task == "training" else partial(infer, model.eval(), images)
    infer(model, images[:1])  # what the libraries allocate at their first use is not the model's
    _reset_peak(settings)
    before = _peak(settings)
    call()
    return (_peak(settings) - before) / 2**20


def backward_peak(subject: str, settings: Settings) -> float:
    """MiB by which one backward pass raises the peak; the subject is "NAME K=n" or "NAME K=n, one backward"."""
    name, _, rest = subject.partition(" K=")
    count, _, how = rest.partition(", ")
    model: Any = build(name, settings, steps=STAGE_STEPS, stages=int(count)).train()
    images = random_images(settings.stage_batch, settings)
    labels = torch.randint(model.num_classes, (settings.stage_batch,), device=settings.device)

    def backward(images: Tensor, labels: Tensor) -> None:
        if how == AT_ONCE:
            stage_loss(model.forward_stages(images), labels).backward()
        else:
            backward_stages(model, images, labels)

    backward(images[:1], labels[:1])  # what the libraries allocate at their first use is not the model's
    model.zero_grad()
    _reset_peak(settings)
    before = _peak(settings)
    backward(images, labels)
    return (_peak(settings) - before) / 2**20


def _reset_peak(settings: Settings) -> None:
    if settings.on_gpu:
        torch.cuda.reset_peak_memory_stats(settings.device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # not permitted everywhere; the peak so far is then that of the start-up
            Path("/proc/self/clear_refs").write_text("5")


def _peak(settings: Settings) -> int:
    """Bytes. Not ru_maxrss on Linux: a new process inherits that from its parent, however large the parent is."""
    if settings.on_gpu:
        return torch.cuda.max_memory_allocated(settings.device)
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(status["VmHWM"].split()[0])
    import resource  # here, since Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


# ---- a process of its own --------------------------------------------------------------------------------------------


def in_new_process(
    function: Callable[[str, Settings], Any],
    subject: str,
    settings: Settings,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """function(subject, settings), a function of this file, in a Python of its own."""
    report(f"  {function.__name__}: {subject}")
    request = json.dumps([function.__name__, subject, asdict(settings)])
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks import processes; processes.answer()", request],
        cwd=rows.ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def answer() -> None:
    """What the new process does: the request is its argument, the answer the last line of its output."""
    function, subject, settings = json.loads(sys.argv[1])
    settings = Settings(**settings)
    torch.set_num_threads(settings.threads)
    print(json.dumps(globals()[function](subject, settings)))
