"""CIFAR-100 as in-memory tensors: sources, a held-out split, batches.

The set (Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html) is 50,000 + 10,000 images of 32 x 32 pixels in
100 classes. As uint8 it takes 184 MB, so it is held whole, on the device that trains, and augmented there in batches;
there is no worker pool.

What is notable:

- :func:`load` reads three layouts (the Hub's parquet, torchvision's pickles, folders of PNGs) into the same tensors,
  up to the order of the images.
- What is done to images, and the chance in it, is in `recurrent_vit.augment`.

Shapes: N images of a split, B of a batch, H = W = 32 pixels, 3 channels.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR100
from torchvision.datasets.utils import check_integrity

from .augment import SIDE, Augmentation, check_argument, generator, normalize

__all__ = [
    "COARSE_NAMES", "COARSE_OF_FINE", "FINE_NAMES", "Batch", "Split",
    "batches", "batches_per_epoch", "epoch_order", "held_out", "load", "sample",
]  # fmt: skip

ROWS = {"train": 50_000, "test": 10_000}

CLASSES = {  # the 20 coarse classes and the five fine ones of each
    "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
COARSE_NAMES = tuple(CLASSES)
FINE_NAMES = tuple(sorted(name for group in CLASSES.values() for name in group))
COARSE_OF_FINE = tuple(next(i for i, group in enumerate(CLASSES.values()) if name in group) for name in FINE_NAMES)


# The set ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels, on one device.

    Args:
        images: uint8 (N, 3, H, W).
        labels: int64 (N,).

    Raises:
        ValueError: another dtype or shape, or another number of labels than of images.

    Example:
        >>> split = Split(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1, 2, 3]))
        >>> len(split), split[torch.tensor([3, 1])].labels.tolist()
        (4, [3, 1])
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self):
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be uint8 (N, 3, H, W), got {images.dtype} {tuple(images.shape)}")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise ValueError(f"labels must be int64 ({len(images)},), got {labels.dtype} {tuple(labels.shape)}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor | slice) -> "Split":
        """The split of these rows: an index tensor, a boolean mask, or a slice."""
        return Split(self.images[rows], self.labels[rows])

    def to(self, device: torch.device | str) -> "Split":
        """The same split on another device."""
        return Split(self.images.to(device), self.labels.to(device))


def load(root: str | os.PathLike | None = None, split: str = "train", download: bool = False) -> Split:
    """Load CIFAR-100 from a folder, in whichever of three layouts it is there; takes seconds.

    1. parquet, as in the Hub's `uoft-cs/cifar100 <https://huggingface.co/datasets/uoft-cs/cifar100>`_ (needs pyarrow);
    2. torchvision's ``cifar-100-python`` folder, its md5 sums checked;
    3. ``train/`` and ``test/``, with a folder of PNGs for each class.

    All give the same images; the order is that of the source. They are looked for in this order.

    Args:
        root: the folder; without it, the environment variable RECURRENT_VIT_DATA; without that, a folder of torch's
            cache.
        split: "train" (50,000 images) or "test" (10,000).
        download: when the folder holds none of the layouts, let torchvision fetch the set (169 MB) into it.

    Returns:
        A :class:`Split` on the CPU: images uint8 (N, 3, 32, 32), labels int64 (N,) in 0..99, the order of FINE_NAMES.

    Raises:
        FileNotFoundError: nothing was found; says what was looked for, and where.
        ValueError: something was found that is not CIFAR-100, whole: names the file, what it holds, what is expected.
        OSError: the download failed.
        ImportError: parquet was found but pyarrow is not installed.

    Example:
        >>> train = load("data/cifar100")  # doctest: +SKIP
        >>> load("no/such/folder", split="test")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: CIFAR-100 (test) was not found in no/such/folder (given as root), which does not exist...
    """
    if split not in ROWS:
        raise ValueError(f"split must be one of {', '.join(ROWS)}, got {split!r}")
    folder, origin = _folder(root)
    for layout in LAYOUTS:
        if found := layout.find(folder, split):
            return layout.read(found, split)
    if download:
        _download(folder)
        return _read_torchvision(_find_torchvision(folder, split), split)
    raise FileNotFoundError(_not_found(folder, origin, split))


def held_out(labels: Tensor, size: int = 5000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split training images in two, for choosing anything without the test set: as many of each class held out.

    Which ones is a matter of their places in the split, so another source with another order is another choice: choose
    from the source that was trained on.

    Args:
        labels: int64 (N,).
        size: how many to hold out, a multiple of the number of classes.
        seed: another seed is another split; torch's global generator plays no part.

    Returns:
        (train, held): sorted int64 indices on the CPU, disjoint, together 0..N-1.

    Raises:
        ValueError: size is not a multiple of the number of classes, or leaves some class without an image.

    Example:
        >>> train, held = held_out(torch.tensor([0, 0, 0, 1, 1, 1]), size=2)
        >>> len(train), len(held)
        (4, 2)
    """
    labels = labels.cpu()
    classes, counts = labels.unique(return_counts=True)
    if not 0 < size < len(labels) or size % len(classes):
        raise ValueError(
            f"size must be a multiple of the number of classes ({len(classes)}) between 0 and the number of images "
            f"({len(labels)}), both excluded; got {size}"
        )
    per_class = size // len(classes)
    if per_class >= counts.min():
        raise ValueError(f"size={size} takes {per_class} images a class, but a class has only {counts.min()}")
    chance = generator("held_out", seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in classes:
        members = (labels == label).nonzero().flatten()
        held[members[torch.randperm(len(members), generator=chance)[:per_class]]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def sample(split: Split, count: int | None) -> Split:
    """So many images of a split, the first in an order that is random and always the same; all if `count` is None.

    Raises:
        ValueError: count is below 1.

    Example:
        >>> split = Split(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4))
        >>> len(sample(split, 3)), len(sample(split, None))
        (3, 4)
    """
    if count is None or count >= len(split):
        return split
    if count < 1:
        raise ValueError(f"limit={count} must be at least 1")
    return split[torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:count]]


# Batches ------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """One batch, or one rank's part of it, on the split's device."""

    images: Tensor  # float32 (B, 3, H, W), normalised
    labels: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,): places in the split


