"""Repository folders for the Hugging Face Hub: made from a training run (`stage`), and uploaded (`push`).

    hub/bvit.short_c100/config.json         architecture and preprocessing, for timm and transformers
    hub/bvit.short_c100/model.safetensors   the weights
    hub/bvit.short_c100/README.md           the card

All three are functions of the run: staging it again gives the same bytes. Configuration and card are functions of the
checkpoint's row alone (`weights.Checkpoint`), so what they say is what the manifest says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors.torch
import timm

from . import runs, weights
from .card import card
from .cifar import FINE_NAMES, ROWS
from .files import write_atomically
from .limits import FIELDS, PLAIN
from .model import RecurrentVisionTransformer
from .weights import FILE, Checkpoint
from .zoo import VARIANTS

__all__ = ["CARD", "CONFIG", "FILES", "config", "push", "stage"]

CONFIG, CARD = "config.json", "README.md"
FILES = (CONFIG, FILE, CARD)
RESULTS = "test.jsonl"


# ---- staging ---------------------------------------------------------------------------------------------------------


def stage(
    run: str | os.PathLike,
    name: str,
    tag: str,
    hub: str | os.PathLike = "hub",
    repo_id: str = "",
    results: str | os.PathLike | None = None,
) -> Checkpoint:
    """Make the repository folder `hub`/NAME.TAG of a finished run, and nothing else.

    Args:
        run: Folder of the run.
        name: Of the architecture: that of the run, or one that is the same function, as Euler's method with step size 1
            is the plain recurrence. The row then says whose weights they are, which have to be in the manifest.
        tag: For the weights, letters, digits and underscores.
        hub: The folder to make it in.
        repo_id: "ORG/NAME" on the Hub that it is meant for: what the card tells users to load. Without one that is
            NAME.TAG, which is right for weights that come with the package.
        results: What it scored on the test images; default RUN/test.jsonl
            (`recurrent-vit evaluate RUN --horizon 1,2,4,8,12,24,48,96 --json RUN/test.jsonl`).

    Returns:
        The row for the manifest.

    Raises:
        FileExistsError: The tag has other weights already, in `hub` or in the manifest: a tag never changes them.
        FileNotFoundError: The run isn't finished, or not evaluated.
        ValueError: The run is of another function, or was stopped before its end, or its results are not those of the
            whole test split.
        OSError: The folder cannot be written; a new one is then not there.
    """
    run, hub = Path(run).expanduser(), Path(hub).expanduser()
    if not tag.isidentifier():
        raise ValueError(f"tag={tag!r} must be made of letters, digits and underscores, like short_c100")
    if repo_id:
        _check_repo_id(repo_id)
    row, content = _row_of(run, name, tag, repo_id, Path(results).expanduser() if results else run / RESULTS)
    _check_same_as(row)
    folder = hub / row.id
    taken = {known.sha256 for known in weights.checkpoints() if known.id == row.id}
    if (folder / FILE).exists():
        taken.add(weights.sha256(folder / FILE))
    if others := taken - {row.sha256}:
        raise FileExistsError(
            f"{row.id} exists with other weights (sha256 {', '.join(others)}, the run's {row.sha256}); a tag never "
            "changes its weights: give another --tag"
        )
    _write_folder(folder, {CONFIG: _json(config(row)), FILE: content, CARD: card(row).encode()})
    return row


def _check_repo_id(repo_id: str) -> None:
    try:
        huggingface_hub.utils.validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"--repo-id {repo_id!r}: {str(error).splitlines()[0]}") from error
    if "/" not in repo_id:
        raise ValueError(f"--repo-id {repo_id!r}: give ORG/NAME")


def _check_same_as(row: Checkpoint) -> None:
    known = {other.id: other.sha256 for other in weights.checkpoints()}
    if row.same_as and known.get(row.same_as) != row.sha256:
        raise ValueError(f"the manifest has no {row.same_as} with these weights; stage and enter that one first")


def _renamed(model: Any, name: str, run: Path, facts: dict[str, Any]) -> Any:
    """The model of that name with these weights, if it is the same function."""
    twin: Any = timm.create_model(name, **facts["model_kwargs"]) if name in VARIANTS else None
    if twin is None or _function(twin) != _function(model):
        raise ValueError(f"{run} is a run of {facts['name']}, not of {name}, which is another function")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def _function(model: Any) -> tuple[Any, ...]:
    """What a model computes from its weights; the plain recurrence is Euler along F(z) - z with step size 1."""
    steps = (model.depth, model.steps, model.stages)
    return (*steps, *(("euler", FIELDS[0], 1.0) if model.solver == PLAIN else _integration(model)))


def _integration(model: Any) -> tuple[str, str, float]:
    return model.solver, model.field, model.step_size


def _row_of(run: Path, name: str, tag: str, repo_id: str, scored: Path) -> tuple[Checkpoint, bytes]:
    """The row of a run, and the content of its weight file."""
    model: Any = runs.load_result(run)
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    if facts["name"] != name:
        model = _renamed(model, name, run, facts)
    done, planned = (facts.get(key, 0) for key in ("updates", "planned_updates"))
    if done < planned:
        raise ValueError(f"{run} was stopped after update {done:,} of {planned:,}; whole runs alone are published")
    results = _results(scored, run, model)
    trained = results[model.trained_horizon]
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    content = safetensors.torch.save(state, metadata={"format": "pt"})  # with a second key, bytes would vary
    row = Checkpoint(
        name=name,
        tag=tag,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        dtype="float32",
        parameters=sum(value.numel() for value in state.values()),
        license="apache-2.0",
        images=facts["images"],
        recipe=facts["recipe"],
        precision=facts["precision"],
        seed=facts["seed"],
        pflop=round(facts["pflop"], 4),
        seconds=facts["seconds"],
        hardware=facts["hardware"],
        versions=facts["versions"],
        date=facts["date"],
        metrics={key: trained[key] for key in ("horizon", "top1", "top1_stderr", "top5", "loss", "count")},
        sweep={
            str(horizon): {key: result[key] for key in ("top1", "non_finite")} for horizon, result in results.items()
        },
        golden=" ".join(f"{value:.6f}" for value in weights.golden_logits(model).tolist()),
        model_kwargs=facts["model_kwargs"],
        repo=repo_id,
        command=facts.get("command", ""),
        same_as=f"{facts['name']}.{tag}" if facts["name"] != name else "",
    )
    return row, content


def _results(path: Path, run: Path, model: Any) -> dict[int, dict[str, Any]]:
    """The rows of `evaluate` by number of steps."""
    advice = f"run `recurrent-vit evaluate {run} --data DIR --horizon 1,2,4,8,12,24,48,96 --json {path}`"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {advice}")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    expected = {
        "split": "test", "count": ROWS["test"], "solver": model.solver, "field": model.field,
        "step_size": model.step_size, "precision": "fp32",
    }  # fmt: skip
    for row in rows:
        for key, value in expected.items():
            if row.get(key) != value:
                raise ValueError(f"{path}: a row has {key}={row.get(key)!r}; the weights are published with {value!r}")
    results = {row["horizon"]: row for row in rows}
    if model.trained_horizon not in results:
        raise ValueError(f"{path} has no row for the trained {model.trained_horizon} steps")
    if len(results) == 1:
        raise ValueError(f"{path} has the trained number of steps only, and the card shows others: {advice}")
    return results


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """A new folder appears whole or not at all; one that is there gets its files replaced, each whole."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        for name, content in files.items():
            write_atomically(part / name, _writer(content))
        if folder.exists():
            for name in files:
                (part / name).replace(folder / name)
        else:
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _writer(content: bytes) -> Callable[[Any], Any]:
    return lambda file: file.write(content)


