"""The checkpoints that go with the package: which there are, where their files come from, and what is checked of them.

    >>> for row in checkpoints():
    ...     assert row.path.stat().st_size == row.bytes

A checkpoint is a row of `checkpoints.json` and a folder `hub/NAME.TAG` with its model.safetensors, which the wheel
carries: `timm.create_model(NAME, pretrained=True)` makes no request. What is notable:

- A tag never changes its weights. Every file that a row pins is checked against its size and sha256 before it is
  opened, wherever it comes from; a cached download that fails is fetched once more, then refused.
- Only safetensors are read, never a pickle that came from elsewhere. Before a file that nobody vouches for is loaded,
  its header is compared with the model (`checks`): a hostile one costs neither time nor memory.
- Caches, tokens, proxies, mirrors and offline mode are those of huggingface_hub. For `hf-hub:` names timm asks for
  config.json before anything of ours runs, with the client's own patience and errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub import constants
from timm.data import create_transform, resolve_data_config
from timm.models import PretrainedCfg
from torch import Tensor, nn

__all__ = [
    "FILE", "Checkpoint", "checkpoints", "find", "first_line", "golden_images", "golden_logits", "locate", "sha256",
    "verify",
]  # fmt: skip

PACKAGE = Path(__file__).parent
MANIFEST = "checkpoints.json"
FILE = "model.safetensors"
GOLDEN_TOLERANCE = 1e-4
REQUEST_SECONDS, DEADLINE_SECONDS = 8.0, 12.0  # of a connection or an answer; of all that a name may try


@dataclass(frozen=True)
class Checkpoint:
    """A row of the manifest: weights, what they are, and how good.

    Args:
        name: Of the architecture, for `timm.create_model`.
        tag: Of the weights: `timm.create_model(f"{name}.{tag}", pretrained=True)`.
        sha256: Of model.safetensors, 64 hexadecimal digits.
        bytes: Its size.
        dtype: Of all tensors.
        parameters: Their number of elements.
        license: As an SPDX identifier.
        images: How many training images of CIFAR-100 it was trained on.
        recipe: Name of the recipe.
        precision: Of the run, "fp32" or "bf16" (autocast over float32 weights).
        seed: Of the run.
        pflop: Compute of the run in units of 1e15 FLOP.
        seconds: Its time.
        hardware: What ran it.
        versions: Of the software.
        date: Its last day, as YYYY-MM-DD.
        metrics: On the 10,000 test images, after the trained number of steps: horizon, top1, top1_stderr, top5
            (fractions), loss (nats), count.
        sweep: For numbers of steps, as text: top1, and non_finite, the images whose logits are not all finite.
        golden: Logits for `golden_images`, separated by spaces.
        model_kwargs: Arguments of `timm.create_model` beyond the name; a registered checkpoint has none.
        repo: Repository on the Hub, "ORG/NAME"; empty if there is none.
        commit: Its commit, 40 hexadecimal digits; empty until published.
        command: That made it; empty if it was `recurrent-vit train`, with the options that follow from the row.
        same_as: Another checkpoint, as NAME.TAG, whose weights these are, since both names are the same function; empty
            if it has a run of its own.
    """

    name: str
    tag: str
    sha256: str
    bytes: int
    dtype: str
    parameters: int
    license: str
    images: int
    recipe: str
    precision: str
    seed: int
    pflop: float
    seconds: float
    hardware: dict[str, Any]
    versions: dict[str, str]
    date: str
    metrics: dict[str, float]
    sweep: dict[str, dict[str, float]]
    golden: str = field(repr=False)
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    repo: str = ""
    commit: str = ""
    command: str = ""
    same_as: str = ""

    @property
    def id(self) -> str:
        """NAME.TAG, the name of its folder and for `timm.create_model`."""
        return f"{self.name}.{self.tag}"

    @property
    def trained_on(self) -> str:
        """The data, in words."""
        return f"CIFAR-100, {self.images:,} training images"

    @property
    def path(self) -> Path:
        """Its file: in an installed package, or in the checkout that the package is used from."""
        bundled = PACKAGE / "hub" / self.id / FILE
        return bundled if bundled.exists() else PACKAGE.parent / "hub" / self.id / FILE

    @property
    def meta(self) -> dict[str, Any]:
        """The row as a plain dictionary."""
        return asdict(self)

    def transforms(self, **kwargs: Any) -> Callable[[Any], Tensor]:
        """The transform from a PIL image to the model's input (3, 32, 32).

        Args:
            kwargs: Arguments of `timm.data.create_transform`, such as `is_training=True`.

        Example:
            >>> from PIL import Image
            >>> rows = checkpoints()
            >>> all(row.transforms()(Image.new("RGB", (50, 40))).shape == (3, 32, 32) for row in rows)
            True
        """
        cfg: Any = timm.get_pretrained_cfg(self.id)
        config = resolve_data_config(pretrained_cfg=cfg.to_dict())
        transform: Callable[[Any], Tensor] = create_transform(**{**config, **kwargs})
        return transform


def checkpoints(name: str | None = None) -> list[Checkpoint]:
    """The checkpoints that go with the package, in the order of the manifest.

    Args:
        name: Those of one architecture only.

    Example:
        >>> [row.id for row in checkpoints("bvit")]
        ['bvit.short_c100']
    """
    return [row for row in _manifest() if name in (None, row.name)]


@cache
def _manifest() -> tuple[Checkpoint, ...]:
    text = resources.files(__package__).joinpath(MANIFEST).read_text(encoding="utf-8")
    return tuple(Checkpoint(**row) for row in json.loads(text))


def find(text: str) -> Checkpoint:
    """The checkpoint NAME.TAG, or the first of NAME.

    Raises:
        ValueError: There is none; says which there are.
    """
    for row in checkpoints():
        if text in (row.id, row.name):
            return row
    raise ValueError(f"{text!r} has no checkpoint; there are {', '.join(row.id for row in checkpoints()) or 'none'}")


# ---- from a configuration to a file ----------------------------------------------------------------------------------


def locate(cfg: PretrainedCfg, cache_dir: str | os.PathLike | None = None) -> tuple[Path | None, bool, dict[str, Any]]:
    """Find the file that timm is about to load, and check what is known of it.

    Args:
        cfg: The resolved configuration, with its source.
        cache_dir: As in `timm.create_model`.

    Returns:
        (file, whether its sha256 is the one of a row, entries that make timm load just this file). The file is None
        where there is none to look at before timm does: a state dict in memory, or a checkpoint of the user's own.

    Raises:
        ValueError: The file isn't the one that is pinned, or no safetensors file.
        OSError: There is no file, or it cannot be downloaded.
    """
    if cfg.source == "local-dir":
        return _in_folder(Path(str(cfg.file)))
    if cfg.source != "hf-hub" and cfg.state_dict:
        return None, False, {}
    if cfg.source != "hf-hub" and cfg.file:
        return _on_disk(Path(cfg.file))
    if cfg.hf_hub_id:
        return _on_hub(cfg, cache_dir)
    if cfg.url:
        raise ValueError(
            f"pretrained_cfg has url={cfg.url!r}: weights are read from safetensors files only; download it, and give "
            "its path as file"
        )
    return None, False, {}  # no source: timm says that there are no weights


def _in_folder(folder: Path) -> tuple[Path, bool, dict[str, Any]]:
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"local-dir:{folder} has no {FILE}; other formats are not read")
    row = next((row for row in checkpoints() if row.path.is_file() and row.path.samefile(file)), None)
    if row is not None:
        _check_package(file, row)
    return file, row is not None, {}


def _on_disk(path: Path) -> tuple[Path | None, bool, dict[str, Any]]:
    path = path.expanduser()
    row = next((row for row in checkpoints() if path == row.path), None)
    if row is not None:
        _check_package(path, row)
    elif not path.is_file():
        raise FileNotFoundError(f"pretrained_cfg has file={str(path)!r}, which is not a file")
    return (path if path.suffix == ".safetensors" else None), row is not None, {"file": str(path)}


def _check_package(path: Path, row: Checkpoint) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the installation is incomplete; reinstall recurrent-vit")
    if problem := _differs(path, row):
        raise ValueError(f"{problem}; the installation is damaged: reinstall recurrent-vit")


def _differs(path: Path, row: Checkpoint) -> str:
    """What is wrong with a file that should be the row's; "" if nothing."""
    size = path.stat().st_size
    if size != row.bytes:
        return f"{path} has {size:,} bytes, the checkpoint {row.id} has {row.bytes:,}"
    found = sha256(path)
    return "" if found == row.sha256 else f"{path} has sha256 {found}, the checkpoint {row.id} has {row.sha256}"


