"""The commands of the command line: each takes the parsed arguments, and prints.

One that has told of its failures returns 1; the others raise. torch and timm are imported after parsing, so that
--help and wrong usage take no seconds.
"""

import argparse
import ast
import atexit
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from . import printing
from .files import check_target, write_atomically

__all__ = [
    "classify_images", "evaluate_model", "export_model", "list_models", "push_folder", "run_script", "stage_run",
    "train_model", "verify_weights", "watch_dynamics",
]  # fmt: skip


def list_models(args: argparse.Namespace) -> None:
    """The zoo, or the checkpoints."""
    from . import weights, zoo

    if args.weights:
        rows = [row.meta if args.json else printing.checkpoint(row) for row in weights.checkpoints()]
    else:
        rows = [zoo.describe(name) for name in zoo.VARIANTS]
    if args.json:
        _write_json(args.json, rows)
    else:
        print(printing.markdown_table(rows) if args.markdown else printing.table(rows))


def classify_images(args: argparse.Namespace) -> int:
    """Pictures, each on its own: one that fails is told of, the others are still done."""
    from . import classify, runs
    from .limits import bounded_horizon

    paths = [Path(image) for image in args.images] or classify.samples()
    names = args.images or [path.name for path in paths]
    if args.plot:
        classify.check_plot(args.plot, paths)
    model, glyphs = runs.load_model(args.model), classify.glyphs_for(sys.stdout.encoding)
    horizon = bounded_horizon(model.horizon if args.horizon is None else args.horizon, model.depth)
    rows: list[Any] = []
    code = 0
    for name, path in zip(names, paths):
        try:
            image = classify.open_image(path)
            [answer] = classify.classify(model, [image], horizon=horizon)
        except (OSError, ValueError) as error:  # the other pictures are still done
            print(f"recurrent-vit: {error}", file=sys.stderr)
            code = 1
            continue
        read = _print(classify.text(answer, name, all_steps=args.all_steps, glyphs=glyphs))
        if not (read or args.plot):
            break
        if args.plot:
            image.thumbnail((512, 512))
            rows.append((path.name, image, answer))
    if rows:
        classify.plot(rows, args.plot, title=args.model)
    return code


def verify_weights(args: argparse.Namespace) -> None:
    """Check the checkpoints; those that fail are named at the end."""
    from . import machine, weights

    rows = [weights.find(name) for name in args.names] or weights.checkpoints()
    failed = []
    for row in rows:
        try:
            print(f"{row.id}: {weights.verify(row)}")
        except (OSError, ValueError) as error:
            failed.append(row.id)
            print(f"{row.id}: FAILED: {error}")
    print(", ".join(f"{name} {version}" for name, version in machine.versions().items()))
    if failed:
        raise ValueError(f"{len(failed)} of {len(rows)} checkpoints failed: {', '.join(failed)}")


def stage_run(args: argparse.Namespace) -> None:
    """Make a repository folder of a run, and print its row for the manifest."""
    from . import hub

    row = hub.stage(args.run, args.name, args.tag, args.hub, args.repo_id, args.results)
    print(f"{Path(args.hub) / row.id} is made; its row, for recurrent_vit/checkpoints.json:", file=sys.stderr)
    print(json.dumps(row.meta, indent=2))


def push_folder(args: argparse.Namespace) -> None:
    """Upload a repository folder, or say what would be uploaded."""
    from . import hub

    commit = hub.push(args.folder, args.repo_id, private=args.private, dry_run=args.dry_run)
    if args.dry_run:
        for name in hub.FILES:
            print(f"{args.repo_id}/{name}: {(Path(args.folder).expanduser() / name).stat().st_size:,} bytes")
        print("nothing was uploaded")
    else:
        print(commit)


