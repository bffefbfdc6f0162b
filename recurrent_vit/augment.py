"""Augmentation of CIFAR-100's images: pure functions of batches, and the chance that they draw on.

Chance is drawn on the CPU, for a whole batch, from (seed, epoch, batch) alone, and applied afterwards: a resumed run,
another device, or one of several ranks sees the images that one uninterrupted process sees, to the bit. torch's global
generators are left as they were, and play no part.

Shapes: B images of a batch, H = W = 32 pixels, 3 channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

__all__ = [
    "FLIPS", "MEAN", "PURPOSES", "SIDE", "STD", "Augmentation", "Draws",
    "alternating_flip", "check_argument", "downsample", "generator", "mirror", "normalize", "seed_of", "shift",
]  # fmt: skip

MEAN = (0.5071, 0.4865, 0.4409)  # of the training images, per channel, on a scale of 0..1
STD = (0.2673, 0.2564, 0.2762)
SIDE = 32  # pixels


# ---- what is done to images -----------------------------------------------------------------------------------------


def normalize(images: Tensor) -> Tensor:
    """(x / 255 - MEAN) / STD, on the device of x.

    Args:
        images: uint8 (..., 3, H, W).

    Returns:
        float32 (..., 3, H, W).

    Raises:
        ValueError: images are not uint8 (they may have been normalised before).

    Example:
        >>> normalize(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
        tensor([1.8440, 2.0027, 2.0243])
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"images must be uint8, got {images.dtype}")
    return TF.normalize(TF.to_dtype(images, torch.float32, scale=True), MEAN, STD)


def downsample(images: Tensor, size: int) -> Tensor:
    """Shrink images to size x size, bilinearly, antialiased: for the resolution schedule (16, 20, 24 px).

    Args:
        images: floating point (B, 3, H, W).
        size: the new height and width; at H = W = size the images are returned as they are.

    Returns:
        (B, 3, size, size), of the same dtype.

    Raises:
        ValueError: images are not floating point, or size is not in 1..min(H, W).

    Example:
        >>> downsample(torch.ones(2, 3, 32, 32), 24).shape
        torch.Size([2, 3, 24, 24])
    """
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point (normalize them first), got {images.dtype}")
    height, width = images.shape[-2:]
    if not 1 <= size <= min(height, width):
        raise ValueError(f"size must be between 1 and {min(height, width)}, got {size}")
    if (height, width) == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Move each image by its own offset, reflecting at the border: a crop of the reflect-padded image.

    y[b, :, i, j] = x[b, :, r(i + offsets[b, 0]), r(j + offsets[b, 1])] with r the reflection into 0..H-1, 0..W-1.

    Args:
        images: (B, 3, H, W), any dtype.
        offsets: int64 (B, 2), rows and columns, each in 1-H..H-1; 0 leaves the image where it is.

    Returns:
        (B, 3, H, W).

    Example:
        >>> image = torch.tensor([1, 2, 3]).expand(1, 3, 3, 3)
        >>> shift(image, torch.tensor([[0, 1]]))[0, 0, 0]
        tensor([2, 3, 2])
    """
    height, width = images.shape[-2:]
    rows = _reflected(height, offsets[:, 0])
    columns = _reflected(width, offsets[:, 1])
    images = images.take_along_dim(rows[:, None, :, None], dim=2)
    return images.take_along_dim(columns[:, None, None, :], dim=3)


def mirror(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror the marked images, left to right.

    Args:
        images: (B, 3, H, W), any dtype.
        mirrored: bool (B,).

    Returns:
        (B, 3, H, W).

    Example:
        >>> mirror(torch.tensor([1, 2, 3]).expand(2, 1, 1, 3), torch.tensor([True, False])).flatten(1)
        tensor([[3, 2, 1],
                [1, 2, 3]])
    """
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def alternating_flip(indices: Tensor, epoch: int, seed: int = 0) -> Tensor:
    """Which images to mirror: a coin for each in epoch 0, then in every epoch the other side.

    Any two successive epochs show both sides of every image; independent coins show the same side again half of the
    time (Jordan 2024, https://arxiv.org/abs/2404.00498). The coin is a hash of (index, seed), so nothing is stored.

    Args:
        indices: int64 (B,), the images' places in their split.
        epoch: the number of the epoch, from 0.
        seed: of the coins.

    Returns:
        bool (B,).

    Example:
        >>> first, second, third = (alternating_flip(torch.arange(8), epoch) for epoch in range(3))
        >>> bool((first != second).all()), bool((first == third).all())
        (True, True)
    """
    word = 0xFFFFFFFF  # arithmetic modulo 2^32 in int64: a product that wraps at 2^64 has the right low 32 bits
    x = (indices ^ seed_of("flip", seed)) & word
    for down, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32, https://github.com/skeeto/hash-prospector
        x = ((x ^ (x >> down)) * factor) & word
    return (((x ^ (x >> 16)) + epoch) & 1).bool()


class Draws(NamedTuple):
    """What chance decided for each image of a batch."""

    offsets: Tensor  # int64 (B, 2): rows and columns to shift by
    mirrored: Tensor  # bool (B,)
    seeds: Tensor  # int64 (B,): for the torchvision transforms, which draw from torch's global generator

    def rows(self, part: slice) -> "Draws":
        """The draws for a part of the batch."""
        return Draws(*(column[part] for column in self))


