"""Speed and memory of the zoo, measured side by side with timm's ViT and with torchdiffeq.

    python -m benchmarks.speed           # everything, about 20 minutes on 2 cores; appended to results/speed.jsonl
    python -m benchmarks.speed --quick   # a smoke run of a minute, on small batches; kept only where --out says
    python -m benchmarks.tables          # the rows as tables

How it is measured:

- What is compared runs in turn, A B A B ..., and every second round begins at the other end, B A B A ..., so that a
  machine that slows down does so for all alike. A round gives each subject one number, the median of its `inner`
  repetitions; a row has the median, the least and the largest over the rounds.
- A ratio is reference / subject within one round, and the row has its median, least and largest over the rounds. Above
  1 the subject is the faster (or the smaller).
- All is fp32 and eager (compilation apart), on random images and untrained weights. The reference `timm_vit` is timm's
  own VisionTransformer of the same widths: twelve independent blocks, the arithmetic of twelve evaluations of one
  block, and none of our code.
- Compile time and peak memory depend on what the process did before, so each number comes from a process of its own.

It wants an otherwise idle machine.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import recurrent_vit  # noqa: F401 (registers the names with timm)
from recurrent_vit.zoo import CIFAR

from . import rows
from .rows import Row

TIMM_VIT = "timm_vit"
INFERENCE = ("vit_cifar", "bvit")  # each against TIMM_VIT
ODE = {"bvit_ode_euler": "euler", "bvit_ode_heun": "heun2", "bvit_ode_rk4": "rk4"}  # variant: torchdiffeq's method
TORCHDIFFEQ_TABLEAUS = {"euler": "euler", "heun2": "heun2", "rk4": "rk4_38"}  # its method: our solver
ODE_NOTES = {"rk4": "torchdiffeq's rk4 is the 3/8 rule: as many evaluations as the classical method, other weights"}
COMPILE_REFERENCE = "timm_vit whole"
COMPILE = ("timm_vit by block", "bvit whole", "bvit by block")  # each against COMPILE_REFERENCE
TOOLCHAIN = "toolchain"
GEMM, GEMM_SIZE = "gemm_2048", 2048
MEMORY_TASKS = ("inference", "training")

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Settings:
    """How much is measured, and on what.

    Args:
        rounds: Rounds of what is timed in this process; even, so that each subject leads in half of them.
        seconds: About how long a round takes, all subjects together; it sets the inner repetitions.
        process_rounds: Rounds of compilation and memory, where each number takes a process of its own.
        batches: Batch sizes of inference.
        ode_batches: Batch sizes of the ODE variants.
        train_batch: Batch size of a training step, and of the memory measurements.
        compile_batch: Batch size of the first compiled call: small, to compile much and compute little, but not 1,
            which torch.compile treats as a case of its own.
        backend: The backend of torch.compile.
        device: A torch device, "cpu" or "cuda".
        threads: Threads of torch on the CPU.
        model: Arguments that replace the zoo's, for all models alike.
    """

    rounds: int = 10
    seconds: float = 4.0
    process_rounds: int = 3
    batches: Sequence[int] = (1, 16, 128)
    ode_batches: Sequence[int] = (16, 128)
    train_batch: int = 128
    compile_batch: int = 2
    backend: str = "inductor"
    device: str = "cpu"
    threads: int = field(default_factory=torch.get_num_threads)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the device runs beside Python and has memory of its own."""
        return self.device.startswith("cuda")


QUICK = Settings(
    rounds=2,
    seconds=0.1,
    process_rounds=1,
    batches=(1, 4),
    ode_batches=(4,),
    train_batch=4,
    backend="eager",
)


# ---- the parts: generators of rows -----------------------------------------------------------------------------------


def inference(settings: Settings) -> Iterator[Row]:
    """One forward pass in eval mode under torch.inference_mode, by batch size."""
    models = {name: build(name, settings).eval() for name in (TIMM_VIT, *INFERENCE)}
    for batch in settings.batches:
        images = random_images(batch, settings)
        calls = {name: partial(infer, model, images) for name, model in models.items()}
        yield from timed_cells("inference", calls, settings, batch=batch)


