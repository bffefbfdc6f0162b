"""Train a model of the zoo on CIFAR-100 by a recipe: `fit`, what `recurrent-vit train` calls.

What is notable:

- A run is a list of legs (`recipes.make_plan`). Each builds the model with its own number of steps or blocks and takes
  over weights and optimizer state from the leg before, scaled so that more and smaller steps follow the same flow.
- Chance comes from the seed and the place alone: (seed, epoch, batch) for the data, (seed, update, process) for
  dropout. A run that is killed and resumed ends with bitwise the weights of one that was not (same machine, threads).
- The learning rate is a function of the compute spent, not of updates or epochs.
- Under torchrun every process takes its part of each batch, and gradients are averaged once an update.
- Muon, the moving average and the interpolation of positions are timm's; AdamW alone is torch's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import timm
import timm.optim
import torch
from timm.optim import muon as timm_muon
from timm.optim.muon import zeropower_via_newtonschulz
from timm.utils import ModelEmaV3
from torch import Tensor

from . import augment, cifar, evaluate, machine, plots, runs
from .losses import average_gradients, backward_stages
from .model import RecurrentVisionTransformer
from .recipes import PFLOP, Leg, Recipe, make_plan
from .zoo import MODEL_ARGS

__all__ = ["Interrupted", "Job", "Muon", "State", "fit", "grow", "make_job", "make_optimizer", "start", "whiten"]

MUON: dict[str, Any] = {
    "momentum": 0.95, "nesterov": True, "ns_steps": 3, "ns_coefficients": "original", "adjust_lr_fn": "match_rms_adamw"
}  # fmt: skip
MUON_WARMUP = (0.85, 300)  # momentum at the first update, and the updates it takes to rise


class Muon(timm.optim.Muon):
    """timm's Muon, with its Newton-Schulz iteration in fp32 on a CPU; elsewhere in bfloat16, as timm has it.

    A CPU without instructions for bfloat16 takes 25 to 50 times as long for it, and a training then ten times as long.
    timm's iteration has an argument for that, which its optimizer does not pass on: it is bound while a step lasts.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.eye(2)
        >>> Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="original").step()
        >>> bool(weight[0, 0] < -0.6), weight[0, 1].item()
        (True, 0.0)
    """

    def step(self, closure: Any = None) -> Any:
        if any(parameter.device.type != "cpu" for group in self.param_groups for parameter in group["params"]):
            return super().step(closure)
        timm_muon.zeropower_via_newtonschulz = partial(zeropower_via_newtonschulz, dtype=torch.float32)
        try:
            return super().step(closure)
        finally:
            timm_muon.zeropower_via_newtonschulz = zeropower_via_newtonschulz


class Interrupted(InterruptedError):
    """The run was asked to stop, and its state is written."""


@dataclass(frozen=True)
class Job:
    """What a run was asked for."""

    name: str
    model_kwargs: dict[str, Any]
    recipe: Recipe
    plan: list[Leg]
    train: cifar.Split
    seed: int
    device: torch.device
    precision: str
    compile: bool

    def build(self, leg: Leg) -> RecurrentVisionTransformer:
        """The model of a leg; its positions are interpolated to the size of the images in the forward pass."""
        kwargs = {
            "proj_drop_rate": self.recipe.dropout,
            **self.model_kwargs,
            **leg.model_args,
            "dynamic_img_size": True,
        }
        model: Any = timm.create_model(self.name, **kwargs)
        return model.to(self.device).train()

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in, to be resumed."""
        return {
            "name": self.name,
            "model_kwargs": self.model_kwargs,
            "recipe": self.recipe.name,
            "settings": self.recipe.settings,
            "pflop": sum(leg.flop for leg in self.plan) / PFLOP,
            "seed": self.seed,
            "images": len(self.train),
            "precision": self.precision,
        }