# ---- configuration ---------------------------------------------------------------------------------------------------


def config(row: Checkpoint) -> dict[str, Any]:
    """The content of config.json, for timm and for transformers.

    timm's own export writes `num_classes` among the model's arguments too, on which transformers fails; it is left out.

    Example:
        >>> [config(row)["architecture"] for row in weights.checkpoints("bvit")]
        ['bvit']
    """
    model: Any = timm.create_model(row.name, device="meta", **row.model_kwargs)
    cfg = {**VARIANTS[row.name].cfg, "num_classes": model.num_classes, "tag": row.tag, "license": row.license}
    arguments = {key: value for key, value in row.model_kwargs.items() if key != "num_classes"}
    return {
        "architecture": row.name,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool,
        "model_args": arguments,  # even if empty: without it transformers saves null, on which timm fails
        **({"label_names": list(FINE_NAMES)} if model.num_classes == len(FINE_NAMES) else {}),
        "pretrained_cfg": cfg,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- publishing ------------------------------------------------------------------------------------------------------


def push(folder: str | os.PathLike, repo_id: str, *, private: bool = False, dry_run: bool = False) -> str:
    """Upload a repository folder to the Hub, with the client's own token, endpoint and proxies.

    Args:
        folder: Made by `stage`.
        repo_id: "ORG/NAME"; made if it doesn't exist.
        private: Make it private, if it is made.
        dry_run: Check everything here, and ask the Hub nothing.

    Returns:
        The commit, 40 hexadecimal digits, to be pinned in the manifest; "" for a dry run.

    Raises:
        FileNotFoundError: The folder lacks a file.
        ValueError: It isn't a folder of `stage`, or was staged for another repository, or `repo_id` is no name of one.
        FileExistsError: The repository has other weights: a tag never changes its weights.
        OSError: The Hub can't be reached, or refuses.
    """
    folder = Path(folder).expanduser()
    _check_repo_id(repo_id)
    _check_folder(folder, repo_id)
    if dry_run:
        return ""
    api, ours = huggingface_hub.HfApi(), weights.sha256(folder / FILE)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        info = api.model_info(repo_id, files_metadata=True)
    except Exception as error:  # the client's classes of errors have changed twice
        raise _refused(repo_id, error) from error
    for file in info.siblings or []:
        theirs = file.lfs.sha256 if file.lfs else "unknown"
        if file.rfilename == FILE and theirs != ours:
            raise FileExistsError(
                f"{repo_id} has other weights (sha256 {theirs}, here {ours}); a tag never changes its weights: give "
                "another --repo-id"
            )
    try:
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=list(FILES),
            commit_message=f"Upload {folder.name}",
            parent_commit=info.sha,  # what somebody else has pushed since is not overwritten
        )
    except Exception as error:
        raise _refused(repo_id, error) from error
    return str(commit.oid)


def _check_folder(folder: Path, repo_id: str) -> None:
    for name in FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: give a folder made by `recurrent-vit stage`")
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        text = huggingface_hub.ModelCard.load(folder / CARD).text
    except Exception as error:  # of JSON, YAML, timm, or ours
        raise ValueError(f"{folder} is not fit to be published: {weights.first_line(error)}") from error
    if not isinstance(model, RecurrentVisionTransformer):
        raise ValueError(f"{folder} is not fit to be published: it is a {type(model).__name__}")
    bundled = folder.name in {row.id for row in weights.checkpoints()}
    if f'"hf-hub:{repo_id}"' not in text and not (bundled and f'"{folder.name}"' in text):
        raise ValueError(f"{folder / CARD} does not load {repo_id}: stage the run again with --repo-id {repo_id}")


def _refused(repo_id: str, error: Exception) -> OSError:
    return OSError(
        f"{repo_id} at {huggingface_hub.constants.ENDPOINT}: {weights.first_line(error)}; is there a token that may "
        "write (`hf auth login`), and a network?"
    )