def training(settings: Settings) -> Iterator[Row]:
    """One update (forward, cross-entropy, backward, AdamW), and an fp32 matrix product of 2048^3 in the same turn.

    gflops counts 3 * 2 * MACs for each image; gemm_fraction is that over the matrix product's, within one round.
    """
    models: dict[str, Any] = {name: build(name, settings) for name in (TIMM_VIT, "bvit")}
    flop = dict.fromkeys(models, 3 * 2 * models["bvit"].macs * settings.train_batch) | {GEMM: 2 * GEMM_SIZE**3}
    square = torch.randn(GEMM_SIZE, GEMM_SIZE, device=settings.device)
    updates = {name: training_update(model, settings) for name, model in models.items()}
    gemm = partial(torch.mm, square, square, out=torch.empty_like(square))
    times, inner = time_in_turn({**updates, GEMM: gemm}, settings)
    gflops = {name: [flop[name] / (1e6 * value) for value in values] for name, values in times.items()}

    gemm_cell = rows.cell("training", GEMM, times.pop(GEMM), inner=inner)
    for row in (gemm_cell, *rows.compared_cells("training", times, batch=settings.train_batch, inner=inner)):
        speed = gflops[row["subject"]]
        fractions = [ours / most for ours, most in zip(speed, gflops[GEMM])]
        yield {**row, "gflops": round(median(speed), 1), "gemm_fraction": round(median(fractions), 4)}


def ode(settings: Settings) -> Iterator[Row]:
    """The forward pass of each ODE variant, against torchdiffeq taking the steps, at equal evaluations (nfe)."""
    for name, method in ODE.items():
        nfe = check_against_torchdiffeq(name, method, settings)
        model = build(name, settings).eval()
        for batch in settings.ode_batches:
            images = random_images(batch, settings)
            calls = {
                torchdiffeq_name(method): partial(torchdiffeq_infer, model, images, method),
                name: partial(infer, model, images),
            }
            yield from timed_cells("ode", calls, settings, batch=batch, nfe=nfe, note=ODE_NOTES.get(method))


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
    note = "torch.cuda.max_memory_allocated" if settings.on_gpu else "peak resident memory of a new process"
    note += ", above that after building the model and one image's inference"
    for task in MEMORY_TASKS:
        subjects = [f"{name} {task}" for name in (TIMM_VIT, "bvit")]
        measures = {subject: partial(in_new_process, peak_memory, subject, settings) for subject in subjects}
        peaks = alternate(measures, settings.process_rounds)
        yield from rows.compared_cells("memory", peaks, batch=settings.train_batch, unit="MiB", note=note)


PARTS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "inference": inference,
    "training": training,
    "ode": ode,
    "compile": compilation,
    "memory": memory,
}


# ---- what is measured ------------------------------------------------------------------------------------------------


def build(name: str, settings: Settings, **arguments: Any) -> nn.Module:
    """The model of that name, untrained, on the device."""
    arguments = {**settings.model, **arguments}
    if name == TIMM_VIT:
        model: nn.Module = VisionTransformer(**{**CIFAR, "depth": 12, "num_classes": 100, **arguments})
    else:
        model = timm.create_model(name, **arguments)
    return model.to(settings.device)


def random_images(batch: int, settings: Settings) -> Tensor:
    """(batch, 3, 32, 32), standard normal, on the device."""
    return torch.randn(batch, 3, 32, 32, device=settings.device)


@torch.inference_mode()
def infer(model: nn.Module, images: Tensor) -> Tensor:
    """Logits (B, num_classes), without a graph."""
    return model(images)


def training_update(model: nn.Module, settings: Settings) -> Callable[[], None]:
    """A function that makes one update of the model, always on the same random batch."""
    images = random_images(settings.train_batch, settings)
    labels = torch.randint(100, (settings.train_batch,), device=settings.device)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def update() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return update


@torch.inference_mode()
def torchdiffeq_infer(model: Any, images: Tensor, method: str) -> Tensor:
    """The logits of an ODE variant with torchdiffeq taking the steps: same stem, field, step size and head."""
    from torchdiffeq import odeint

    z = model.initial_state(images)
    times = torch.tensor([0.0, model.horizon * model.step_size], device=z.device)
    options = {"step_size": model.step_size}  # without it, one step over the whole interval
    states = odeint(lambda t, z: model.vector_field(z), z, times, method=method, options=options)
    return model.forward_head(model.norm(states[-1]))


def torchdiffeq_name(method: str) -> str:
    """What a row calls torchdiffeq with that method."""
    return f"torchdiffeq {method}"


def check_against_torchdiffeq(name: str, method: str, settings: Settings) -> int:
    """The evaluations of a pass, after checking that both sides make as many and end in the same state.

    The states of bvit_ode_rk4 are compared under our 3/8 rule, which is what torchdiffeq calls rk4.

    Raises:
        AssertionError: They differ in evaluations, or in the state by more than 1e-5.
    """
    solver = TORCHDIFFEQ_TABLEAUS[method]
    model: Any = build(name, settings, solver=solver, num_classes=0, global_pool="").eval()  # states, not logits
    images = random_images(2, settings)
    ours, our_nfe = _count_evaluations(model, partial(infer, model, images))
    theirs, their_nfe = _count_evaluations(model, partial(torchdiffeq_infer, model, images, method))
    nfe = build(name, settings).nfe
    if not our_nfe == their_nfe == nfe:
        raise AssertionError(f"{name}: {nfe} evaluations, {our_nfe} counted, {their_nfe} in torchdiffeq's {method}")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    return our_nfe