@dataclass
class State:
    """Where a run stands: its leg, the updates done in it, and what they made."""

    leg: int
    update: int
    model: RecurrentVisionTransformer
    optimizer: torch.optim.Optimizer
    ema: ModelEmaV3 | None
    seconds: float = 0.0


def fit(
    name: str,
    recipe: Recipe,
    train: cifar.Split,
    out: str | Path,
    *,
    seed: int = 0,
    pflop: float | None = None,
    device: str = "cpu",
    precision: str | None = None,
    compile: bool = False,
    resume: bool = False,
    checkpoint_seconds: float = 300.0,
    model_kwargs: dict[str, Any] | None = None,
) -> RecurrentVisionTransformer:
    """Train, leaving checkpoints, history and weights in the folder `out` (see `runs`).

    Args:
        name: A name of the zoo.
        recipe: How.
        train: On what: uint8 images and labels.
        out: Folder of the run; new or empty, unless `resume`.
        seed: Of initial weights, order, augmentation and dropout.
        pflop: Compute to spend, in units of 1e15 FLOP; default the recipe's.
        device: "cpu", "cuda", "cuda:1".
        precision: "fp32", or "bf16" for autocast over fp32 weights; default bf16 on CUDA, fp32 elsewhere.
        compile: Compile the blocks, in place.
        resume: Go on from the last checkpoint in `out`, or start if there is none.
        checkpoint_seconds: Least time between two checkpoints; 0 writes one after every update.
        model_kwargs: Arguments of `timm.create_model`; a `proj_drop_rate` among them stands before the recipe's.

    Returns:
        The trained model in evaluation mode, with the weights that the recipe publishes.

    Raises:
        FileExistsError: `out` holds a run, and `resume` is false.
        ValueError: A checkpoint is damaged, or of another run than the one asked for; an argument is out of range; or
            the model does not take these images or labels.
        FloatingPointError: The loss is not finite; the last checkpoint is from before.
        Interrupted: SIGTERM or SIGINT came; a checkpoint of that moment is written.
        OSError: The disk is full or the folder cannot be written; the checkpoints that are there stay whole.
    """
    plots.import_figure()  # the learning curve is drawn at the end: what is missing must show now
    job = make_job(
        name, recipe, train, seed=seed, pflop=pflop, device=device, precision=precision, compile=compile,
        model_kwargs=model_kwargs,
    )  # fmt: skip
    with runs.open_folder(out, resume) as folder:
        state = _resume(job, folder) or start(job)
        _run(job, state, folder, checkpoint_seconds)
        return _finish(job, state, folder)