def run_script(args: argparse.Namespace) -> None:
    """Run somebody's script with our names registered."""
    script = Path(args.script)
    if not script.is_file():
        raise FileNotFoundError(f"SCRIPT {args.script!r} is not a file; give the path of a Python script")
    sys.argv = [str(script), *args.arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:  # the script's own: as Python would show it, not as a mistake in using us
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def train_model(args: argparse.Namespace) -> None:
    """Train, then evaluate at the trained number of steps."""
    import timm
    import torch

    from . import cifar, machine, train, zoo
    from .recipes import RECIPES

    if args.name not in zoo.VARIANTS:
        raise ValueError(f"{args.name!r} is not a name of the zoo ({', '.join(zoo.VARIANTS)})")
    model_kwargs = dict(map(_key_value, args.model_kwargs))
    if alien := sorted(set(model_kwargs) - zoo.MODEL_ARGS):
        raise ValueError(f"--model-kwargs: {alien[0]} is not an argument of the model")
    try:
        timm.create_model(args.name, device="meta", **model_kwargs)
    except (TypeError, KeyError, AttributeError, AssertionError, RuntimeError) as error:  # unknown to timm, or refused
        raise ValueError(f"--model-kwargs: {error}") from error
    _use_device(args)
    split = cifar.load(args.data, "train")
    held: cifar.Split | None = None
    if args.held_out:
        rest, kept = cifar.held_out(split.labels, args.held_out)
        split, held = split[rest], split[kept]
    torch.set_flush_denormal(True)
    model = train.fit(
        args.name, RECIPES[args.recipe], split, args.out, seed=args.seed, pflop=args.pflop, device=args.device,
        precision=args.precision, compile=args.compile, resume=args.resume,
        model_kwargs=model_kwargs,
    )  # fmt: skip
    rows = _accuracy(model, held or cifar.load(args.data, "test"))
    if machine.place()[0] == 0:
        _write_json(str(Path(args.out) / ("held_out.jsonl" if held else "test.jsonl")), _labelled(rows, args))
        where = "held-out training images" if held else "test images"
        print(f"{args.name} on {rows[0]['count']} {where}:")
        print(printing.table(list(map(printing.accuracy, rows))))


def evaluate_model(args: argparse.Namespace) -> None:
    """Accuracy at some numbers of steps, or with early exit."""
    from . import anytime, cifar, evaluate, machine, plots, runs

    if args.plot:
        plots.check_plot(args.plot)
    _check_json(args.json)
    horizons = evaluate.parse_horizons(args.horizon) if args.horizon else None
    exits = None if args.anytime is None else anytime.parse(args.anytime)
    if exits is not None:
        _check_anytime(args, horizons, threshold=exits[1])
    _use_device(args)
    trained = model = runs.load_model(args.model)
    if changes := _changes(args):
        model = evaluate.rebuild(model, **changes)
    split = cifar.load(args.data, "train" if args.held_out else "test")
    if args.held_out:
        split = split[cifar.held_out(split.labels, args.held_out)[1]]
    split = cifar.sample(split, args.limit)
    if exits is not None:
        if horizons:
            model.set_horizon(horizons[0])
        _evaluate_anytime(args, model.to(args.device), split, *exits)
        return
    rows = _accuracy(
        model.to(args.device), split, horizons=horizons, batch_size=args.batch_size, precision=args.precision
    )
    if machine.place()[0] != 0:
        return
    if args.json:
        _write_json(args.json, [{"model": args.model, **row} for row in _labelled(rows, args)])
    if args.json != "-":
        _print(printing.table(list(map(printing.accuracy, rows))))
    if args.plot:
        as_long = trained.trained_horizon * (trained.step_size / model.step_size)
        plots.plot_sweep(rows, args.plot, _title(args), as_long)


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """How else the model is to be integrated: arguments of `evaluate.rebuild`."""
    return {name: getattr(args, name) for name in ("solver", "field", "step_size") if getattr(args, name) is not None}


def _title(args: argparse.Namespace) -> str:
    """Of a picture: the model, and what was changed."""
    changed = (f"{name.replace('_', ' ')} {value}" for name, value in _changes(args).items())
    return ", ".join([args.model, *changed])


def export_model(args: argparse.Namespace) -> None:
    """Write an ONNX file."""
    from . import export, runs

    export.check_target(args.file, args.int8)
    facts = export.export_onnx(runs.load_model(args.model), args.file, fixed_horizon=args.fixed_horizon, int8=args.int8)
    steps = "built in" if args.fixed_horizon else f"an input, trained with {facts['trained_horizon']}"
    size = Path(args.file).stat().st_size
    print(f"{args.file}: {size:,} bytes, {facts['precision']}, {facts['solver']}; number of steps: {steps}")


def _check_anytime(args: argparse.Namespace, horizons: tuple[int, ...] | None, threshold: float | None) -> None:
    if horizons and len(horizons) > 1:
        raise ValueError(f"--horizon {args.horizon!r}: with --anytime give one number of steps, the most for an image")
    if args.held_out and threshold is None:
        raise ValueError(
            f"--held-out {args.held_out}: a threshold would be calibrated on the images that it is evaluated on; give "
            f"--anytime {args.anytime}:THRESHOLD"
        )


def _evaluate_anytime(
    args: argparse.Namespace, model: Any, split: Any, criterion: str, threshold: float | None
) -> None:
    """Early exit on the split, at that threshold, or at one that is calibrated first."""
    from . import calibration, cifar, machine, plots
    from .anytime import Anytime

    options: dict[str, Any] = {"batch_size": args.batch_size, "precision": args.precision, "progress": True}
    origin: dict[str, Any] = {"calibrated_on": None, "max_lost": None}
    if threshold is None:
        train = cifar.load(args.data, "train")
        held = train[cifar.held_out(train.labels, calibration.HELD_OUT)[1]]
        threshold = calibration.calibrate(model, held, criterion, **options).threshold
        chosen_on = calibration.calibrated_on(args.model, len(held))
        origin = {"calibrated_on": chosen_on, "max_lost": calibration.MAX_LOST}
    row = {**calibration.measure(Anytime(model, criterion, threshold), split, **options), **origin}
    if machine.place()[0] != 0:
        return
    if args.json:
        _write_json(args.json, [{"model": args.model, **labelled} for labelled in _labelled([row], args)])
    if args.json != "-":
        _print(f"{printing.table([printing.early_exit(row)])}\n{printing.exits(row)}")
    if args.plot:
        records = calibration.record(model, split, [criterion], **options)[criterion]
        curves = [*calibration.uniform(records), *calibration.curve(records)]
        plots.plot_curve(curves, args.plot, _title(args), points=[row])


def watch_dynamics(args: argparse.Namespace) -> None:
    """Write the page of what the state does, and print its tables."""
    from . import cifar, dynamics, equilibrium, figures, machine, plots, runs

    plots.import_figure()
    for name in ("limit", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)} must be at least 1")
    _use_device(args)
    model = runs.load_model(args.model).to(args.device)
    horizon = dynamics.resolve_horizon(model, args.horizon)
    split, folder = cifar.sample(cifar.load(args.data, "test"), args.limit), Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)

    seen = dynamics.measure(model, split, horizon=horizon, batch_size=args.batch_size, progress=True)
    jacobians = dynamics.jacobians(model, split, horizon=horizon, progress=True)
    methods = _available_methods()
    if "dopri5" not in methods:
        print('recurrent-vit: dopri5 is not run; it needs pip install "recurrent-vit[ode]"', file=sys.stderr)
    solved = list(equilibrium.controls(model, split, methods=methods, progress=True))
    if machine.place()[0] != 0:
        return
    steps, solvers = dynamics.rows(seen, jacobians), [row for row, _ in solved]
    shown = [printing.step(row) for row in steps if row["step"] in printing.landmarks(seen)]
    compared = printing.controls(solvers, equilibrium.METHODS)
    title = f"{args.model}: {len(split)} test images, {horizon} steps (made for {seen.trained_horizon}), {model.solver}"
    controls = {row["method"]: solution for row, solution in solved}
    tables = {
        "The state": f"{printing.STEPS}\n\n{printing.markdown_table(shown)}",
        "Controls": f"{printing.CONTROLS}\n\n{printing.markdown_table(compared)}",
        "Made by": _origin(args, horizon),
    }

    _write_json(str(folder / "steps.jsonl"), [{"model": args.model, **row} for row in steps])
    _write_json(str(folder / "controls.jsonl"), [{"model": args.model, **row} for row in solvers])
    written = figures.write(folder, figures.Findings(title, seen, jacobians, controls), tables)
    print(printing.table(shown))
    print()
    print(printing.table(compared))
    print(f"{written[0]} has this and {len(written) - 1} pictures", file=sys.stderr)