def sha256(path: Path) -> str:
    """The sha256 of a file's content, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(2**18):  # stays in the processor's cache
            digest.update(part)
    return digest.hexdigest()


# ---- from the Hub ----------------------------------------------------------------------------------------------------


def _on_hub(cfg: PretrainedCfg, cache_dir: str | os.PathLike | None) -> tuple[Path, bool, dict[str, Any]]:
    repo, _, revision = str(cfg.hf_hub_id).partition("@")
    filename = cfg.hf_hub_filename or FILE
    if not filename.endswith(".safetensors") or Path(filename).name != filename:
        raise ValueError(f"pretrained_cfg has hf_hub_filename={filename!r}; give the name of a .safetensors file")
    pinned = [row for row in checkpoints() if row.commit and row.repo == repo and filename == FILE]
    row = next((row for row in pinned if revision in ("", "main", row.commit)), None)
    path = _fetch(repo, filename, revision, cache_dir, row)
    if problem := _damaged(path, row):
        path = _fetch(repo, filename, revision, cache_dir, row, problem)
        if problem := _damaged(path, row):
            advice = f"ask for the weights that are pinned, hf-hub:{repo}@{row.commit}" if row else f"remove {path}"
            raise ValueError(f"{repo} on the Hub, downloaded twice: {problem}; {advice}")
    commit = path.parent.name if path.parent.parent.name == "snapshots" else revision
    return path, row is not None, {"hf_hub_id": f"{repo}@{commit}" if commit else repo, "url": None}


def _damaged(path: Path, row: Checkpoint | None) -> str:
    """What is wrong with a file of the cache; "" if nothing, or if nobody said what it should be."""
    if row is not None:
        return _differs(path, row)
    blob = path.resolve().name  # the Hub names large files by their sha256, and the cache keeps that name
    if not re.fullmatch(r"[0-9a-f]{64}", blob):
        return ""
    found = sha256(path)
    return "" if found == blob else f"{path} has sha256 {found}, the Hub said {blob}"


def _fetch(repo: str, filename: str, revision: str, cache_dir: Any, row: Checkpoint | None, problem: str = "") -> Path:
    """The file from the cache, if that has the commit asked for, else from the Hub; from there in any case if what the
    cache has is a problem."""
    where: dict[str, Any] = {"repo_id": repo, "filename": filename, "cache_dir": cache_dir}
    if re.fullmatch(r"[0-9a-f]{40}", revision) and not problem:
        cached = huggingface_hub.try_to_load_from_cache(**where, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    where["revision"] = revision or None
    url = huggingface_hub.hf_hub_url(repo, filename, revision=revision or None)
    try:
        _knock(url)
    except Exception as error:  # the client's classes of errors have changed twice
        if not problem and getattr(getattr(error, "response", None), "status_code", 0) not in (401, 403, 404):
            with contextlib.suppress(Exception):  # unreachable: what the cache has of that branch will do
                return Path(huggingface_hub.hf_hub_download(**where, local_files_only=True))
        raise _unreachable(url, repo, row, error, problem) from error
    try:
        return Path(huggingface_hub.hf_hub_download(**where, force_download=bool(problem)))
    except Exception as error:
        raise _unreachable(url, repo, row, error, problem) from error


def _knock(url: str) -> None:
    """Ask the Hub about the file, once and with a deadline: the client alone would try every address, six times."""
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(huggingface_hub.get_hf_file_metadata(url, timeout=REQUEST_SECONDS))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()  # one that is stuck doesn't keep Python from ending
    try:
        answer = answers.get(timeout=DEADLINE_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer within {DEADLINE_SECONDS:g} seconds") from None
    if isinstance(answer, Exception):
        raise answer


def _unreachable(url: str, repo: str, row: Checkpoint | None, error: Exception, problem: str) -> OSError:
    size = f" ({row.bytes:,} bytes)" if row else ""
    names = ", ".join(row.id for row in checkpoints())
    return OSError(
        f"{repo}: {f'{problem}; ' if problem else ''}{url}{size} could not be downloaded: {first_line(error)}. Without "
        f"the Hub: use a name whose weights come with the package ({names}), or copy the repository's files into a "
        "folder and load local-dir:FOLDER"
    )


def first_line(error: Exception) -> str:
    """The class of an error, and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