def batches_per_epoch(count: int, batch_size: int, drop_last: bool = False) -> int:
    """How many batches an epoch of `count` images has.

    Example:
        >>> batches_per_epoch(50_000, 128), batches_per_epoch(50_000, 128, drop_last=True)
        (391, 390)
    """
    return count // batch_size if drop_last else -(-count // batch_size)


def batches(
    split: Split,
    batch_size: int,
    *,
    epoch: int = 0,
    seed: int = 0,
    start: int = 0,
    augmentation: Augmentation | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """The batches of one epoch, from batch `start` on.

    Batch k depends on (seed, epoch, k) alone: starting at k gives bitwise the batches that an uninterrupted epoch
    gives from there, and the ranks' parts, joined in the order of the ranks, are bitwise the batch of one process.

    Args:
        split: what to draw from.
        batch_size: images in a batch, all ranks together.
        epoch: its number, from 0: another epoch, another permutation.
        seed: of the permutation and the augmentation.
        start: the first batch to give.
        augmentation: without one, images are only normalised.
        shuffle: whether to permute; for evaluation, don't.
        drop_last: leave out a last batch that is not full. Otherwise its parts may differ by an image between ranks,
            and some may be empty.
        rank: which part of every batch to give.
        world_size: into how many parts every batch is cut; divides batch_size.

    Returns:
        An iterator of :class:`Batch`.

    Raises:
        ValueError: at the call, for an argument out of range or an epoch without a batch.

    Example:
        >>> split = Split(torch.zeros(10, 3, 32, 32, dtype=torch.uint8), torch.arange(10))
        >>> [len(images) for images, labels, indices in batches(split, 4)]
        [4, 4, 2]
        >>> parts = [next(batches(split, 4, start=1, rank=rank, world_size=2)).indices for rank in (0, 1)]
        >>> bool((torch.cat(parts) == next(batches(split, 4, start=1)).indices).all())
        True
    """
    check_argument("batch_size", batch_size, batch_size >= 1, ">= 1")
    check_argument("world_size", world_size, world_size >= 1, ">= 1")
    check_argument("batch_size", batch_size, batch_size % world_size == 0, f"a multiple of world_size={world_size}")
    check_argument("rank", rank, 0 <= rank < world_size, f"0..{world_size - 1}")
    stop = batches_per_epoch(len(split), batch_size, drop_last)
    if not stop:
        raise ValueError(f"an epoch of {len(split)} images has no batch of {batch_size} (drop_last={drop_last})")
    check_argument("start", start, 0 <= start <= stop, f"0..{stop}, the batches of an epoch")
    order = epoch_order(len(split), epoch=epoch, seed=seed) if shuffle else torch.arange(len(split))

    def generate() -> Iterator[Batch]:
        for k in range(start, stop):
            indices = order[k * batch_size : (k + 1) * batch_size]
            part = _part(len(indices), rank, world_size)
            rows = indices[part].to(split.images.device)
            images, labels = split.images[rows], split.labels[rows]
            if augmentation is None:
                images = normalize(images)
            else:
                draws = augmentation.draw(indices, epoch=epoch, batch=k, seed=seed)
                images = augmentation(images, draws.rows(part))
            yield Batch(images, labels, rows)

    return generate()


def epoch_order(count: int, *, epoch: int, seed: int) -> Tensor:
    """The order of an epoch: a permutation, int64 (count,), of its own for every epoch and seed.

    Example:
        >>> sorted(epoch_order(4, epoch=0, seed=0).tolist())
        [0, 1, 2, 3]
    """
    return torch.randperm(count, generator=generator("order", seed, epoch))


def _part(count: int, rank: int, world_size: int) -> slice:
    """The rank's share of `count` images: contiguous, sizes differ by at most one."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


# Sources ------------------------------------------------------------------------------------------------------------


def _folder(root: str | os.PathLike | None) -> tuple[Path, str]:
    """The folder to look in, and how we came to it."""
    if root is not None:
        return Path(root).expanduser(), "given as root"
    if root := os.environ.get("RECURRENT_VIT_DATA"):
        return Path(root).expanduser(), "from RECURRENT_VIT_DATA"
    return Path(torch.hub.get_dir()).parent / "datasets", "torch's cache; neither root nor RECURRENT_VIT_DATA is set"


def _not_found(folder: Path, origin: str, split: str) -> str:
    state = "" if folder.is_dir() else ", which is not a folder" if folder.exists() else ", which does not exist"
    looked_for = "\n".join(f"  - {layout.looks.format(split=split)}" for layout in LAYOUTS)
    return (
        f"CIFAR-100 ({split}) was not found in {folder} ({origin}){state}. Looked there for\n{looked_for}\n"
        "Name a folder that holds one of these (root, --data on the command line, or the environment variable "
        "RECURRENT_VIT_DATA), or have it fetched: by torchvision with download=True, or from the Hub with\n"
        "  hf download uoft-cs/cifar100 --repo-type dataset --local-dir FOLDER"
    )


def _download(folder: Path) -> None:
    try:
        CIFAR100(folder, download=True)
    except (OSError, RuntimeError) as error:  # no network, no space, not writable; an archive whose md5 differs
        raise OSError(f"could not download {CIFAR100.url} into {folder}: {error}") from error


def _check_labels(labels: Sequence[int], split: str, source: object) -> None:
    """Refuse another number of images, a label out of range, or classes of unequal size."""
    array, classes = np.asarray(labels), len(FINE_NAMES)
    if len(array) != ROWS[split]:
        raise ValueError(f"{source}: {len(array)} images, expected {ROWS[split]} for {split}")
    if len(bad := np.flatnonzero((array < 0) | (array >= classes))):
        raise ValueError(f"{source}: row {bad[0]} has label {array[bad[0]]}, expected 0..{classes - 1}")
    counts, expected = np.bincount(array, minlength=classes), ROWS[split] // classes
    if len(bad := np.flatnonzero(counts != expected)):
        raise ValueError(f"{source}: {counts[bad[0]]} images of {FINE_NAMES[bad[0]]}, expected {expected}")


def _split(pixels: np.ndarray, labels: Sequence[int]) -> Split:
    images = rearrange(torch.from_numpy(pixels), "n h w c -> n c h w").contiguous()
    return Split(images, torch.tensor(labels, dtype=torch.int64))


def _decode(where: str, source: bytes | Path) -> np.ndarray:
    """uint8 (32, 32, 3) from a PNG. (Pillow and torchvision.io take the same time: 0.08 ms, threads gain nothing.)"""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=("PNG",)) as image:
            found = f"{image.mode} {image.width}x{image.height}"
            pixels = np.asarray(image) if found == f"RGB {SIDE}x{SIDE}" else None
    except Exception as error:  # whatever a decoder raises on bad bytes
        raise ValueError(f"{where}: not a readable PNG ({error})") from error
    if pixels is None:
        raise ValueError(f"{where}: an image of {found}, expected RGB {SIDE}x{SIDE}")
    return pixels


def _decode_all(images: Sequence[tuple[str, bytes | Path]], split: str) -> np.ndarray:
    """uint8 (N, 32, 32, 3) from (where, PNG) pairs, with a progress bar on terminals if it takes over two seconds."""
    from tqdm import tqdm

    pixels = np.empty((len(images), SIDE, SIDE, 3), dtype=np.uint8)
    bar = tqdm(images, desc=f"CIFAR-100 {split}", unit="img", delay=2, leave=False, disable=None)
    for row, (where, source) in enumerate(bar):
        pixels[row] = _decode(where, source)
    return pixels


def _find_parquet(folder: Path, split: str) -> list[Path]:
    return sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"cifar100/{split}-*.parquet"))


def _read_parquet(found: list[Path], split: str) -> Split:
    images, fine, coarse = [], [], []
    for path in found:
        table = _read_table(path)
        images += [(f"{path}: row {row}", png) for row, png in enumerate(table["bytes"].to_pylist())]
        fine += table["fine_label"].to_pylist()
        coarse += table["coarse_label"].to_pylist()
    source = ", ".join(map(str, found))
    _check_labels(fine, split, source)
    if wrong := [row for row, label in enumerate(fine) if coarse[row] != COARSE_OF_FINE[label]]:
        name, expected = FINE_NAMES[fine[wrong[0]]], COARSE_OF_FINE[fine[wrong[0]]]
        raise ValueError(f"{source}: row {wrong[0]} ({name}) has coarse label {coarse[wrong[0]]}, expected {expected}")
    return _split(_decode_all(images, split), fine)


PARQUET = {"img": "struct<bytes: binary, path: string>", "fine_label": "int64", "coarse_label": "int64"}


def _read_table(path: Path) -> Any:
    """A pyarrow table with the columns bytes, fine_label, coarse_label."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f'reading {path} needs pyarrow: pip install "recurrent-vit[train]"') from error

    try:
        schema = pq.read_schema(path)
        found = {name: str(schema.field(name).type) for name in schema.names}
        if not PARQUET.items() <= found.items():
            raise ValueError(f"{path}: columns {found}, expected {PARQUET}")
        table = pq.read_table(path, columns=list(PARQUET)).flatten()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file, truncated perhaps ({error})") from error
    table = table.rename_columns([name.removeprefix("img.") for name in table.column_names]).drop_columns(["path"])
    if missing := {name: table[name].null_count for name in table.column_names if table[name].null_count}:
        raise ValueError(f"{path}: missing values {missing}, expected none")
    return table


def _find_torchvision(folder: Path, split: str) -> list[Path]:
    inside = folder if folder.name == CIFAR100.base_folder else folder / CIFAR100.base_folder
    return [inside] if inside.is_dir() else []


def _read_torchvision(found: list[Path], split: str) -> Split:
    folder = found[0]
    try:
        dataset = CIFAR100(folder.parent, train=split == "train")
    except RuntimeError as error:
        files = [*CIFAR100.train_list, *CIFAR100.test_list, (CIFAR100.meta["filename"], CIFAR100.meta["md5"])]
        bad = [name for name, md5 in files if not check_integrity(folder / name, md5)]
        raise ValueError(
            f"{folder}: missing, or of another md5 sum than torchvision expects: {', '.join(bad)}. "
            "Delete the folder and fetch it again, with download=True"
        ) from error
    _check_labels(dataset.targets, split, folder)
    return _split(dataset.data, dataset.targets)


def _find_folders(folder: Path, split: str) -> list[Path]:
    return [folder / split] if (folder / split).is_dir() else []


def _read_folders(found: list[Path], split: str) -> Split:
    folder = found[0]
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    if names != set(FINE_NAMES):
        missing, foreign = sorted(set(FINE_NAMES) - names), sorted(names - set(FINE_NAMES))
        raise ValueError(
            f"{folder}: expected a folder for each of the {len(FINE_NAMES)} classes; "
            f"{len(missing)} missing {missing[:3]}, {len(foreign)} foreign {foreign[:3]}"
        )
    files = [(label, path) for label, name in enumerate(FINE_NAMES) for path in sorted((folder / name).glob("*.png"))]
    Random(0).shuffle(files)  # not class after class: in the other layouts the first images are of all classes too
    labels = [label for label, _ in files]
    _check_labels(labels, split, folder)
    return _split(_decode_all([(str(path), path) for _, path in files], split), labels)


class Layout(NamedTuple):
    """One way in which the set lies in a folder."""

    looks: str
    find: Callable[[Path, str], list[Path]]  # what of it is there: files or folders, or nothing
    read: Callable[[list[Path], str], Split]


LAYOUTS = (
    Layout("{split}-*.parquet or cifar100/{split}-*.parquet, as on the Hub", _find_parquet, _read_parquet),
    Layout("cifar-100-python/, torchvision's", _find_torchvision, _read_torchvision),
    Layout("{split}/<class name>/*.png, a folder for each class", _find_folders, _read_folders),
)