def _origin(args: argparse.Namespace, horizon: int) -> str:
    """Command, date, machine and versions, of a page with measurements."""
    from datetime import date
    from importlib import metadata

    from .machine import hardware, versions

    here, packages = hardware(args.device), versions()
    if "dopri5" in _available_methods():
        packages["torchdiffeq"] = metadata.version("torchdiffeq")
    command = f"recurrent-vit dynamics {args.model} --data DIR --out DIR"
    return (
        f"`{command} --horizon {horizon} --limit {args.limit} --batch-size {args.batch_size} --device {args.device}`, "
        f"{date.today().isoformat()}; {here['gpu'] or here['cpu']}, {here['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in packages.items())
    )


def _available_methods() -> list[str]:
    """The controls that can be run here."""
    from importlib.util import find_spec

    from .equilibrium import METHODS

    return [name for name in METHODS if name != "dopri5" or find_spec("torchdiffeq") is not None]


def _labelled(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows with what they were measured on: "test", or "held out N"."""
    return [{"split": f"held out {args.held_out}" if args.held_out else "test", **row} for row in rows]


def _print(text: str) -> bool:
    """To standard output; false if nobody reads it any more, as behind `| head -1`: the rest can still be done."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _check_json(target: str | None) -> None:
    """Whether rows can be written there, to be asked before the minutes that they take."""
    if target not in (None, "-"):
        check_target(target, "--json")


def _write_json(target: str, rows: list[dict[str, Any]]) -> None:
    """Rows as JSON lines, into a file or, for "-", to standard output."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if target == "-":
        print(text, end="")
    else:
        write_atomically(Path(target), lambda file: file.write(text.encode()))


def _accuracy(model: Any, split: Any, **kwargs: Any) -> list[dict[str, Any]]:
    from .evaluate import evaluate

    return list(evaluate(model, split, progress=True, **kwargs))


def _key_value(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as Python reads it if it can, else as text."""
    key, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--model-kwargs {text!r}: give KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _use_device(args: argparse.Namespace) -> None:
    """Check the device, and join the processes that torchrun started, if it did, each with its own GPU."""
    import torch

    from . import machine

    joining = torch.distributed.is_torchelastic_launched() and not torch.distributed.is_initialized()
    if joining and args.device.startswith("cuda"):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    kind = machine.check_device(args.device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device}: give cpu or cuda")
    if not joining:
        return
    if kind == "cuda":
        torch.cuda.set_device(args.device)
    # objects, and the note that a signal came, go between the processes from CPU to CPU
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    atexit.register(torch.distributed.destroy_process_group)