def _count_evaluations(model: Any, call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    seen: list[None] = []
    hook = model.blocks[0].register_forward_hook(lambda *_: seen.append(None))
    result = call()
    hook.remove()
    return result, len(seen)


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


# ---- how it is measured ----------------------------------------------------------------------------------------------


def alternate(measures: Mapping[str, Callable[[], float]], rounds: int, inner: int = 1) -> dict[str, list[float]]:
    """Take each measure in its turn, `inner` times in every round; every second round takes them in reverse order.

    Returns:
        For each measure one number a round, the median of its `inner` numbers.

    Example:
        >>> taken = []
        >>> measures = {"a": lambda: taken.append("a") or 1.0, "b": lambda: taken.append("b") or 2.0}
        >>> alternate(measures, rounds=2, inner=2)
        {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
        >>> " ".join(taken)
        'a b a b b a b a'
    """
    results: dict[str, list[float]] = {name: [] for name in measures}
    for i in range(rounds):
        order = list(measures) if i % 2 == 0 else list(measures)[::-1]
        taken = [(name, measures[name]()) for _ in range(inner) for name in order]
        for name, result in results.items():
            result.append(median(value for who, value in taken if who == name))
    return results


def milliseconds(call: Callable[[], object], settings: Settings) -> float:
    """The time of one call, until the device has finished it."""
    _synchronize(settings)
    start = perf_counter()
    call()
    _synchronize(settings)
    return 1000 * (perf_counter() - start)


def _synchronize(settings: Settings) -> None:
    if settings.on_gpu:
        torch.cuda.synchronize(settings.device)


def time_in_turn(calls: Calls, settings: Settings) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each call, round by round, and the inner repetitions, which the warm-up before them chooses."""
    measures = {name: partial(milliseconds, call, settings) for name, call in calls.items()}
    alternate(measures, rounds=1, inner=2)
    once = sum(times[0] for times in alternate(measures, rounds=1).values())
    inner = max(1, round(1000 * settings.seconds / once))
    return alternate(measures, settings.rounds, inner), inner


def timed_cells(benchmark: str, calls: Calls, settings: Settings, *, batch: int, **more: Any) -> Iterator[Row]:
    """Time the calls, each on `batch` images: a row for each, as in `compared_cells`."""
    times, inner = time_in_turn(calls, settings)
    yield from rows.compared_cells(benchmark, times, batch=batch, inner=inner, **more)


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
        [sys.executable, "-c", "from benchmarks import speed; speed.answer()", request],
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


# ---- the program -----------------------------------------------------------------------------------------------------


def run(parts: Sequence[str], settings: Settings, command: str) -> list[Row]:
    """Measure the parts; the rows, each with where it comes from."""
    torch.set_num_threads(settings.threads)
    origin = rows.provenance(settings.device, command)
    measured = []
    for part in parts:
        report(part)
        for row in PARTS[part](settings):
            measured.append({**row, **origin})
            report(f"  {describe(row)}")
    return measured


def describe(row: Row) -> str:
    """A row in one line, for the progress report."""
    batch = f" x{row['batch']}" if row["batch"] else ""
    ratio = f", ratio to {row['reference']} {row['ratio']:.3f}" if row["reference"] else ""
    return f"{row['subject']}{batch}: {row['median']:.4g} {row['unit']} [{row['min']:.4g}, {row['max']:.4g}]{ratio}"


def report(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: small batches, no real compiler, kept only where --out says"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds of what is timed in this process (default 10, quick 2)"
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file to append to (default: benchmarks/results/speed.jsonl)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if arguments.threads < 1 or (arguments.rounds is not None and arguments.rounds < 1):
        parser.error("--rounds and --threads must be at least 1")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no CUDA device")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the rows as JSON lines, and append them to the file when all is done."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    settings = replace(QUICK if arguments.quick else Settings(), device=arguments.device, threads=arguments.threads)
    if arguments.rounds is not None:
        settings = replace(settings, rounds=arguments.rounds)
    measured = run(arguments.only, settings, command=shlex.join(["python", "-m", "benchmarks.speed", *argv]))
    out = arguments.out or (None if arguments.quick else rows.RESULTS / "speed.jsonl")
    if out:
        rows.append(out, measured)
        report(f"{len(measured)} rows appended to {out}")
    else:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in measured)


if __name__ == "__main__":
    main()