# ---- golden logits ---------------------------------------------------------------------------------------------------


def golden_images(size: tuple[int, int, int] = (3, 32, 32)) -> Tensor:
    """One image (1, *size), float32 in -1..1, made of whole numbers alone: the same with every version of everything.

    Example:
        >>> golden_images()[0, :, 0, :3].tolist()
        [[-1.0, -0.2890625, 0.421875], [-0.5390625, 0.171875, 0.8828125], [-0.078125, 0.6328125, -0.65625]]
    """
    channels, rows, columns = (torch.arange(n) for n in size)
    c, i, j = channels[:, None, None], rows[None, :, None], columns[None, None, :]
    return ((59 * c + 37 * i + 91 * j + i * j) % 256 / 128 - 1)[None]


@torch.inference_mode()
def golden_logits(model: nn.Module) -> Tensor:
    """The logits (num_classes,) for `golden_images`, on the CPU."""
    logits: Tensor = model.eval()(golden_images())[0]
    return logits


def verify(row: Checkpoint) -> str:
    """Check a checkpoint from end to end: the file's size and sum, what timm builds of it, and its logits.

    Returns:
        What was found, in one line.

    Raises:
        ValueError: Something differs; says what, and by how much.
        OSError: The file is missing.
    """
    model = timm.create_model(row.id, pretrained=True)
    expected = torch.tensor([float(value) for value in row.golden.split()])
    deviation = (golden_logits(model) - expected).abs().max().item()
    if not deviation <= GOLDEN_TOLERANCE:
        raise ValueError(
            f"{row.id}: the logits differ from the recorded ones by {deviation:.2g}, more than {GOLDEN_TOLERANCE:g}"
        )
    return f"sha256 {row.sha256[:12]}, {row.bytes:,} bytes, logits within {deviation:.1g}"
