"""Stage-wise cross-entropy, and the backward pass that takes the stages one at a time.

K stages of a recurrent model give K predictions y_1 ... y_K, and the loss is their average,

    L = 1/K sum_k CE(y_k, y),

with the state detached between stages (stages=1 is the ordinary loss).

What is notable:

- Detaching alone saves no memory: an averaged loss keeps all K graphs until its one backward pass.
  :func:`backward_stages` differentiates CE(y_k, y) / K before stage k + 1 begins. The gradients are the same, and the
  graph of a single stage is all that is ever held.
- There is one optimizer update a batch, after all stages.
- Several processes: gradients accumulate locally and are averaged once, by :func:`average_gradients`, just before the
  update. DistributedDataParallel's own hooks need a call of its `forward`, which a loop over stages never makes, and
  one message of a few megabytes needs no overlap with the backward pass.

The cross-entropy is torch's: it takes labels or class probabilities, and smooths both.

Reference: "Training Crossroads for Recurrent Vision Transformers" (2026), https://arxiv.org/abs/2608.04879
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

__all__ = ["average_gradients", "backward_stages", "cross_entropy", "stage_loss"]


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """CE(y, t) = -sum_c t_c log softmax(y)_c, in nats, averaged over the batch; in float32 at least.

    Smoothing by e trains on (1 - e) t + e / classes.

    Args:
        logits: y, (B, classes).
        targets: Labels, int64 (B,), or class probabilities, floating point (B, classes), as mixup and cutmix make them.
        label_smoothing: e, from 0 to 1.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> labels, probabilities = torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> cross_entropy(logits, labels), cross_entropy(logits, probabilities)
        (tensor(1.4100), tensor(1.4100))
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def stage_loss(stages: Iterable[Tensor], targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """L = 1/K sum_k CE(y_k, y), of any stages: a list of logits, a stack (K, B, classes), or `model.forward_stages(x)`.

    It says what is trained. One backward pass from it needs memory for all K graphs; see :func:`backward_stages`.

    Args:
        stages: y_1 ... y_K, each (B, classes).
        targets: As in :func:`cross_entropy`.
        label_smoothing: As there.

    Raises:
        ValueError: There are no stages.

    Example:
        >>> stages = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]])
        >>> stage_loss(stages, torch.tensor([1]))
        tensor(1.4100)
    """
    losses = [cross_entropy(logits, targets, label_smoothing) for logits in stages]
    if not losses:
        raise ValueError("stages is empty: a loss needs the logits of at least one stage")
    return torch.stack(losses).mean()


def backward_stages(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    autocast: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of scale * L to the parameters' own, stage by stage: memory does not grow with K.

    Each stage runs `model.steps` steps; the horizon plays no part. With one stage this is the ordinary loss. The stem
    gets its gradient from the first stage alone.

    A gradient accumulated over micro-batches and processes is that of the whole batch if
    scale = (images of this call) * (processes) / (images of the whole batch, in all calls and processes).

    Args:
        model: A `RecurrentVisionTransformer`, or a DistributedDataParallel around one. The latter has its gradients
            averaged at the end of this call, unless it is made under `no_sync()`; around the former, call
            :func:`average_gradients` once an update.
        images: (B, in_chans, H, W), B >= 1.
        targets: As in :func:`cross_entropy`.
        label_smoothing: As there.
        scale: Factor of the gradients; the returned loss goes without it.
        autocast: Run forward pass and loss, but not the backward pass, under `torch.autocast` in this dtype. Without
            it, whatever the caller has set holds for all three.

    Returns:
        (L, y_K), both detached: a scalar, and the logits (B, classes) of the last stage.

    Raises:
        ValueError: There are no images, of which the mean loss would be NaN.

    Example:
        >>> import timm, recurrent_vit
        >>> model = timm.create_model("bvit_ds", stages=2, steps=1)
        >>> images, labels = torch.randn(4, 3, 32, 32), torch.tensor([3, 5, 8, 13])
        >>> for part in (slice(0, 3), slice(3, 4)):  # two micro-batches, one update
        ...     loss, logits = backward_stages(model, images[part], labels[part], scale=len(labels[part]) / len(labels))
        >>> logits.shape, model.head.weight.grad.shape
        (torch.Size([1, 100]), torch.Size([100, 256]))
    """
    if not len(images):
        raise ValueError("images is empty: leave the call out; a missing gradient counts as zero in average_gradients")
    module: Any = model.module if isinstance(model, DistributedDataParallel) else model
    context = nullcontext() if autocast is None else torch.autocast(images.device.type, autocast)
    stages = module.forward_stages(images)
    losses = []
    for _ in range(module.stages):
        with context:
            logits = next(stages)
            loss = cross_entropy(logits, targets, label_smoothing)
        (loss * (scale / module.stages)).backward()
        losses.append(loss.detach())
    if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
        average_gradients(module)
    return torch.stack(losses).mean(), logits.detach()


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the processes, in one message; with a single process do nothing.

    Call it in all processes, once an update: after the last backward pass, before clipping and the optimizer. Gradients
    that are equal already stay as they are. A gradient that is missing counts as zero, as that of a process which got
    no images of a last, short batch; afterwards no parameter that requires a gradient is without one.

    Args:
        model: Any module with the same parameters in every process.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(model)  # no process group: nothing to average with
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))