def make_job(
    name: str,
    recipe: Recipe,
    train: cifar.Split,
    *,
    seed: int = 0,
    pflop: float | None = None,
    device: str = "cpu",
    precision: str | None = None,
    compile: bool = False,
    model_kwargs: dict[str, Any] | None = None,
) -> Job:
    """What :func:`fit` is asked for, checked: the arguments, and the ValueError, are its own."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be from 0 to 2^32 - 1")
    precision = evaluate.check_precision(precision or ("bf16" if device.startswith("cuda") else "fp32"))
    model_kwargs = dict(model_kwargs or {})
    if alien := sorted(set(model_kwargs) - MODEL_ARGS):
        raise ValueError(f"model_kwargs: {alien[0]} is not an argument of the model")
    evaluate.checked(timm.create_model(name, device="meta", **model_kwargs), train)
    plan = make_plan(name, recipe, len(train), pflop, **model_kwargs)
    return Job(name, model_kwargs, recipe, plan, train.to(device), seed, torch.device(device), precision, compile)


def _run(job: Job, state: State, folder: Path, checkpoint_seconds: float) -> None:
    """Train to the end of the plan, with checkpoints and history."""
    saved = time.monotonic()
    with (
        runs.Reporter(folder, job.plan, state.leg, state.update, state.seconds) as report,
        machine.stop_signals() as stopped,
    ):
        for loss in _updates(job, state):
            report(state.leg, state.update, loss, state.seconds, _learning_rate(job, state))
            signal, leg_is_done = stopped(), state.update == job.plan[state.leg].updates
            if signal or leg_is_done or time.monotonic() - saved >= checkpoint_seconds:
                report.flush()
                runs.save_checkpoint(folder, report.done, _pack(job, state))
                saved = time.monotonic()
            if signal:
                raise Interrupted(
                    f"stopped by {signal} after update {report.done} of {report.total}; --resume goes on from there"
                )


def _updates(job: Job, state: State) -> Iterator[Tensor]:
    """Train `state` to the end of the plan; gives the loss of every update.

    `state.seconds` is time on the clock: drawing a batch counts, and what the caller does with a loss (on a GPU: wait).
    """
    last = time.perf_counter()
    while True:
        leg = job.plan[state.leg]
        if job.compile:
            for block in state.model.blocks:
                block.compile()
        for batch in _batches(job, leg, state.update):
            loss = _update(job, state, batch)
            state.update += 1
            now = time.perf_counter()
            state.seconds, last = state.seconds + now - last, now
            yield loss
        if state.leg + 1 == len(job.plan):
            return
        _enter_next_leg(job, state)


def _batches(job: Job, leg: Leg, start: int) -> Iterator[cifar.Batch]:
    """The batches of a leg from its update `start` on, epoch after epoch; this process's part of each."""
    size = leg.phase.batch_size
    per_epoch = cifar.batches_per_epoch(len(job.train), size, drop_last=True)
    rank, world_size = machine.place()
    while start < leg.updates:
        epoch, first = divmod(start, per_epoch)
        stream = cifar.batches(
            job.train,
            size,
            epoch=leg.first_epoch + epoch,
            seed=job.seed,
            start=first,
            augmentation=job.recipe.augmentation(leg.phase),
            drop_last=True,
            rank=rank,
            world_size=world_size,
        )
        for batch in islice(stream, leg.updates - start):
            start += 1
            yield batch


def _update(job: Job, state: State, batch: cifar.Batch) -> Tensor:
    """One optimizer step on one batch, in micro-batches; returns the loss, not yet waited for."""
    leg, recipe = job.plan[state.leg], job.recipe
    _set_rates(job, state)
    torch.manual_seed(_dropout_seed(job, state))
    state.optimizer.zero_grad(set_to_none=True)
    autocast = torch.bfloat16 if job.precision == "bf16" else None
    loss = torch.zeros((), device=job.device)
    for images, labels in zip(batch.images.split(leg.phase.micro_batch), batch.labels.split(leg.phase.micro_batch)):
        share = len(images) / len(batch.images)
        stage_loss, _ = backward_stages(
            state.model, images, labels, label_smoothing=recipe.label_smoothing, scale=share, autocast=autocast
        )
        loss += share * stage_loss
    average_gradients(state.model)
    if recipe.clip is not None:
        rest = [p for group in state.optimizer.param_groups if not group.get("use_muon") for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(rest, recipe.clip)
    state.optimizer.step()
    if state.ema is not None:
        state.ema.update(state.model, step=state.update + 1)
    return loss


def _learning_rate(job: Job, state: State) -> float:
    leg = job.plan[state.leg]
    spent = leg.spent + state.update * leg.flop_per_update
    return job.recipe.learning_rate(spent / sum(leg.flop for leg in job.plan))


def _set_rates(job: Job, state: State) -> None:
    factor = _learning_rate(job, state)
    start, rise = MUON_WARMUP
    for group in state.optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]
        if group.get("use_muon"):
            group["momentum"] = start + (MUON["momentum"] - start) * min(1.0, _done(job, state) / rise)


def _done(job: Job, state: State) -> int:
    """Updates since the beginning of the run."""
    return sum(leg.updates for leg in job.plan[: state.leg]) + state.update


