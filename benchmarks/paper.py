"""The paper's protocol on one GPU: every update is one replay of a captured CUDA graph.

    python -m benchmarks.paper bvit --data DIR --out runs/bvit.paper --seed 0
    python -m benchmarks.paper bvit --data DIR --out runs/smoke --epochs 1 --device cpu    # the same, not captured

It trains what `recurrent-vit train NAME --recipe paper` trains: the same initial weights, the same images in the same
order with the same shifts and flips, the same optimizer, schedule and moving average. Dropout draws from another
stream, and a batch is not cut into micro-batches. The folder is one of `recurrent_vit.runs`: `recurrent-vit evaluate`
takes it from the first epoch on, `recurrent-vit stage` when the last is done.

What is notable:

- The images stay on the device as uint8. Order, shifts and flips of an epoch are drawn on the CPU while the device
  works on the epoch before, and cross over in one piece. An update finds its rows by a counter on the device, so
  nothing passes between the two but the launch of the graph.
- bfloat16 autocast over float32 weights, blocks compiled, TF32 for what is left in float32.
- After every epoch the averaged weights are written, each file whole or not at all, with what is known of them, and a
  line of the history: loss, and the test accuracy of the average. The accuracy to report is the last one; the best of
  all epochs, which the paper reports, is chosen on the test set, and is printed as such.
- With --seconds no epoch begins that would end after them. What is there by then stays, and says how far it came, as
  after a crash; there is no resuming.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurrent_vit import augment, cifar, evaluate, machine, plots, runs, train
from recurrent_vit.losses import backward_stages
from recurrent_vit.recipes import PFLOP, RECIPES, Recipe
from recurrent_vit.zoo import VARIANTS

from . import usage
from .usage import usage_errors

__all__ = ["Captured", "Epoch", "command", "draw_epoch", "main", "run", "weights"]

WARM_UP = 3  # updates before the capture: compilation, lazily made state, autotuning


class Epoch(NamedTuple):
    """What an epoch of U updates of B images is made of."""

    rows: Tensor  # int64 (U, B): places in the split
    offsets: Tensor  # int64 (U, B, 2)
    mirrored: Tensor  # bool (U, B)


def draw_epoch(images: int, batch: int, augmentation: augment.Augmentation, epoch: int, seed: int) -> Epoch:
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
        recipe: Like `paper`: one phase of AdamW whose average is published.
        split: Training images, on the device.
        seed: Of initial weights, order, augmentation and dropout.
        precision: "fp32" or "bf16".
        compile: Compile the blocks.
        model_kwargs: Arguments of `timm.create_model`.

    Raises:
        ValueError: The recipe has what the captured update doesn't do; or as `recurrent_vit.train.fit`.
    """

    name: str
    recipe: Recipe
    split: cifar.Split
    seed: int = 0
    precision: str = "bf16"
    compile: bool = True
    model_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        recipe = self.recipe
        _check(recipe)
        self.device = self.split.images.device
        if self.on_gpu:
            torch.cuda.set_device(self.device)  # streams and graphs are made on the current one
        self.job = train.make_job(
            self.name, recipe, self.split, seed=self.seed, device=str(self.device), precision=self.precision,
            model_kwargs=self.model_kwargs,
        )  # fmt: skip
        (self.leg,) = self.job.plan
        state = train.start(self.job)
        assert state.ema is not None  # or _check would have refused
        self.model, self.ema, self.optimizer = state.model, state.ema, state.optimizer
        self.augmentation = recipe.augmentation(self.leg.phase)
        colours = (torch.tensor(row, device=self.device) for row in (augment.MEAN, augment.STD))
        self.mean, self.std = (row.view(3, 1, 1) for row in colours)
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
                block.compile(dynamic=False)  # of two batch sizes, training and evaluation, each has its own code

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def update(self, number: int) -> None:
        """One update, the `number`-th (from 1) for the average, which begins with the weights after the first.

        From the second on the number plays no part: one graph serves them all.
        """
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
        """As `augment.Augmentation`, whose mean and std come from the CPU, which a capture doesn't allow."""
        images = augment.mirror(augment.shift(images, offsets), mirrored)
        images = images.float().mul_(1 / 255).sub_(self.mean).div_(self.std)
        return augment.downsample(images, self.leg.phase.size)

    def capture(self) -> "torch.cuda.CUDAGraph | None":
        """Make the graph of one update; without a GPU, None. The state is afterwards what it was at the start."""
        if not self.on_gpu:
            return None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            start = self.rehearse()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # a compiled kernel that is collected unloads its module, which ends a capture with an error
        try:
            with torch.cuda.graph(graph, stream=stream):
                self.update(2)
        finally:
            gc.enable()
        self.restore(start)
        return graph

    def rehearse(self) -> list[Tensor]:
        """Make `WARM_UP` updates, each in the place of the first; gives the weights from before, for `restore`."""
        start = [tensor.clone() for tensor in self._weights()]
        for _ in range(WARM_UP):
            self.done.zero_()  # a plan may have fewer updates
            self.update(2)
        self.optimizer.zero_grad(set_to_none=True)
        return start

    def restore(self, start: Sequence[Tensor]) -> None:
        """Put the weights back, and optimizer, counter and loss to their start; all tensors stay where they are."""
        for tensor, value in zip(self._weights(), start, strict=True):
            tensor.copy_(value)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.done.zero_()
        self.loss.zero_()

    def _weights(self) -> list[Tensor]:
        return [tensor for model in (self.model, self.ema.module) for tensor in model.state_dict().values()]

    def epochs(self) -> Iterator[tuple[int, float, float]]:
        """Train; gives (updates so far, mean loss, seconds of training) after every epoch; the last may be short.

        The seconds are of the epoch alone, data included, capture not.
        """
        graph = self.capture()
        torch.manual_seed(self.seed)
        size = self.leg.phase.batch_size
        with ThreadPoolExecutor(1) as ahead:  # draws the next epoch while the device works on this one
            drawn = ahead.submit(draw_epoch, len(self.split), size, self.augmentation, 0, self.seed)
            for epoch in range(math.ceil(self.leg.updates / self.leg.per_epoch)):
                begin = time.monotonic()
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
                loss = self.loss.item() / count  # waits for the device
                yield first + count, loss, time.monotonic() - begin


