"""The paper's protocol on one large GPU in minutes: every update is one replay of a captured CUDA graph.

    python -m benchmarks.paper bvit --data DIR --out runs/bvit.paper --seed 0
    python -m benchmarks.paper bvit --data DIR --out runs/smoke --epochs 1 --device cpu    # the same, not captured

It trains what `recurrent-vit train NAME --recipe paper` trains: the same initial weights, the same images in the same
order with the same shifts and flips, the same optimizer, schedule and moving average. Dropout draws from another
stream, and a batch is not cut into micro-batches. The folder is one of `recurrent_vit.runs`: `recurrent-vit evaluate`
and `stage` take it.

What is notable:

- The images stay on the device as uint8. Order, shifts and flips of an epoch are drawn on the CPU while the device
  works on the epoch before, and cross over in one piece. An update finds its rows by a counter on the device, so
  nothing passes between the two but the launch of the graph.
- bfloat16 autocast over float32 weights, blocks compiled, TF32 for what is left in float32.
- After every epoch the averaged weights are written, whole or not at all, and a line of the history: loss, and the test
  accuracy of the average. The accuracy to report is the last one; the best of all epochs, which the paper reports, is
  chosen on the test set, and is printed as such.
- No epoch begins that would end after --seconds: what is there by then is the result.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import timm
import torch
from timm.utils import ModelEmaV3
from torch import Tensor

from recurrent_vit import cifar, evaluate, runs, train
from recurrent_vit.losses import backward_stages
from recurrent_vit.recipes import PFLOP, RECIPES, Recipe, make_plan

__all__ = ["Captured", "Epoch", "draw_epoch", "main", "run"]

WARM_UP = 3  # updates before the capture: compilation, lazily made state, autotuning


class Epoch(NamedTuple):
    """What an epoch of U updates of B images is made of."""

    rows: Tensor  # int64 (U, B): places in the split
    offsets: Tensor  # int64 (U, B, 2)
    mirrored: Tensor  # bool (U, B)


def draw_epoch(images: int, batch: int, augmentation: cifar.Augmentation, epoch: int, seed: int) -> Epoch:
    """The rows and draws that `cifar.batches` uses in that epoch, on the CPU."""
    order = cifar.epoch_order(images, epoch=epoch, seed=seed)
    rows = order[: images // batch * batch].view(-1, batch)
    draws = [augmentation.draw(part, epoch=epoch, batch=k, seed=seed) for k, part in enumerate(rows)]
    return Epoch(rows, torch.stack([d.offsets for d in draws]), torch.stack([d.mirrored for d in draws]))


@dataclass
class Captured:
    """A model, its optimizer and average, and the update of them, which runs captured where there is a GPU.

    Args:
        name: A name of the zoo.
        recipe: Of one phase, without Muon.
        split: Training images, on the device.
        seed: Of initial weights, order, augmentation and dropout.
        precision: "fp32" or "bf16".
        compile: Compile the blocks.
        model_kwargs: Arguments of `timm.create_model`.
    """

    name: str
    recipe: Recipe
    split: cifar.Split
    seed: int = 0
    precision: str = "bf16"
    compile: bool = True
    model_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        recipe, kwargs = self.recipe, self.model_kwargs or {}
        (self.leg,) = make_plan(self.name, recipe, len(self.split), **kwargs)
        if recipe.muon_lr or recipe.clip is not None:
            raise ValueError(f"recipe {recipe.name!r}: Muon and clipping are not captured")
        self.device = self.split.images.device
        torch.manual_seed(self.seed)
        model: Any = timm.create_model(
            self.name, **{**kwargs, **self.leg.model_args, "dynamic_img_size": True, "proj_drop_rate": recipe.dropout}
        )
        with torch.no_grad():
            model.head.weight.mul_(recipe.head_scale)
        self.model = model.to(self.device).train()
        self.ema = ModelEmaV3(self.model, decay=recipe.ema_decay, use_warmup=recipe.ema_warmup)
        self.optimizer = train.make_optimizer(self.model, recipe)
        self.augmentation = recipe.augmentation(self.leg.phase)
        self.mean, self.std = (torch.tensor(row, device=self.device).view(3, 1, 1) for row in (cifar.MEAN, cifar.STD))
        size = self.leg.phase.batch_size
        self.epoch = Epoch(
            torch.zeros(self.leg.per_epoch, size, dtype=torch.int64, device=self.device),
            torch.zeros(self.leg.per_epoch, size, 2, dtype=torch.int64, device=self.device),
            torch.zeros(self.leg.per_epoch, size, dtype=torch.bool, device=self.device),
        )
        factors = [recipe.learning_rate(i / self.leg.updates) for i in range(self.leg.updates)]
        self.factors = torch.tensor(factors, device=self.device)
        self.done = torch.zeros(1, dtype=torch.int64, device=self.device)  # updates
        self.loss = torch.zeros((), device=self.device)  # summed over the epoch
        for group in self.optimizer.param_groups:
            group["lr"] = torch.zeros((), device=self.device)
            group["capturable"] = self.on_gpu
        if self.compile:
            for block in (*self.model.blocks, *self.ema.module.blocks):
                block.compile()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def update(self, number: int) -> None:
        """One update, the `number`-th (from 1) for the average, which begins with the weights after the first."""
        k = self.done % self.leg.per_epoch
        rows, offsets, mirrored = (column.index_select(0, k)[0] for column in self.epoch)
        factor = self.factors.index_select(0, self.done)[0]
        for group in self.optimizer.param_groups:
            group["lr"].copy_(factor * group["initial_lr"])
        images = self._augmented(self.split.images[rows], offsets, mirrored)
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = backward_stages(
            self.model,
            images,
            self.split.labels[rows],
            label_smoothing=self.recipe.label_smoothing,
            autocast=torch.bfloat16 if self.precision == "bf16" else None,
        )
        self.optimizer.step()
        self.ema.update(self.model, step=number)
        self.loss += loss
        self.done += 1

    def _augmented(self, images: Tensor, offsets: Tensor, mirrored: Tensor) -> Tensor:
        """As `cifar.Augmentation`, whose mean and std come from the CPU, which a capture doesn't allow."""
        images = cifar.mirror(cifar.shift(images, offsets), mirrored)
        images = images.float().mul_(1 / 255).sub_(self.mean).div_(self.std)
        return cifar.downsample(images, self.leg.phase.size)

    def capture(self) -> "torch.cuda.CUDAGraph | None":
        """Make the graph of one update; without a GPU, None. The state is afterwards what it was at the start."""
        if not self.on_gpu:
            return None
        start = [tensor.clone() for tensor in self._weights()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.update(2)
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.update(2)
        for tensor, value in zip(self._weights(), start):
            tensor.copy_(value)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.done.zero_()
        self.loss.zero_()
        return graph

    def _weights(self) -> list[Tensor]:
        return [parameter.data for model in (self.model, self.ema.module) for parameter in model.parameters()]

    def epochs(self) -> Iterator[tuple[int, float]]:
        """Train; gives (number of updates, mean loss) after every epoch, the last of which may be short."""
        graph = self.capture()
        torch.manual_seed(self.seed)
        size = self.leg.phase.batch_size
        with ThreadPoolExecutor(1) as ahead:  # draws the next epoch while the device works on this one
            drawn = ahead.submit(draw_epoch, len(self.split), size, self.augmentation, 0, self.seed)
            for epoch in range(math.ceil(self.leg.updates / self.leg.per_epoch)):
                for mine, new in zip(self.epoch, drawn.result()):
                    mine.copy_(new)
                drawn = ahead.submit(draw_epoch, len(self.split), size, self.augmentation, epoch + 1, self.seed)
                first = epoch * self.leg.per_epoch
                count = min(self.leg.per_epoch, self.leg.updates - first)
                self.loss.zero_()
                for number in range(first + 1, first + count + 1):
                    if graph is None or number == 1:
                        self.update(number)
                    else:
                        graph.replay()
                yield first + count, self.loss.item() / count


def run(
    captured: Captured, test: cifar.Split, folder: Path, seconds: float, batch_size: int = 1000
) -> Iterator[dict[str, Any]]:
    """Train into a folder of `runs`; gives a row after every epoch. Weights and history are there after each of them.

    Raises:
        FloatingPointError: The loss is not finite; the weights of the epoch before stay.
    """
    start, longest, before = time.monotonic(), 0.0, 0.0
    leg = captured.leg
    for updates, loss in captured.epochs():
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in the epoch that ends with update {updates}")
        (accuracy,) = evaluate.evaluate(
            captured.ema.module, test, batch_size=batch_size, precision=captured.precision, horizons=None
        )
        now = time.monotonic() - start
        longest, elapsed = max(longest, now - before), now - before
        before = now
        row = {
            "update": updates,
            "leg": 0,
            "size": leg.phase.size,
            "epoch": round(updates / leg.per_epoch, 3),
            "pflop": round(updates * leg.flop_per_update / PFLOP, 6),
            "seconds": round(now, 2),
            "loss": round(loss, 5),
            "lr_factor": round(captured.recipe.learning_rate(updates / leg.updates), 5),
            "images_per_second": round(leg.per_epoch * leg.phase.batch_size / elapsed, 1),
            "test_top1": accuracy["top1"],
        }
        runs.append_history(folder, row)
        _save(captured, folder / "model.safetensors")
        yield row
        if updates < leg.updates and now + longest > seconds:
            print(f"stopped after update {updates} of {leg.updates}: {seconds:g} seconds are over", file=sys.stderr)
            return


def _save(captured: Captured, path: Path) -> None:
    content = safetensors.torch.save(weights(captured), metadata={"format": "pt"})
    runs.write_atomically(path, lambda file: file.write(content))


def weights(captured: Captured) -> dict[str, Tensor]:
    """The averaged weights, as the finished model has them."""
    return {name: tensor.cpu().contiguous() for name, tensor in captured.ema.module.state_dict().items()}


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Train one model, and print its last and its best accuracy."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no CUDA device")
    torch.set_float32_matmul_precision("high")
    recipe = RECIPES["paper"] if arguments.epochs is None else replace(RECIPES["paper"], epochs=arguments.epochs)
    precision = arguments.precision or ("bf16" if device.type == "cuda" else "fp32")
    split, test = (cifar.load(arguments.data, part) for part in ("train", "test"))
    with runs.open_folder(arguments.out, resume=False) as folder:
        captured = Captured(
            arguments.name, recipe, split.to(device), arguments.seed, precision, compile=device.type == "cuda"
        )
        rows = []
        for row in run(captured, test.to(device), folder, arguments.seconds):
            rows.append(row)
            print(
                f"epoch {row['epoch']:g}: {row['seconds']:.1f} s, loss {row['loss']:.4f}, "
                f"test top-1 {100 * row['test_top1']:.2f} %",
                flush=True,
            )
        _finish(captured, folder, rows)
    best = max(rows, key=lambda row: row["test_top1"])
    print(
        f"{arguments.name}: last {100 * rows[-1]['test_top1']:.2f} %; best, chosen on the test set, "
        f"{100 * best['test_top1']:.2f} % (epoch {best['epoch']:g})"
    )


def _finish(captured: Captured, folder: Path, rows: list[dict[str, Any]]) -> None:
    facts = {
        "name": captured.name,
        "model_kwargs": captured.model_kwargs or {},
        "recipe": captured.recipe.name,
        "settings": repr(captured.recipe),
        "pflop": rows[-1]["pflop"],
        "seed": captured.seed,
        "images": len(captured.split),
        "precision": captured.precision,
        "seconds": rows[-1]["seconds"],
        "hardware": runs.hardware(captured.device),
    }
    runs.write_result(folder, weights(captured), facts)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=first)
    parser.add_argument("name", metavar="NAME", help="a name of the zoo")
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, help="default: the recipe's 200")
    parser.add_argument("--seconds", type=float, default=540.0, help="the guard on the clock (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=evaluate.PRECISIONS, help="default: bf16 on a GPU, fp32 elsewhere")
    return parser


if __name__ == "__main__":
    main()
