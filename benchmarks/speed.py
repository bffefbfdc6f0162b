"""Speed and memory of the zoo, measured side by side with timm's ViT and with torchdiffeq.

    python -m benchmarks.speed               # all but the part `zoo`, in 20 minutes; appended to results/speed.jsonl
    python -m benchmarks.speed --only zoo    # images per second of every CIFAR name
    python -m benchmarks.speed --quick       # a smoke run of a minute, on small batches; kept only where --out says
    python -m benchmarks.tables              # the rows as tables
    python -m benchmarks.zoo                 # those of the part `zoo`, with what else is known of each name

How it is measured:

- What is compared runs in turn, A B A B ..., and every second round begins at the other end, B A B A ..., so that a
  machine that slows down does so for all alike. A round gives each subject one number, the median of its `inner`
  repetitions; a row has the median, the least and the largest over the rounds.
- A ratio is reference / subject within one round, and the row has its median, least and largest over the rounds. Above
  1 the subject is the faster (or the smaller).
- All is fp32 and eager (compilation apart), on random images and untrained weights. The reference `timm_vit` is timm's
  own VisionTransformer of the same widths: twelve independent blocks, the arithmetic of twelve evaluations of one
  block, and none of our code.
- Compile time and peak memory depend on what the process did before, so each number comes from a process of its own
  (`benchmarks.processes`).

It wants an otherwise idle machine.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from recurrent_vit.equilibrium import import_odeint
from recurrent_vit.machine import check_device

from . import processes, rows
from .measure import (
    CIFAR_NAMES,
    QUICK,
    TIMM_VIT,
    Settings,
    build,
    infer,
    random_images,
    report,
    time_in_turn,
    timed_cells,
    training_update,
)
from .rows import Row
from .usage import check_out, record, usage_errors

INFERENCE = ("vit_cifar", "bvit")  # each against TIMM_VIT
ODE = {"bvit_ode_euler": "euler", "bvit_ode_heun": "heun2", "bvit_ode_rk4": "rk4"}  # variant: torchdiffeq's method
TORCHDIFFEQ_TABLEAUS = {"euler": "euler", "heun2": "heun2", "rk4": "rk4_38"}  # its method: our solver
ODE_NOTES = {"rk4": "torchdiffeq's rk4 is the 3/8 rule: as many evaluations as the classical method, other weights"}
GEMM, GEMM_SIZE = "gemm_2048", 2048
ZOO_REFERENCE = "bvit"


# ---- the parts: generators of rows -----------------------------------------------------------------------------------


def inference(settings: Settings) -> Iterator[Row]:
    """One forward pass in eval mode under torch.inference_mode, by batch size."""
    yield from _forward("inference", (TIMM_VIT, *INFERENCE), settings.batches, settings)


def zoo(settings: Settings) -> Iterator[Row]:
    """The same for every CIFAR name, all in turn."""
    names = (ZOO_REFERENCE, *(name for name in CIFAR_NAMES if name != ZOO_REFERENCE))
    yield from _forward("zoo", names, settings.zoo_batches, settings)


def _forward(benchmark: str, names: Sequence[str], batches: Sequence[int], settings: Settings) -> Iterator[Row]:
    """Forward passes by batch size; the first name is the reference of the others."""
    models = {name: build(name, settings).eval() for name in names}
    for batch in batches:
        images = random_images(batch, settings)
        calls = {name: partial(infer, model, images) for name, model in models.items()}
        yield from timed_cells(benchmark, calls, settings, batch=batch)


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


PARTS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "inference": inference,
    "training": training,
    "ode": ode,
    "compile": processes.compilation,
    "memory": processes.memory,
    "stages": processes.stages,
    "zoo": zoo,
}


# ---- torchdiffeq -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def torchdiffeq_infer(model: Any, images: Tensor, method: str) -> Tensor:
    """The logits of an ODE variant with torchdiffeq taking the steps: same stem, field, step size and head."""
    z = model.initial_state(images)
    times = torch.tensor([0.0, model.horizon * model.step_size], device=z.device)
    options = {"step_size": model.step_size}  # without it, one step over the whole interval
    states = import_odeint()(lambda t, z: model.vector_field(z), z, times, method=method, options=options)
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: small batches, no real compiler, kept only where --out says"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds of what is timed in this process (default 10, quick 2)"
    )
    default = ",".join(part for part in PARTS if part != "zoo")
    parser.add_argument("--only", default=default, help=f"of {', '.join(PARTS)} (default: %(default)s)")
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
    with usage_errors(parser):
        check_device(arguments.device)
        if arguments.out:
            check_out(arguments.out)
        if "ode" in arguments.only:
            import_odeint()
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
    record(measured, out)


if __name__ == "__main__":
    main()