def _check(recipe: Recipe) -> None:
    """Refuse a recipe with anything that one captured update, replayed, doesn't do; all of it is named."""
    augmentation = recipe.augmentation(recipe.phases[0])
    lacking = {
        "several phases": len(recipe.phases) > 1,
        "a fraction of the steps": any(phase.fraction != 1 for phase in recipe.phases),
        "a phase without an average": not all(phase.ema for phase in recipe.phases),
        "muon_lr": bool(recipe.muon_lr),
        "clip": recipe.clip is not None,
        "ema_warmup": recipe.ema_warmup,  # the decay of an update would be replayed for ever
        "publish other than 'ema'": recipe.publish != "ema",
        "whiten": recipe.whiten,
        "rand_ops": bool(augmentation.rand_ops),
        "erase": bool(augmentation.erase),
    }
    if found := [name for name, there in lacking.items() if there]:
        raise ValueError(f"recipe {recipe.name!r} cannot be captured: {', '.join(found)}; use recurrent-vit train")


def run(
    captured: Captured,
    test: cifar.Split,
    folder: Path,
    seconds: float | None = None,
    command: str = "",
    batch_size: int = 1000,
) -> Iterator[dict[str, Any]]:
    """Train into a folder of `runs`; gives a row after every epoch, when weights, facts and history are there.

    Args:
        captured: What to train.
        test: Images to evaluate the average on, on the device.
        folder: Of the run; open.
        seconds: No epoch begins that would end after them; None for no such guard. The first epoch is always run, and
            the longest says how long the next will take, of the first its training: its evaluation compiles.
        command: That makes the run, for its facts.
        batch_size: Of the evaluation.

    Returns:
        An iterator of rows, the lines of the history: most columns are those of `recurrent-vit train`; test_top1 is
        of the average; seconds are since the start, with capture and evaluation; images_per_second is of the training
        alone.

    Raises:
        FloatingPointError: The loss is not finite; the weights of the epoch before stay.
    """
    begin, before, longest, done = time.monotonic(), 0.0, 0.0, 0
    planned = captured.leg.updates
    for updates, loss, spent in captured.epochs():
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in the epoch that ends with update {updates}")
        (accuracy,) = evaluate.evaluate(
            captured.ema.module, test, batch_size=batch_size, precision=captured.precision, horizons=None
        )
        now = time.monotonic() - begin
        images = (updates - done) * captured.leg.phase.batch_size
        row = {
            **_progress(captured, updates),
            "seconds": round(now, 2),
            "loss": round(loss, 5),
            "images_per_second": round(images / max(spent, 1e-9), 1),
            "test_top1": accuracy["top1"],
        }
        runs.append_history(folder, row)
        runs.write_result(folder, weights(captured), _facts(captured, row, command))
        yield row
        longest = max(longest, now - before) if done else spent  # the first evaluation compiles
        before, done = now, updates
        if seconds is not None and updates < planned and now + longest > seconds:
            print(f"stopped after update {updates} of {planned}: {seconds:g} seconds are over", file=sys.stderr)
            return


