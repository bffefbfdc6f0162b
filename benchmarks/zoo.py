"""The table of the zoo: what each CIFAR name costs and reaches, and published numbers that show where a budget stands.

    python -m benchmarks.speed --only zoo      # measures images per second; appended to results/speed.jsonl
    python -m benchmarks.zoo                   # prints the tables, from all of benchmarks/results
    python -m benchmarks.zoo FILE.jsonl ...    # from these files

Sizes and costs are those of the architectures, accuracies those of the manifest of checkpoints; of images per second
the latest rows are shown. What was not measured, or has no weights, says "not run". `ANCHORS` are numbers of others.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recurrent_vit import weights
from recurrent_vit.printing import percent
from recurrent_vit.zoo import describe

from . import rows
from .markdown import NOT_RUN, latest, markdown_line, source
from .measure import CIFAR_NAMES, Settings
from .rows import Row

__all__ = ["ANCHORS", "COLUMNS", "Anchor", "Entry", "entries", "page"]

BENCHMARK = "zoo"
BATCHES = Settings().zoo_batches
DEVICE = "cpu"
KEYS = ("benchmark", "subject", "batch")  # of a row of images per second


# ---- our models ------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A line of the table.

    Args:
        about: Of the architecture, as `recurrent_vit.zoo.describe` gives it.
        checkpoint: Weights of it; None if there are none.
        speed: The latest row by batch size.
    """

    about: dict[str, Any]
    checkpoint: weights.Checkpoint | None
    speed: Mapping[int, Row]


def _of_weights(show: Callable[[weights.Checkpoint], str]) -> Callable[[Entry], str]:
    return lambda entry: NOT_RUN if entry.checkpoint is None else show(entry.checkpoint)


def _of_speed(batch: int) -> Callable[[Entry], str]:
    return lambda entry: f"{entry.speed[batch]['images_per_s']:,.0f}" if batch in entry.speed else NOT_RUN


def _top1(row: weights.Checkpoint) -> str:
    return percent(row.metrics, "top1")


COLUMNS: Mapping[str, Callable[[Entry], str]] = {
    "model": lambda entry: entry.checkpoint.id if entry.checkpoint else entry.about["name"],
    "parameters": lambda entry: f"{entry.about['parameters']:,}",
    "file, bytes": _of_weights(lambda row: f"{row.bytes:,}"),
    "MACs": lambda entry: f"{entry.about['MACs']:,}",
    "NFE": lambda entry: f"{entry.about['NFE']}",
    "top-1 %": _of_weights(_top1),
    "top-5 %": _of_weights(lambda row: f"{100 * row.metrics['top5']:.2f}"),
    **{f"images/s, batch {batch}": _of_speed(batch) for batch in BATCHES},
    "recipe": _of_weights(lambda row: row.recipe),
    "PFLOP": _of_weights(lambda row: f"{row.pflop:.3g}"),
}
CAPTION = (
    "Top-1 and top-5 are of CIFAR-100's 10,000 test images after the trained number of steps; ± is the standard error "
    "over the images. MACs, multiply-accumulates, and NFE, evaluations of the block set (twelve blocks in vit_cifar), "
    "are for one image; PFLOP is the compute of the training, three forward passes for each image. Images/s is one "
    "forward pass in fp32, eager"
)


def entries(measured: Iterable[Row]) -> Iterator[Entry]:
    """A line for each checkpoint of each CIFAR name; one for a name that has none.

    Args:
        measured: Rows of any benchmarks.
    """
    found = latest((row for row in measured if row.get("benchmark") == BENCHMARK), DEVICE, KEYS)
    for name in CIFAR_NAMES:
        about = describe(name)
        speed = {batch: found[place] for batch in BATCHES if (place := (BENCHMARK, name, batch)) in found}
        trained: list[weights.Checkpoint | None] = [*weights.checkpoints(name)] or [None]
        yield from (Entry(about, checkpoint, speed) for checkpoint in trained)


# ---- others' models --------------------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """A published result on CIFAR-100, trained from scratch.

    Args:
        model: What it is.
        parameters: In millions.
        recipe: What is known of its training.
        top1: Accuracy in per cent.
        source: Who published it: a repository on GitHub, or a paper.
    """

    model: str
    parameters: str
    recipe: str
    top1: str
    source: str


UNKNOWN = "not stated"  # by the source
CHENYAOFO, OSMR = "chenyaofo/pytorch-cifar-models", "osmr/pytorchcv"
COMPACT = "SHI-Labs/Compact-Transformers, arXiv 2104.05704"
ODE_VIT = "Bycarkos/ODE-ViT, arXiv 2511.16501"

ANCHORS = (
    Anchor("ResNet-20", "0.28", "200 epochs", "68.8", CHENYAOFO),
    Anchor("ResNet-56", "0.86", "200 epochs", "72.6", CHENYAOFO),
    Anchor("ResNet-56", "0.86", UNKNOWN, "75.1", OSMR),
    Anchor("DenseNet-BC-100", "0.80", UNKNOWN, "78.8", OSMR),
    Anchor("CCT-2/3x2 (convolutional stem)", "0.28", "200 epochs, 2.0 PFLOP", "66.9", COMPACT),
    Anchor(
        "ViT, 9 blocks of width 192", "2.8", "100 epochs, 5.7 PFLOP, heavy augmentation", "73.8",
        "hananshafi/vits-for-small-scale-datasets",
    ),
    Anchor("ViT-Lite-7/4", "3.7", "200 epochs, 14 PFLOP", "69.8", COMPACT),
    Anchor(
        "ViT-CIFAR", "6.3", "200 epochs, 25 PFLOP", "66.5 claimed, about 56 reproduced",
        "omihub777/ViT-CIFAR and its issue 10",
    ),
    Anchor("ODE transformer (Zhong et al., 2022)", "0.7", UNKNOWN, "53.3", ODE_VIT),
    Anchor("ODE-ViT", "4.2", "300 epochs", "57.9", ODE_VIT),
)  # fmt: skip
ANCHORS_CAPTION = (
    "Published numbers of others, trained from scratch on CIFAR-100, each by its own recipe and budget. They show what "
    "a budget can reach, not which architecture is better: the same ResNet-56 has 72.6 % in one zoo, 75.1 % in another."
)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(measured: Iterable[Row]) -> str:
    """Both tables in Markdown, with what must be known of them."""
    shown = list(entries(measured))
    origins = dict.fromkeys(source(row) for entry in shown for row in entry.speed.values())
    return "\n".join(
        [
            *_table(list(COLUMNS), ([show(entry) for show in COLUMNS.values()] for entry in shown)),
            "",
            f"{CAPTION}{', on the machine below:' if origins else '.'}",
            *(["", *(f"- {line}" for line in origins)] if origins else []),
            "",
            ANCHORS_CAPTION,
            "",
            *_table(["model", "parameters, M", "recipe", "top-1 %", "source"], ANCHORS),
            "",
        ]
    )


def _table(head: list[str], lines: Iterable[Iterable[str]]) -> list[str]:
    return [markdown_line(head), markdown_line(["---"] * len(head)), *map(markdown_line, lines)]


if __name__ == "__main__":
    files: list[str | Path] = [*sys.argv[1:]] or [*sorted(rows.RESULTS.glob("*.jsonl"))]
    print(page(rows.read(*files)), end="")
