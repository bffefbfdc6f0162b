"""What the measurements of speed and memory share: how much is measured, the models, and taking turns."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from recurrent_vit.zoo import CIFAR, VARIANTS

from . import rows
from .rows import Row

TIMM_VIT = "timm_vit"
CIFAR_NAMES = tuple(name for name, variant in VARIANTS.items() if variant.cfg["input_size"] == (3, 32, 32))

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
        zoo_batches: Batch sizes of the table of the zoo.
        train_batch: Batch size of a training step, and of its memory.
        stages: Numbers of stages whose backward passes have their memory measured; the first is the reference.
        stage_batch: Batch size of these passes.
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
    zoo_batches: Sequence[int] = (1, 128)
    train_batch: int = 128
    stages: Sequence[int] = (1, 2, 4, 8)
    stage_batch: int = 32
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
    zoo_batches=(1, 4),
    train_batch=4,
    stages=(1, 2),
    stage_batch=2,
    backend="eager",
)


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


def report(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