def _dropout_seed(job: Job, state: State) -> int:
    rank, _ = machine.place()
    return int(np.random.SeedSequence((job.seed, _done(job, state), rank)).generate_state(1)[0])


# ---- from leg to leg -------------------------------------------------------------------------------------------------


def start(job: Job) -> State:
    """The state before the first update: initial weights of the job's seed, optimizer and average."""
    torch.manual_seed(job.seed)
    model = job.build(job.plan[0])
    if job.recipe.whiten:
        whiten(model, augment.normalize(job.train.images[:5000]))
    head: Any = model.head
    with torch.no_grad():
        head.weight.mul_(job.recipe.head_scale)
    return _state(job, 0, model)


def _state(job: Job, leg: int, model: RecurrentVisionTransformer) -> State:
    recipe, ema = job.recipe, None
    if job.plan[leg].phase.ema:
        ema = ModelEmaV3(
            model, decay=recipe.ema_decay, use_warmup=recipe.ema_warmup, warmup_gamma=10.0, warmup_power=1.0
        )
    return State(leg, 0, model, make_optimizer(model, recipe), ema)


def _enter_next_leg(job: Job, state: State) -> None:
    model = job.build(job.plan[state.leg + 1])
    sources = grow(state.model, model)
    new = _state(job, state.leg + 1, model)
    before, after = dict(state.model.named_parameters()), dict(model.named_parameters())
    for name, source in sources.items():
        new.optimizer.state[after[name]] = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in state.optimizer.state[before[source]].items()
        }
    new.seconds = state.seconds
    vars(state).update(vars(new))


@torch.no_grad()
def grow(old: RecurrentVisionTransformer, new: RecurrentVisionTransformer) -> dict[str, str]:
    """Give `new`, which takes more steps or has more blocks, the flow of `old` in smaller steps.

    Weights are copied, those of a block from the block that stands at its place in the shorter stack. What a step adds
    to the state is scaled by the ratio of the times the two models take, steps times step size: the last linear layers
    of attention and gate carry the factor. (For small steps this is the same flow; for the ones here it is near it.)

    Returns:
        For the name of each parameter of `new`, the name of the one in `old` that it came from.

    Example:
        >>> old, new = (timm.create_model("vit_cifar", depth=d, embed_dim=16, num_heads=2) for d in (2, 4))
        >>> sources = grow(old, new)
        >>> sources["blocks.3.attn.proj.weight"]
        'blocks.1.attn.proj.weight'
        >>> torch.equal(new.blocks[3].attn.proj.weight, old.blocks[1].attn.proj.weight / 2)
        True
    """
    factor = _time(old) / _time(new)
    parameters = dict(old.named_parameters())
    sources = {}
    for name, parameter in new.named_parameters():
        source = name
        if name.startswith("blocks."):
            _, block, rest = name.split(".", 2)
            source = f"blocks.{int(block) * old.depth // new.depth}.{rest}"
        parameter.copy_(parameters[source])
        if ".attn.proj." in name or ".mlp.fc2." in name:
            parameter.mul_(factor)
        sources[name] = source
    return sources


def _time(model: RecurrentVisionTransformer) -> float:
    return model.depth * model.trained_time


@torch.no_grad()
def whiten(model: RecurrentVisionTransformer, images: Tensor, epsilon: float = 5e-4) -> None:
    """Start the patch embedding as a whitening of the patches of `images`, in random directions.

    W = s R diag(L + epsilon)^(-1/2) U^T with U, L the eigenvectors and eigenvalues of the patches' covariance, R random
    and semi-orthogonal, and s such that the tokens keep the deviation that the default initial weights give them.

    Args:
        model: Its patch embedding is changed in place; it stays trainable.
        images: Normalised training images (N, in_chans, H, W), of any size that patches divide.
        epsilon: Keeps directions without variance from being blown up.
    """
    embed = model.patch_embed.proj
    patches = torch.nn.functional.unfold(images, embed.kernel_size, stride=embed.stride)  # N, in_chans * p * p, L
    patches = patches.transpose(1, 2).flatten(0, 1)
    deviation = (patches @ embed.weight.flatten(1).T).std()
    values, vectors = torch.linalg.eigh(torch.cov(patches.T))
    directions = torch.nn.init.orthogonal_(torch.empty(embed.out_channels, len(values), device=images.device))
    weight = directions @ torch.diag((values + epsilon) ** -0.5) @ vectors.T
    weight *= deviation / (patches @ weight.T).std()
    embed.weight.copy_(weight.view_as(embed.weight))