FLIPS = ("random", "alternating", "none")


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied. The default is the usual crop with padding 4 and flip.

    The order: shift, mirror, RandAugment, erasing (all on uint8), normalisation, down-sampling.
    RandAugment (Cubuk 2019, https://arxiv.org/abs/1909.13719) and erasing (Zhong 2017,
    https://arxiv.org/abs/1708.04896) are torchvision's, applied to one image after the other.

    Args:
        padding: the largest shift, in pixels; 0 for none.
        flip: "random" (a coin for each image and epoch), "alternating" (:func:`alternating_flip`) or "none".
        rand_ops: operations of RandAugment for each image; 0 for none.
        rand_magnitude: their magnitude, 0..30.
        erase: probability that a rectangle is painted over in the mean colour; 0 for never.
        size: down-sample to size x size; None to keep the size.

    Raises:
        ValueError: a value that is not one of these.

    Example:
        >>> augmentation = Augmentation(padding=2, flip="alternating", size=16)
        >>> images = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
        >>> draws = augmentation.draw(torch.arange(5), epoch=3, batch=0, seed=0)
        >>> augmentation(images, draws).shape
        torch.Size([5, 3, 16, 16])
    """

    padding: int = 4
    flip: str = "random"
    rand_ops: int = 0
    rand_magnitude: int = 9
    erase: float = 0.0
    size: int | None = None

    def __post_init__(self):
        check_argument("padding", self.padding, 0 <= self.padding < SIDE, f"0..{SIDE - 1}")
        check_argument("flip", self.flip, self.flip in FLIPS, f"one of {', '.join(FLIPS)}")
        check_argument("rand_ops", self.rand_ops, self.rand_ops >= 0, ">= 0")
        check_argument("rand_magnitude", self.rand_magnitude, 0 <= self.rand_magnitude <= 30, "0..30")
        check_argument("erase", self.erase, 0 <= self.erase <= 1, "a probability, 0..1")
        check_argument("size", self.size, self.size is None or self.size >= 1, ">= 1, or None")

    def draw(self, indices: Tensor, *, epoch: int, batch: int, seed: int) -> Draws:
        """Draw for a whole batch, from (seed, epoch, batch) and, for alternating flips, the indices.

        Args:
            indices: int64 (B,), on the CPU.
            epoch: its number, from 0.
            batch: its number in the epoch, from 0.
            seed: of the run.

        Returns:
            The :class:`Draws`, on the CPU whatever the device of the images.
        """
        count, chance = len(indices), generator("augment", seed, epoch, batch)
        offsets = torch.randint(-self.padding, self.padding + 1, (count, 2), generator=chance)
        coins = torch.randint(2, (count,), generator=chance).bool()
        seeds = torch.randint(2**62, (count,), generator=chance)
        if self.flip == "alternating":
            coins = alternating_flip(indices, epoch, seed)
        return Draws(offsets, coins & (self.flip != "none"), seeds)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Augment and normalise.

        Args:
            images: uint8 (B, 3, H, W).
            draws: for these B images.

        Returns:
            float32 (B, 3, size, size), on the device of the images.
        """
        images = shift(images, draws.offsets.to(images.device))
        images = mirror(images, draws.mirrored.to(images.device))
        if self.rand_ops or self.erase:
            images = _each(self._transform(), images, draws.seeds)
        images = normalize(images)
        return images if self.size is None else downsample(images, self.size)

    def _transform(self) -> v2.Transform:
        mean_colour = [round(255 * value) for value in MEAN]
        return v2.Compose([
            v2.RandAugment(self.rand_ops, self.rand_magnitude, fill=mean_colour),
            v2.RandomErasing(self.erase, value=mean_colour),
        ])  # fmt: skip


def _reflected(length: int, offsets: Tensor) -> Tensor:
    """(B, length): the places offset .. offset + length - 1, reflected into 0..length-1 (borders are not repeated)."""
    places = (torch.arange(length, device=offsets.device) + offsets[:, None]).abs()
    return (length - 1) - ((length - 1) - places).abs()


def _each(transform: Callable[[Tensor], Tensor], images: Tensor, seeds: Tensor) -> Tensor:
    """Apply a torchvision transform to each image under its own seed, leaving the global generator as it was."""
    if not len(images):
        return images
    done = []
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(images, seeds.tolist(), strict=True):
            # not torch.manual_seed, which would reseed the GPUs too, and with them dropout
            torch.default_generator.manual_seed(seed)
            done.append(transform(image))
    return torch.stack(done)


# ---- chance ----------------------------------------------------------------------------------------------------------

PURPOSES = ("held_out", "order", "augment", "flip")  # each its own streams, so that equal seeds don't correlate


def seed_of(purpose: str, seed: int, epoch: int = 0, batch: int = 0) -> int:
    """A 32-bit seed. (A CPU generator of torch uses no more of its seed than that.)"""
    for name, value in (("seed", seed), ("epoch", epoch), ("batch", batch)):
        check_argument(name, value, 0 <= value < 2**32, "0..2^32-1")
    key = (PURPOSES.index(purpose), seed, epoch, batch)
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def generator(purpose: str, *key: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(purpose, *key))


def check_argument(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
