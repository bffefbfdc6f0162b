"""One trained model under several engines, on the test images of CIFAR-100: how fast, and how much accuracy that costs.

    python -m benchmarks.engines --data DIR                # bvit_ds; appended to results/engines.jsonl
    python -m benchmarks.engines NAME --data DIR           # a name with weights, the folder of a run, local-dir:PATH
    python -m benchmarks.engines --data DIR --only accuracy    # or speed
    python -m benchmarks.engines --data DIR --limit 64     # a smoke run on 64 images; printed, never recorded

The engines:

- eager: torch, fp32. The reference.
- compiled: each block compiled by Inductor, for its shapes; frozen: the same with its weights as constants
- bf16, bf16 frozen: weights and state in bfloat16, eager and compiled
- onnx, onnx int8: the file of `recurrent-vit export`, in ONNX Runtime
- optimized, optimized int8: `recurrent_vit.optimize`
- early exit, early exit int8: `recurrent_vit.Anytime` of the eager model, and of the optimized one in int8, with a
  threshold of confidence that was chosen on training images, of which `calibrated_on` says what the model knows

Three kinds of rows, by `benchmark`:

- "engines": milliseconds for a batch of 1, 16 and 128, over the same test images, the engines in turn within a round
  and backwards in the next; the ratio is speed. `timm_vit`, timm's own ViT of the same widths, untrained, twelve
  blocks, runs under the same engines. gflops counts 2 * MACs for each image, of all steps, whether they were taken or
  not; gemm_fraction is that over the rate of an fp32 matrix product of 2048^3 in the same round.
- "engines int8": of the same times, int8 in ONNX Runtime beside fp32 there.
- "engine accuracy": all test images under the engines that compute something else than eager; `lost` is the accuracy of
  eager minus its own, its standard error that of a paired difference.

Before each number the program sleeps for a moment: the threads of the engine before spin on after its work. Beside
ONNX Runtime's threads torch is given one (`torch.set_num_threads(1)`), or the two would contend for the cores.
It wants an otherwise idle machine.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch._inductor.config  # for patch, which has no public name
from torch import Tensor, nn

import recurrent_vit
from recurrent_vit import Anytime, augment, calibration, cifar, evaluate, export
from recurrent_vit.optimized import start_session
from recurrent_vit.zoo import describe

from . import accuracy, rows, usage
from .cross import paired
from .measure import TIMM_VIT, Settings, alternate, build, milliseconds, report
from .rows import Row
from .speed import GEMM, GEMM_SIZE
from .usage import check_out, check_smoke, record, usage_errors

__all__ = ["Engine", "accuracies", "check_exact", "engines", "main", "speeds", "vit_engines"]

BATCHES = {1: 128, 16: 256, 128: 256}  # batch size: images a round
MAX_LOST = 0.0025  # of accuracy, that early exit may cost on the images that its threshold is chosen on
SETTLE = 0.02  # seconds
EAGER, EARLY, ONNX, ONNX_INT8 = "eager", "early exit", "onnx", "onnx int8"
EXACT = (EAGER, "compiled", "frozen", ONNX, "optimized")  # their answers differ by rounding alone
ROUNDING = 1e-3  # of the largest logit
PARTS = ("speed", "accuracy")


class Engine(NamedTuple):
    """A way to compute logits.

    Args:
        logits: Images (B, 3, 32, 32) to logits (B, classes).
        threads: Of torch while it runs; None: as many as there are.
        frozen: Whether what it compiles has its weights as constants.
    """

    logits: Callable[[Tensor], Tensor]
    threads: int | None = None
    frozen: bool = False


# ---- the engines -----------------------------------------------------------------------------------------------------


def engines(model: Any, threshold: float | None) -> dict[str, Engine]:
    """All engines of a recurrent model in evaluation mode, by name, eager first.

    Args:
        model: A `RecurrentVisionTransformer`.
        threshold: Of confidence, for early exit.
    """
    fast = recurrent_vit.optimize(model, int8=True)
    return {
        **_torch_engines(model),
        ONNX: _onnx_loop(model, int8=False),
        ONNX_INT8: _onnx_loop(model, int8=True),
        "optimized": Engine(recurrent_vit.optimize(model), threads=1),
        "optimized int8": Engine(fast, threads=1),
        EARLY: Engine(partial(_early, Anytime(model, "confidence", threshold))),
        f"{EARLY} int8": Engine(partial(_early, Anytime(fast, "confidence", threshold)), threads=1),
    }


def vit_engines(vit: nn.Module) -> dict[str, Engine]:
    """The engines that a plain ViT has."""
    return {
        **_torch_engines(vit),
        ONNX: _onnx_vit(vit, int8=False),
        ONNX_INT8: _onnx_vit(vit, int8=True),
    }


def _torch_engines(model: Any) -> dict[str, Engine]:
    half = copy.deepcopy(model).bfloat16()
    return {
        EAGER: Engine(model),
        "compiled": Engine(_compiled(model)),
        "frozen": Engine(_to_freeze(model), frozen=True),
        "bf16": Engine(partial(_in_bf16, half)),
        "bf16 frozen": Engine(partial(_in_bf16, _to_freeze(half)), frozen=True),
    }


def _in_bf16(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images.bfloat16())
    return logits.float()


def _compiled(model: nn.Module) -> Any:
    """A copy with compiled blocks: one graph for each batch size, or an error, never eager instead."""
    twin: Any = copy.deepcopy(model)
    for block in twin.blocks:
        block.compile(dynamic=False, fullgraph=True)
    return twin


def _to_freeze(model: nn.Module) -> Any:
    """A copy whose blocks are compiled each by a code object of its own.

    Dynamo keeps its graphs by code object. One without constants fits all blocks of a shape, so beside `_compiled`, by
    the code that all modules share, it would be taken for a frozen one.
    """
    twin: Any = copy.deepcopy(model)
    for block in twin.blocks:
        forward = type(block).forward
        own = FunctionType(
            forward.__code__.replace(), forward.__globals__, argdefs=forward.__defaults__, closure=forward.__closure__
        )
        block.forward = torch.compile(MethodType(own, block), dynamic=False, fullgraph=True)
    return twin


def _early(anytime: Anytime, images: Tensor) -> Tensor:
    return anytime(images).logits


def _onnx_loop(model: Any, int8: bool) -> Engine:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export.export_onnx(model, file, int8=int8)
        session = start_session(file.read_bytes(), torch.get_num_threads())
    steps = torch.tensor(model.horizon).numpy()
    return Engine(lambda images: _run(session, {"image": images.numpy(), "steps": steps}), threads=1)


def _onnx_vit(vit: nn.Module, int8: bool) -> Engine:
    content = export.module_to_onnx(vit, torch.zeros(2, 3, 32, 32), {0: "batch"}, int8)
    session = start_session(content, torch.get_num_threads())
    return Engine(lambda images: _run(session, {"x": images.numpy()}), threads=1)


def _run(session: Any, inputs: Mapping[str, Any]) -> Tensor:
    return torch.from_numpy(session.run(None, dict(inputs))[0])


@contextmanager
def _running(engine: Engine) -> Iterator[None]:
    """Its number of threads, and its setting of the compiler, which Dynamo reads at the first call of each shape."""
    before = torch.get_num_threads()
    torch.set_num_threads(engine.threads or before)
    try:
        with torch.inference_mode(), torch._inductor.config.patch(freezing=engine.frozen):
            yield
    finally:
        torch.set_num_threads(before)


# ---- the rows --------------------------------------------------------------------------------------------------------


def speeds(
    name: str,
    ours: Mapping[str, Engine],
    theirs: Mapping[str, Engine],
    macs: tuple[int, int],
    images: Tensor,
    rounds: int,
) -> Iterator[Row]:
    """Rows of "engines" and "engines int8".

    Args:
        name: What the rows call our model.
        ours: Its engines.
        theirs: Those of timm's ViT.
        macs: Multiply-accumulates for an image, of ours and of theirs.
        images: (N, 3, 32, 32), normalised.
        rounds: Even, so that each engine leads in half of them.
    """
    subjects: dict[str, Engine] = {}
    costs: dict[str, int] = {}
    for who, engines_of, cost in ((name, ours, macs[0]), (TIMM_VIT, theirs, macs[1])):
        subjects |= {f"{who} {engine}": one for engine, one in engines_of.items()}
        costs |= {f"{who} {engine}": cost for engine in engines_of}
    square = torch.randn(GEMM_SIZE, GEMM_SIZE)
    product = partial(torch.mm, square, square, out=torch.empty_like(square))
    for batch, count in BATCHES.items():
        torch.compiler.reset()  # the graphs of all models and batch sizes would be more than Dynamo keeps
        parts = images[:count].split(batch)
        total = sum(map(len, parts))
        calls = {subject: partial(_time, engine, parts) for subject, engine in subjects.items()}
        calls[GEMM] = partial(_time_call, product)
        alternate(calls, rounds=1)  # warm-up, and compilation for this batch size
        times = alternate(calls, rounds)
        gemm = [2 * GEMM_SIZE**3 / (1e6 * value) for value in times.pop(GEMM)]
        per_batch = {subject: [value * batch / total for value in values] for subject, values in times.items()}
        for row in rows.compared_cells("engines", per_batch, batch=batch, images=total):
            cost = costs[row["subject"]]
            rates = [2 * cost * batch / (1e6 * value) for value in per_batch[row["subject"]]]
            fractions = [rate / most for rate, most in zip(rates, gemm)]
            yield {**row, "gflops": round(median(rates), 1), "gemm_fraction": round(median(fractions), 4)}
        for who in (name, TIMM_VIT):
            pair = {one: per_batch[one] for one in (f"{who} {ONNX}", f"{who} {ONNX_INT8}") if one in per_batch}
            if len(pair) == 2:
                yield from list(rows.compared_cells("engines int8", pair, batch=batch, images=total))[1:]


def check_exact(ours: Mapping[str, Engine], images: Tensor) -> None:
    """Whether the engines that should give eager's logits do.

    Raises:
        RuntimeError: One does not; says which, and by how much.
    """
    logits = {}
    for name in EXACT:
        with _running(ours[name]):
            logits[name] = ours[name].logits(images)
    for name, found in logits.items():
        deviation = ((found - logits[EAGER]).abs().max() / logits[EAGER].abs().max()).item()
        if not deviation <= ROUNDING:
            raise RuntimeError(f"{name} is off by {deviation:.2g} of the largest logit, more than {ROUNDING:g}")


def _time(engine: Engine, parts: Sequence[Tensor]) -> float:
    """Milliseconds for all of the parts."""
    with _running(engine):
        return _time_call(lambda: [engine.logits(part) for part in parts])


def _time_call(call: Callable[[], object]) -> float:
    time.sleep(SETTLE)
    return milliseconds(call, Settings())


def accuracies(name: str, ours: Mapping[str, Engine], split: cifar.Split, batch: int = 128) -> Iterator[Row]:
    """Rows of "engine accuracy": of eager, and of the engines that compute something else."""
    reference: Tensor | None = None
    for engine, one in ours.items():
        if engine != EAGER and engine in EXACT:
            continue
        classes = _classes(one, split, batch, engine)
        reference = classes if reference is None else reference
        p = (classes == split.labels).double().mean().item()
        yield {
            "benchmark": "engine accuracy",
            "subject": f"{name} {engine}",
            "top1": p,
            "top1_stderr": evaluate.standard_error(p, len(split)),
            **paired(classes, reference, split.labels),
            "count": len(split),
        }


def _classes(engine: Engine, split: cifar.Split, batch: int, name: str) -> Tensor:
    found = []
    parts = split.images.split(batch)
    with _running(engine):
        for part in evaluate.progress_bar(parts, name, len(parts), shown=True):
            logits = engine.logits(augment.normalize(part))
            found.append(logits.argmax(-1).masked_fill(~logits.isfinite().all(-1), -1))
    return torch.cat(found)


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append the rows when all is done, or print them if --limit is given."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with usage_errors(parser):
        subject, model, held, test = _prepare(arguments)
    origin = {
        **rows.provenance("cpu", usage.command("engines", [subject.name], arguments, parser)),
        "sha256": subject.sha256,
    }
    threshold = calibration.calibrate(model, held, "confidence", MAX_LOST, batch_size=128, progress=True).threshold
    chosen_on = calibration.calibrated_on(subject.source, len(held))
    exits = {"threshold": threshold, "max_lost": MAX_LOST, "calibrated_on": chosen_on}
    ours = engines(model.eval(), threshold)
    images = augment.normalize(cifar.sample(test, max(BATCHES.values())).images)
    check_exact(ours, images[:16])
    measured: list[Row] = []
    if arguments.only != "accuracy":
        theirs = vit_engines(build(TIMM_VIT, Settings()).eval())
        macs = (model.macs, describe("vit_cifar")["MACs"])
        for row in speeds(subject.name, ours, theirs, macs, images, arguments.rounds):
            measured.append({**row, **(exits if EARLY in row["subject"] else {}), **origin})
            report(f"  {row['subject']} x{row['batch']}: {row['images_per_s']:,.0f} images/s, {_ratio(row)}")
    if arguments.only != "speed":
        for row in accuracies(subject.name, ours, test):
            measured.append({**row, **(exits if EARLY in row["subject"] else {}), **origin})
            report(f"  {row['subject']}: {100 * row['top1']:.2f} %, {100 * row['lost']:.2f} points lost")
    record(measured, None if arguments.limit else arguments.out or rows.RESULTS / "engines.jsonl")


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.3f} x {row['reference']}" if row["reference"] else "the reference"


def _prepare(arguments: argparse.Namespace) -> tuple[accuracy.Subject, Any, cifar.Split, cifar.Split]:
    """All that is needed, checked before the minutes that it takes."""
    check_smoke(arguments)
    if arguments.out:
        check_out(arguments.out)
    export.check_packages("onnx", "onnxscript", "onnxruntime")
    subject = accuracy.resolve(arguments.name)
    model = accuracy.load(subject)
    train, test = cifar.load(arguments.data, "train"), cifar.load(arguments.data, "test")
    held = train[cifar.held_out(train.labels, calibration.HELD_OUT)[1]]
    return subject, model, cifar.sample(held, arguments.limit), cifar.sample(test, arguments.limit)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=first)
    parser.add_argument("name", metavar="NAME", nargs="?", default="bvit_ds", help="default: %(default)s")
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument("--only", choices=PARTS, help="of what is measured")
    parser.add_argument("--rounds", type=int, default=6, help="of the timing; even (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="a smoke run on N images, only printed")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append to (default: benchmarks/results/engines.jsonl)"
    )
    return parser


if __name__ == "__main__":
    main()