def make_optimizer(model: RecurrentVisionTransformer, recipe: Recipe) -> torch.optim.Optimizer:
    """timm's Muon on the matrices of the blocks and AdamW on the rest, or, with muon_lr=0, AdamW on everything.

    Weight decay is for matrices: biases, norms and what `model.no_weight_decay()` names have none.
    """
    matrices, decayed, rest = [], [], []
    for name, parameter in model.named_parameters():
        if recipe.muon_lr and name.startswith("blocks.") and parameter.ndim == 2:
            matrices.append(parameter)
        elif parameter.ndim >= 2 and name not in model.no_weight_decay():
            decayed.append(parameter)
        else:
            rest.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": recipe.adamw_lr, "weight_decay": recipe.weight_decay},
        {"params": rest, "lr": recipe.adamw_lr, "weight_decay": 0.0},
    ]
    if not recipe.muon_lr:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=recipe.betas)
    else:
        adamw = {"use_fallback": True, "nesterov": False, "betas": recipe.betas, "eps": 1e-8}
        muon = {"params": matrices, "lr": recipe.muon_lr, "weight_decay": recipe.weight_decay, "use_muon": True}
        optimizer = Muon([muon, *({**group, **adamw} for group in groups)], **MUON)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


# ---- checkpoints and the result --------------------------------------------------------------------------------------


def _pack(job: Job, state: State) -> dict[str, Any]:
    if not all(parameter.isfinite().all() for parameter in state.model.parameters()):
        raise FloatingPointError(f"weights are not finite after update {_done(job, state)}; no checkpoint of them")
    return {
        "run": job.identity(),
        "leg": state.leg,
        "update": state.update,
        "seconds": state.seconds,
        "model": state.model.state_dict(),
        "ema": state.ema.module.state_dict() if state.ema else None,
        "optimizer": state.optimizer.state_dict(),
    }


def _resume(job: Job, folder: Path) -> State | None:
    """The state of the last checkpoint in the folder, or None if there is none yet."""
    paths = runs.find_checkpoints(folder)
    if not paths:
        return None
    packed = runs.load_checkpoint(paths[-1])
    asked, found = job.identity(), packed.get("run", {})
    for key, value in asked.items():
        if found.get(key) != value:
            raise ValueError(f"{paths[-1]} is of another run: its {key} is {found.get(key)!r}, asked for is {value!r}")
    state = _state(job, packed["leg"], job.build(job.plan[packed["leg"]]))
    state.update, state.seconds = packed["update"], packed["seconds"]
    state.model.load_state_dict(packed["model"])
    state.optimizer.load_state_dict(packed["optimizer"])
    if state.ema is not None:
        state.ema.module.load_state_dict(packed["ema"])
    return state


def _finish(job: Job, state: State, folder: Path) -> RecurrentVisionTransformer:
    source = state.ema.module if state.ema is not None and job.recipe.publish == "ema" else state.model
    model: Any = timm.create_model(job.name, **job.model_kwargs)
    model.load_state_dict(source.state_dict())
    weights = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    facts = {**job.identity(), "seconds": round(state.seconds, 1), "hardware": machine.hardware(job.device)}
    if machine.place()[0] == 0:
        runs.write_result(folder, weights, facts)
        runs.plot_history(folder)
    return model.to(job.device).eval()
