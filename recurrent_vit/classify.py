"""What a model sees in any picture, and how its answer forms over the steps.

    >>> import timm, recurrent_vit
    >>> model = timm.create_model("bvit", horizon=3)
    >>> [answer] = classify(model, [open_image(samples()[0])])
    >>> answer.probabilities.shape, len(answer.top), len(answer.leaders)
    (torch.Size([3, 100]), 5, 3)

What is notable:

- Whatever Pillow opens becomes RGB of 8 bits, upright, its first frame: :func:`open_image` says how. What it does not
  open, or only in part, is one error that names the file and the reason.
- Of a picture that is not square the model sees the largest square in its centre; the rest is cut off, nothing is
  distorted or padded. Cutting comes before resizing, so that a picture of one line costs no memory.
- One pass gives the probabilities after every step.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from . import evaluate, plots
from .cifar import FINE_NAMES
from .limits import LIMITS, bounded_horizon, bounded_number
from .model import RecurrentVisionTransformer, check_model

__all__ = [
    "ASCII", "UNICODE", "Answer", "Glyphs", "bar", "centre_square", "check_plot", "classify", "curve", "glyphs_for",
    "labels", "open_image", "plot", "samples", "text", "transform",
]  # fmt: skip

SAMPLES = Path(__file__).parent / "samples"
BACKGROUND = "white"  # what transparent pictures are mostly made for: paper, and the page of a browser
CLOSED = ("EPS", "IPTC")  # a program, which Pillow would have Ghostscript run; and what may hold one
MAX_DRAWN = 50  # pictures in one plot, which grows with each


def samples() -> list[Path]:
    """The photographs that come with the package, each named after its class; samples/README.md says whose they are."""
    return sorted(SAMPLES.glob("*.jpg"))


# ---- from a file to a picture ----------------------------------------------------------------------------------------


def open_image(path: str | os.PathLike) -> Image.Image:
    """Open any picture that Pillow reads, as an RGB image of 8 bits per channel.

    - EXIF's orientation is applied; one that cannot be read turns nothing.
    - Transparent parts (alpha channel, transparent colour) are laid over white.
    - Grey of 16 or 32 bits: 0..65535 becomes 0..255; if there are values beyond, least..greatest does.
    - Grey in floating point: the first of 0..1, 0..255 and 0..65535 that holds all values becomes 0..255, else
      least..greatest; what isn't finite is black, or white for +infinity.
    - Of an animation or of several pages the first is taken.
    - CMYK and other colours are converted as Pillow does, without their profiles.
    - EPS is not opened: it is a program. Nor is IPTC, which may hold it.

    Args:
        path: The file.

    Raises:
        OSError: There is no such file, it is a folder, or it may not be read.
        ValueError: It is empty, no picture, damaged or cut short, or has more than `PIL.Image.MAX_IMAGE_PIXELS` pixels
            (where Pillow itself only warns, up to twice as many).

    Both messages are one line that begins with the path.
    """
    path = Path(path)
    try:
        if path.is_file() and not path.stat().st_size:
            raise ValueError("the file is empty")
        with path.open("rb") as file:
            return _decode(file)
    except OSError as error:
        raise OSError(f"{_printable(path)}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{_printable(path)}: {error}") from error


def centre_square(image: Image.Image) -> Image.Image:
    """The largest square in the centre.

    Example:
        >>> centre_square(Image.new("RGB", (60, 40))).size
        (40, 40)
    """
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _decode(file: BinaryIO) -> Image.Image:
    """The first frame, upright, as RGB; ValueError, whatever is wrong with the content."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd metadata: the picture is what counts
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file, formats=_formats()) as picture:
                picture.load()
                upright: Image.Image = picture
                with contextlib.suppress(Exception):  # EXIF is often damaged where the picture isn't
                    upright = ImageOps.exif_transpose(picture)
                return _rgb(upright)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(f"refused: it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from error
        except UnidentifiedImageError as error:
            raise ValueError("not a picture of a format that Pillow reads") from error
        except _NoPictureError as error:
            raise ValueError(str(error)) from error
        except Exception as error:  # whatever a decoder raises on bad bytes
            reason = _printable(error) or type(error).__name__
            raise ValueError(f"the picture cannot be read, it is damaged or cut short perhaps ({reason})") from error


def _formats() -> list[str]:
    Image.init()
    return [name for name in Image.ID if name not in CLOSED]


class _NoPictureError(ValueError):
    """There is nothing wrong with the file, and nothing to see in it."""


def _rgb(picture: Image.Image) -> Image.Image:
    if not all(picture.size):
        raise _NoPictureError("it has no pixels")
    if not _is_transparency(picture.info.get("transparency")):
        picture.info.pop("transparency", None)  # a text of that name, say
    if picture.mode == "F" or picture.mode.startswith("I"):
        picture = _to_8_bits(picture)
    if picture.mode in ("P", "PA", "LA", "RGBA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, BACKGROUND), picture)
    return picture.convert("RGB")


def _is_transparency(value: object) -> bool:
    """Whether it is a colour, an index of the palette, or the palette's opacities."""
    return isinstance(value, (int, bytes)) or (isinstance(value, tuple) and all(isinstance(v, int) for v in value))


def _to_8_bits(picture: Image.Image) -> Image.Image:
    """Grey of 8 bits, mode L or, where a value means transparent, LA; from modes I;16, I and F."""
    exact = np.float32 if picture.mode.startswith("I;16") else np.float64
    values = np.asarray(picture).astype(exact)  # large, maybe: what follows works in place
    finite = np.isfinite(values)
    if not finite.any():
        raise _NoPictureError("none of its values is finite")
    least, greatest = np.min(values, where=finite, initial=np.inf), np.max(values, where=finite, initial=-np.inf)
    low, high = _range_of(float(least), float(greatest), (1, 255, 65535) if picture.mode == "F" else (65535,))
    transparent = picture.info.get("transparency")
    opacity = np.where(values == transparent, 0, 255).astype(np.uint8) if isinstance(transparent, int) else None
    np.nan_to_num(values, copy=False, nan=low, posinf=high, neginf=low)
    values -= low
    values *= 255 / (high - low)
    grey = Image.fromarray(values.round(out=values).astype(np.uint8))
    if opacity is not None:
        grey.putalpha(Image.fromarray(opacity))
    return grey


def _range_of(least: float, greatest: float, full_scales: Sequence[int]) -> tuple[float, float]:
    """The values that mean black and white."""
    for full in full_scales:
        if least >= 0 and greatest <= full:
            return 0, full
    return least, greatest if greatest > least else least + 1


def _printable(what: object) -> str:
    """As text on one line: names of files may hold line breaks and codes that a terminal obeys."""
    shown = str(what)
    return shown if shown.isprintable() else repr(shown)


# ---- from a picture to an answer -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model says of one picture.

    Args:
        probabilities: (H, classes), after each of the H steps, on the CPU.
        labels: Names of the classes.
        best: Indices of the most probable classes after the last step, the first one first.
    """

    probabilities: Tensor
    labels: tuple[str, ...]
    best: tuple[int, ...]

    @property
    def top(self) -> list[tuple[str, float]]:
        """(class, probability) of the most probable classes after the last step."""
        return [(self.labels[index], float(self.probabilities[-1, index])) for index in self.best]

    @property
    def leaders(self) -> list[tuple[str, float]]:
        """(class, probability) of the most probable class after each step."""
        values, indices = self.probabilities.max(-1)
        return [(self.labels[index], value) for index, value in zip(indices.tolist(), values.tolist())]

    @property
    def since(self) -> int:
        """The step, counted from 1, since which the most probable class has been the final one."""
        winners = self.probabilities.argmax(-1)
        others = (winners != winners[-1]).nonzero()
        return int(others[-1]) + 2 if len(others) else 1


def classify(model: nn.Module, images: Sequence[Image.Image], horizon: int | None = None, top: int = 5) -> list[Answer]:
    """Classify pictures, in one batch and one pass, on the model's device.

    Args:
        model: A `RecurrentVisionTransformer` that takes RGB. It runs in evaluation mode, and is left as it was (so of
            several threads with one model in training mode, one may see the mode of another).
        images: RGB pictures of any size (:func:`open_image`).
        horizon: Number of steps; default: the model's own.
        top: How many of the most probable classes to name, if there are so many.

    Returns:
        An answer for each picture.

    Raises:
        ValueError: The model or an argument doesn't fit, or the state or a logit is not finite after some step.
    """
    model = _checked(model)
    top = bounded_number("top", top, 1, LIMITS["num_classes"], whole=True)
    steps = bounded_horizon(model.horizon if horizon is None else horizon, model.depth)
    if not images:
        return []
    prepare, names = transform(model), labels(model)
    batch = torch.stack([prepare(image) for image in images]).to(evaluate.first_parameter(model))
    with evaluate.inference(model, "fp32"):
        logits = evaluate.logits_after(model, batch, list(range(1, steps + 1))).float().cpu()
    finite = logits.isfinite().all(-1).all(-1)
    if not finite.all():
        first = int(finite.long().argmin()) + 1
        raise ValueError(f"state or logits are not finite after step {first}; give fewer steps")
    probabilities = logits.softmax(-1)
    best = probabilities[-1].topk(min(top, len(names))).indices.tolist()
    return [Answer(probabilities[:, i].clone(), names, tuple(row)) for i, row in enumerate(best)]


def transform(model: RecurrentVisionTransformer) -> Callable[[Image.Image], Tensor]:
    """From an RGB picture to the model's input, float32 (3, H, W): timm's transform of the picture's central square.

    timm resizes to the model's size by the interpolation of its `pretrained_cfg`, which Pillow antialiases, crops by
    crop_pct, and normalises.

    Example:
        >>> import timm, recurrent_vit
        >>> transform(timm.create_model("bvit"))(Image.new("RGB", (60, 40))).shape
        torch.Size([3, 32, 32])
    """
    config = resolve_data_config({}, model=model)
    inner = create_transform(**{**config, "input_size": (3, *model.patch_embed.img_size)})
    return lambda image: inner(centre_square(image))


def labels(model: nn.Module) -> tuple[str, ...]:
    """Names of the model's classes: those of its configuration, or else, of a hundred, CIFAR-100's, or numbers."""
    classes: int = getattr(model, "num_classes", 0)
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    if isinstance(names, (list, tuple)) and len(names) == classes:
        return tuple(map(_printable, names))
    return FINE_NAMES if classes == len(FINE_NAMES) else tuple(f"class {index}" for index in range(classes))


def _checked(model: nn.Module) -> RecurrentVisionTransformer:
    model = check_model(model)
    if model.in_chans != 3 or model.num_classes < 1:
        raise ValueError(
            f"model has in_chans={model.in_chans} and num_classes={model.num_classes}; 3 and 1 or more are needed"
        )
    return model


# ---- as text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Glyphs:
    """What bars are made of.

    Args:
        bar: Parts of a cell, from the least to the whole, filled from the left.
        levels: Heights of a cell, from the lowest.
    """

    bar: str
    levels: str


UNICODE = Glyphs("▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "_.-:=+*#")
BAR_CELLS = 20
CURVE_CELLS = 24


def glyphs_for(encoding: str | None) -> Glyphs:
    """Unicode's blocks, or ASCII where the encoding has not all of them.

    Example:
        >>> glyphs_for("utf-8") == UNICODE, glyphs_for("latin-1") == ASCII
        (True, True)
    """
    try:
        (UNICODE.bar + UNICODE.levels).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def bar(fraction: float, glyphs: Glyphs = UNICODE, cells: int = BAR_CELLS) -> str:
    """A fraction of a bar of so many cells.

    Example:
        >>> bar(0.53, cells=5), bar(0.53, ASCII, cells=5)
        ('██▋', '###')
    """
    full, rest = divmod(round(fraction * cells * len(glyphs.bar)), len(glyphs.bar))
    return glyphs.bar[-1] * full + glyphs.bar[rest - 1 : rest]


def curve(fractions: Sequence[float], glyphs: Glyphs = UNICODE, cells: int = CURVE_CELLS) -> str:
    """A cell for each fraction; of more than there are cells, so many at equal distances, the first and last included.

    Example:
        >>> curve([0, 0.3, 0.6, 1]), curve([0, 0.3, 0.6, 1], ASCII)
        ('▁▃▅█', '_-=#')
    """
    count, levels = len(fractions), glyphs.levels
    shown = [fractions[round(i * (count - 1) / (cells - 1))] for i in range(cells)] if count > cells else fractions
    return "".join(levels[min(int(fraction * len(levels)), len(levels) - 1)] for fraction in shown)


def text(answer: Answer, name: object, *, all_steps: bool = False, glyphs: Glyphs = UNICODE) -> str:
    """An answer for people: the final top classes, each with its bar and how its probability went over the steps.

    Args:
        answer: From :func:`classify`.
        name: Of the picture.
        all_steps: Add a line for each step, with the class that was the most probable.
        glyphs: What bars are made of.

    Example:
        >>> answer = Answer(torch.tensor([[0.75, 0.25], [0.125, 0.875]]), ("cup", "bowl"), (1, 0))
        >>> print(text(answer, "x.png", all_steps=True, glyphs=ASCII))
        x.png: bowl since step 2
          class  step 2                         steps 1 to 2
          bowl    87.5 %  ##################    -#
          cup     12.5 %  ##                    *.
          step 1  cup     75.0 %  ###############
          step 2  bowl    87.5 %  ##################
    """
    steps = len(answer.probabilities)
    named = answer.top + (answer.leaders if all_steps else [])
    width = max(len("class"), *(len(label) for label, _ in named))
    lines = [
        f"{_printable(name)}: {answer.top[0][0]} since step {answer.since}",
        f"  {'class':{width}}  {f'step {steps}':{BAR_CELLS + 9}}  steps 1 to {steps}",
    ]
    for index, (label, probability) in zip(answer.best, answer.top):
        course = curve(answer.probabilities[:, index].tolist(), glyphs)
        lines.append(f"  {label:{width}}  {_share(probability, glyphs):{BAR_CELLS + 9}}  {course}")
    for step, (label, probability) in enumerate(answer.leaders if all_steps else [], start=1):
        lines.append(f"  step {step:{len(str(steps))}}  {label:{width}}  {_share(probability, glyphs)}")
    return "\n".join(lines)


def _share(probability: float, glyphs: Glyphs) -> str:
    return f"{100 * probability:5.1f} %  {bar(probability, glyphs)}".rstrip()


# ---- as a picture ----------------------------------------------------------------------------------------------------


def check_plot(path: str | os.PathLike, images: Sequence[Path]) -> None:
    """Whether :func:`plot` could draw these pictures into that file: to be asked before they are classified.

    Raises:
        ValueError: It is one of the pictures, there are too many of them, or its name doesn't end in .pdf, .png, .svg.
        FileNotFoundError: Its folder doesn't exist.
        ImportError: matplotlib isn't installed.
    """
    plots.check_plot(path)
    if os.path.realpath(path) in {os.path.realpath(image) for image in images}:
        raise ValueError(f"plot {str(path)!r} is one of the pictures, which it would replace")
    if len(images) > MAX_DRAWN:
        raise ValueError(f"plot takes at most {MAX_DRAWN} pictures, not {len(images)}")


def plot(rows: Sequence[tuple[object, Image.Image, Answer]], path: str | os.PathLike, title: str = "") -> None:
    """Draw each picture beside the probabilities of its final top classes against steps. The file appears whole or not.

    Args:
        rows: (name, picture, answer) of each.
        path: A .pdf, .png or .svg file; an existing one is replaced.
        title: Written above.

    Raises:
        ValueError: There are no rows.
        OSError: The file could not be written; an existing one is as it was.
        ImportError: matplotlib isn't installed.
    """
    if not rows:
        raise ValueError("rows is empty: there is nothing to draw")
    figure = _draw(rows, title)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # in a file's name, that the font hasn't
        plots.save_figure(figure, path, dpi=150)


def _draw(rows: Sequence[tuple[object, Image.Image, Answer]], title: str) -> Any:
    figure = plots.import_figure()(figsize=(8, 2.4 * len(rows) + 0.4), layout="constrained")
    figure.suptitle(_printable(title), parse_math=False)
    panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(1, 2))
    for (name, image, answer), (left, right) in zip(rows, panels):
        left.imshow(centre_square(image))
        left.set_axis_off()
        left.set_title(_printable(name), fontsize="medium", parse_math=False)
        _draw_answer(right, answer)
    return figure


def _draw_answer(axes: Any, answer: Answer) -> None:
    steps = range(1, len(answer.probabilities) + 1)
    for index, (label, probability) in zip(answer.best, answer.top):
        course = answer.probabilities[:, index].tolist()
        axes.plot(steps, course, "o-", markersize=3, label=f"{label}, {100 * probability:.1f} %")
    axes.set(xlabel="steps", ylabel="probability", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