def _progress(captured: Captured, updates: int) -> dict[str, Any]:
    leg = captured.leg
    return {
        "update": updates,
        "leg": 0,
        "size": leg.phase.size,
        "epoch": round(updates / leg.per_epoch, 3),
        "pflop": round(updates * leg.flop_per_update / PFLOP, 6),
        "lr_factor": round(captured.recipe.learning_rate(updates / leg.updates), 5),
    }


def _facts(captured: Captured, row: dict[str, Any], command: str) -> dict[str, Any]:
    """The content of run.json: what `runs` has there, how far the run came, and what made it."""
    return {
        **captured.job.identity(),
        "pflop": row["pflop"],
        "updates": row["update"],
        "planned_updates": captured.leg.updates,
        "command": command,
        "seconds": row["seconds"],
        "hardware": machine.hardware(captured.device),
    }


def weights(captured: Captured) -> dict[str, Tensor]:
    """The averaged weights, as the finished model has them."""
    return {name: tensor.cpu().contiguous() for name, tensor in captured.ema.module.state_dict().items()}


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Train one model, and print its last and its best accuracy."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        with usage_errors(parser):
            captured, test, folder = _prepare(arguments, stack)
        if captured.on_gpu:
            torch.set_float32_matmul_precision("high")
            # with 64 tokens its backward pass can give NaN on sm90 (https://github.com/pytorch/pytorch/issues/196678)
            torch.backends.cuda.enable_cudnn_sdp(False)
        found = []
        for row in run(captured, test, folder, arguments.seconds, command(arguments)):
            found.append(row)
            print(
                f"epoch {row['epoch']:g}: {row['seconds']:.1f} s, loss {row['loss']:.4f}, "
                f"test top-1 {100 * row['test_top1']:.2f} %",
                flush=True,
            )
        runs.plot_history(folder)
    best = max(found, key=lambda row: row["test_top1"])
    print(
        f"{arguments.name}: last {100 * found[-1]['test_top1']:.2f} %; best, chosen on the test set, "
        f"{100 * best['test_top1']:.2f} % (epoch {best['epoch']:g})"
    )


def command(arguments: argparse.Namespace) -> str:
    """The command that trains it again, without the paths of one machine; the guard on the clock plays no part."""
    words = [arguments.name, "--out", f"runs/{arguments.name}", "--seed", str(arguments.seed)]
    return usage.command("paper", words, arguments, _parser())


def _prepare(arguments: argparse.Namespace, stack: ExitStack) -> tuple[Captured, cifar.Split, Path]:
    """Whatever can go wrong, before the work; the folder is kept for this run until the stack is closed."""
    _check_arguments(arguments)
    plots.import_figure()  # what draws the learning curve at the end, and
    machine.versions()  # what run.json says of the packages: if it is missing, that must show now
    on_gpu = arguments.device.startswith("cuda")
    recipe = RECIPES["paper"] if arguments.epochs is None else replace(RECIPES["paper"], epochs=arguments.epochs)
    precision = arguments.precision or ("bf16" if on_gpu else "fp32")
    split, test = (cifar.load(arguments.data, part).to(arguments.device) for part in ("train", "test"))
    captured = Captured(arguments.name, recipe, split, arguments.seed, precision, compile=on_gpu)
    folder = stack.enter_context(runs.open_folder(arguments.out, resume=False))
    return captured, test, folder


def _check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.name not in VARIANTS:
        raise ValueError(f"NAME {arguments.name!r} is not a name of the zoo ({', '.join(VARIANTS)})")
    machine.check_device(arguments.device)
    for option in ("epochs", "seconds"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{option} {value:g}: give a number above 0")
    if any(runs.read_history(Path(arguments.out))):
        raise FileExistsError(f"--out {arguments.out!r} holds a run already; give another")


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=first)
    parser.add_argument("name", metavar="NAME", help="a name of the zoo")
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100 (default: the variable RECURRENT_VIT_DATA)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, help="default: the recipe's 200")
    parser.add_argument("--seconds", type=float, help="begin no epoch that would end after them (default: no limit)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=evaluate.PRECISIONS, help="default: bf16 on a GPU, fp32 elsewhere")
    return parser


if __name__ == "__main__":
    main()
