"""The command line: `recurrent-vit COMMAND ...`, also `python -m recurrent_vit COMMAND ...`.

Results go to standard output, progress and warnings to standard error. Exit codes: 0 done, 1 failed with one line that
says why, 2 wrong usage. torch and timm are imported by the commands, not by the parser.
"""

import argparse
import ast
import atexit
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from . import printing

# Errors that the user can act on are shown in one line; anything else is a bug of ours and keeps its traceback.
MISTAKES = (OSError, ValueError, ImportError, FloatingPointError, InterruptedError)


def main(argv: list[str] | None = None) -> int:
    """Run one command; `argv` defaults to the program's own arguments. Returns the exit code.

    Example:
        >>> main(["run", "no/such/script.py"])
        1
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without "±" still gets its table
    args = _parser().parse_args(argv)
    code = 0
    try:
        code = args.command(args) or 0  # a command that has told of its failures returns 1
        sys.stdout.flush()  # a closed pipe shows here, not at exit
    except BrokenPipeError:  # `recurrent-vit list | head -1` is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MISTAKES as error:
        print(f"recurrent-vit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("recurrent-vit: interrupted", file=sys.stderr)
        return 130
    return code


JSON_HELP = "as JSON lines, into FILE or to standard output"
MODEL = "NAME|local-dir:PATH|RUN"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recurrent-vit", description="Recurrent Vision Transformers for timm.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add = commands.add_parser(
        "list", help="the zoo: size and cost of every name", description="The zoo, one row per name."
    )
    style = add.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="as a Markdown table")
    style.add_argument("--json", nargs="?", const="-", metavar="FILE", help=JSON_HELP)
    add.add_argument("--weights", action="store_true", help="the checkpoints that come with the package instead")
    add.set_defaults(command=_list)

    add = commands.add_parser(
        "classify",
        help="what a model sees in pictures, and how its answer forms; offline",
        description="The five most probable classes of each picture, and how their probabilities went over the steps. "
        "Of a picture that is not square the central square is looked at.",
    )
    add.add_argument("images", metavar="IMAGE", nargs="*", help="default: photographs that come with the package")
    add.add_argument("--model", default="bvit", metavar=MODEL, help="default: bvit; its weights are in the package")
    add.add_argument("--horizon", type=int, metavar="N", help="number of steps; default: the model's own")
    add.add_argument("--all-steps", action="store_true", help="a line for each step: its most probable class")
    add.add_argument("--plot", metavar="FILE", help="draw each picture beside its probabilities against steps")
    add.set_defaults(command=_classify)

    add = commands.add_parser(
        "verify",
        help="check the weights that come with the package",
        description="Check every checkpoint (or those named): sha256, and the logits of a fixed image.",
    )
    add.add_argument("names", metavar="NAME", nargs="*", help="NAME or NAME.TAG; default: all")
    add.set_defaults(command=_verify)

    add = commands.add_parser(
        "run",
        help="run a script, such as timm's validate.py, with our names registered",
        description="Run a Python script with the names of the zoo registered with timm, e.g. "
        "`recurrent-vit run validate.py --model bvit ...`.",
    )
    add.add_argument("script", metavar="SCRIPT", help="path of the script")
    add.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    add.set_defaults(command=_run)

    add = commands.add_parser("train", help="train a model on CIFAR-100", description="Train a model on CIFAR-100.")
    add.add_argument("name", metavar="NAME", help="a name of the zoo")
    add.add_argument("--recipe", choices=("short", "paper"), default="short", help="default: short")
    _add_data(add)
    add.add_argument("--out", required=True, metavar="DIR", help="folder of the run")
    add.add_argument("--seed", type=int, default=0, help="default: 0")
    add.add_argument("--pflop", type=float, help="compute to spend, in 1e15 FLOP; default: the recipe's")
    add.add_argument("--held-out", type=int, default=0, metavar="N", help="set N training images aside, to evaluate on")
    add.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    _add_device(add, precision=None)
    add.add_argument("--compile", action="store_true", help="compile the blocks")
    add.add_argument("--model-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="e.g. field=black_box")
    add.set_defaults(command=_train)

    add = commands.add_parser("evaluate", help="accuracy on the test images", description="Accuracy on CIFAR-100.")
    add.add_argument("model", metavar=MODEL, help="a pretrained name, a folder of one, or of a run")
    _add_data(add)
    add.add_argument("--horizon", metavar="1,2,4,...", help="numbers of steps, in one pass; default: the model's own")
    add.add_argument("--solver", help="another solver, with the same weights")
    add.add_argument("--field", help="another field, with the same weights")
    add.add_argument("--step-size", type=float, help="another step size, with the same weights")
    add.add_argument(
        "--anytime",
        metavar="CRITERION[:THRESHOLD]",
        help="stop each image when it is sure: confidence:0.9, margin:0.8, stable:3 or step_norm:0.1; without a "
        "threshold, one is calibrated on training images",
    )
    add.add_argument(
        "--held-out",
        type=int,
        default=0,
        metavar="N",
        help="on the N training images that train --held-out N set aside",
    )
    add.add_argument("--limit", type=int, metavar="N", help="the first N images only")
    add.add_argument("--batch-size", type=int, default=250, help="default: 250")
    _add_device(add, precision="fp32")
    add.add_argument("--json", nargs="?", const="-", metavar="FILE", help=JSON_HELP)
    add.add_argument(
        "--plot", metavar="FILE", help="draw accuracy against steps, or, with --anytime, against mean evaluations"
    )
    add.set_defaults(command=_evaluate)

    add = commands.add_parser(
        "export",
        help="write a model as an ONNX file",
        description="Write a model as one ONNX file, with inputs image and steps. An existing file is replaced.",
    )
    add.add_argument("model", metavar=MODEL, help="a pretrained name, a folder of one, or of a run")
    add.add_argument("file", metavar="FILE.onnx", help="the file to write")
    add.add_argument("--int8", action="store_true", help="quantise the products with weights")
    add.add_argument(
        "--fixed-horizon", type=int, metavar="N", help="N steps one after the other, without a loop and the input steps"
    )
    add.set_defaults(command=_export)

    add = commands.add_parser(
        "dynamics",
        help="what the state does from step to step: a table and pictures",
        description="Watch the state of a model on CIFAR-100 test images from step to step, far beyond the trained "
        "number; write dynamics.md with tables and captioned pictures, and the rows as JSON lines.",
    )
    add.add_argument("model", metavar=MODEL, help="a pretrained name, a folder of one, or of a run")
    _add_data(add)
    add.add_argument("--out", required=True, metavar="DIR", help="folder for what is written")
    add.add_argument("--horizon", type=int, metavar="H", help="steps to run; default: four times the trained number")
    add.add_argument("--limit", type=int, default=512, metavar="N", help="the first N images; default: 512")
    add.add_argument("--batch-size", type=int, default=64, help="default: 64")
    add.add_argument("--device", default="cpu", help="default: cpu")
    add.set_defaults(command=_dynamics)

    add = commands.add_parser(
        "stage",
        help="make a repository folder of a run",
        description="Make hub/NAME.TAG (config.json, model.safetensors, README.md) of a finished and evaluated run, "
        "and print its row for the manifest.",
    )
    add.add_argument("run", metavar="RUN", help="folder of the run, with test.jsonl")
    add.add_argument(
        "--name", required=True, help="the architecture: that of the run, or one that is the same function"
    )
    add.add_argument("--tag", required=True, help="of the weights, e.g. short_c100")
    add.add_argument("--hub", default="hub", metavar="DIR", help="where to make it; default: hub")
    add.add_argument(
        "--repo-id", default="", metavar="ORG/NAME", help="the repository that the card tells users to load"
    )
    add.add_argument("--results", metavar="FILE", help="what it scored on the test images; default: RUN/test.jsonl")
    add.set_defaults(command=_stage)

    add = commands.add_parser(
        "push",
        help="upload a repository folder to the Hugging Face Hub",
        description="Upload a folder made by `stage`, and print the commit to pin.",
    )
    add.add_argument("folder", metavar="FOLDER", help="e.g. hub/bvit.short_c100")
    add.add_argument("--repo-id", required=True, metavar="ORG/NAME")
    add.add_argument("--private", action="store_true", help="make the repository private, if it is made")
    add.add_argument("--dry-run", action="store_true", help="check the folder, and say what would be uploaded")
    add.set_defaults(command=_push)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100; default: the variable RECURRENT_VIT_DATA")


def _add_device(parser: argparse.ArgumentParser, precision: str | None) -> None:
    default = precision or "bf16 on a GPU, fp32 elsewhere"
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=precision, help=f"default: {default}")


def _list(args: argparse.Namespace) -> None:
    from . import weights, zoo

    if args.weights:
        rows = [row.meta if args.json else printing.checkpoint(row) for row in weights.checkpoints()]
    else:
        rows = [zoo.describe(name) for name in zoo.VARIANTS]
    if args.json:
        _write_json(args.json, rows)
    else:
        print(printing.markdown_table(rows) if args.markdown else printing.table(rows))


def _classify(args: argparse.Namespace) -> int:
    from . import classify
    from .limits import bounded_horizon

    paths = [Path(image) for image in args.images] or classify.samples()
    names = args.images or [path.name for path in paths]
    if args.plot:
        classify.check_plot(args.plot, paths)
    model, glyphs = _load(args.model), classify.glyphs_for(sys.stdout.encoding)
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
        print(classify.text(answer, name, all_steps=args.all_steps, glyphs=glyphs))
        if args.plot:
            image.thumbnail((512, 512))
            rows.append((path.name, image, answer))
    if rows:
        classify.plot(rows, args.plot, title=args.model)
    return code


def _verify(args: argparse.Namespace) -> None:
    from . import runs, weights

    rows = [weights.find(name) for name in args.names] or weights.checkpoints()
    failed = []
    for row in rows:
        try:
            print(f"{row.id}: {weights.verify(row)}")
        except (OSError, ValueError) as error:
            failed.append(row.id)
            print(f"{row.id}: FAILED: {error}")
    print(", ".join(f"{name} {version}" for name, version in runs.versions().items()))
    if failed:
        raise ValueError(f"{len(failed)} of {len(rows)} checkpoints failed: {', '.join(failed)}")


def _stage(args: argparse.Namespace) -> None:
    from . import hub

    row = hub.stage(args.run, args.name, args.tag, args.hub, args.repo_id, args.results)
    print(f"{Path(args.hub) / row.id} is made; its row, for recurrent_vit/checkpoints.json:", file=sys.stderr)
    print(json.dumps(row.meta, indent=2))


def _push(args: argparse.Namespace) -> None:
    from . import hub

    commit = hub.push(args.folder, args.repo_id, private=args.private, dry_run=args.dry_run)
    if args.dry_run:
        for name in hub.FILES:
            print(f"{args.repo_id}/{name}: {(Path(args.folder) / name).stat().st_size:,} bytes")
        print("nothing was uploaded")
    else:
        print(commit)


def _run(args: argparse.Namespace) -> None:
    script = Path(args.script)
    if not script.is_file():
        raise FileNotFoundError(f"SCRIPT {args.script!r} is not a file; give the path of a Python script")
    from . import zoo  # noqa: F401 (registers the names with timm)

    sys.argv = [str(script), *args.arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:  # the script's own: as Python would show it, not as a mistake in using us
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _train(args: argparse.Namespace) -> None:
    import timm
    import torch

    from . import cifar, runs, train, zoo
    from .recipes import RECIPES

    if args.name not in zoo.VARIANTS:
        raise ValueError(f"{args.name!r} is not a name of the zoo ({', '.join(zoo.VARIANTS)})")
    model_kwargs = dict(map(_key_value, args.model_kwargs))
    if alien := sorted(runs.NOT_OF_THE_MODEL & set(model_kwargs)):
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
    if runs.place()[0] == 0:
        _write_json(str(Path(args.out) / ("held_out.jsonl" if held else "test.jsonl")), _labelled(rows, args))
        where = "held-out training images" if held else "test images"
        print(f"{args.name} on {rows[0]['count']} {where}:")
        print(printing.table(list(map(printing.accuracy, rows))))


def _evaluate(args: argparse.Namespace) -> None:
    from . import anytime, cifar, evaluate, runs

    if args.plot:
        evaluate.check_plot(args.plot)
    if args.json and args.json != "-" and not Path(args.json).parent.is_dir():
        raise FileNotFoundError(f"--json {args.json!r}: there is no folder {str(Path(args.json).parent)!r}")
    horizons = evaluate.parse_horizons(args.horizon) if args.horizon else None
    exits = None if args.anytime is None else anytime.parse(args.anytime)
    if exits is not None:
        _check_anytime(args, horizons, threshold=exits[1])
    _use_device(args)
    model = _load(args.model)
    if args.solver or args.field or args.step_size is not None:
        model = evaluate.rebuild(model, solver=args.solver, field=args.field, step_size=args.step_size)
    split = cifar.load(args.data, "train" if args.held_out else "test")
    if args.held_out:
        split = split[cifar.held_out(split.labels, args.held_out)[1]]
    if args.limit is not None:
        if args.limit < 1:
            raise ValueError(f"limit={args.limit} must be at least 1")
        split = split[: args.limit]
    if exits is not None:
        if horizons:
            model.set_horizon(horizons[0])
        _evaluate_anytime(args, model.to(args.device), split, *exits)
        return
    rows = _accuracy(
        model.to(args.device), split, horizons=horizons, batch_size=args.batch_size, precision=args.precision
    )
    if runs.place()[0] != 0:
        return
    if args.json:
        _write_json(args.json, [{"model": args.model, **row} for row in _labelled(rows, args)])
    if args.json != "-":
        print(printing.table(list(map(printing.accuracy, rows))))
    if args.plot:
        evaluate.plot_sweep(rows, args.plot, title=args.model)


def _export(args: argparse.Namespace) -> None:
    from . import export

    export.check_target(args.file, args.int8)
    facts = export.export_onnx(_load(args.model), args.file, fixed_horizon=args.fixed_horizon, int8=args.int8)
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
    from . import calibration, cifar, runs
    from .anytime import Anytime

    options: dict[str, Any] = {"batch_size": args.batch_size, "precision": args.precision, "progress": True}
    origin: dict[str, Any] = {"calibrated_on": None, "allowed_loss": None}
    images = 0
    if threshold is None:
        train = cifar.load(args.data, "train")
        held = train[cifar.held_out(train.labels, calibration.HELD_OUT)[1]]
        threshold, images = calibration.calibrate(model, held, criterion, **options).threshold, len(held)
        origin = {"calibrated_on": f"held out {images}", "allowed_loss": calibration.LOSS}
    row = {**calibration.measure(Anytime(model, criterion, threshold), split, **options), **origin}
    if runs.place()[0] != 0:
        return
    if args.json:
        _write_json(args.json, [{"model": args.model, **labelled} for labelled in _labelled([row], args)])
    if args.json != "-":
        print(printing.table([printing.early_exit(row)]))
        print(printing.exits(row, images))
    if args.plot:
        records = calibration.record(model, split, [criterion], **options)[criterion]
        curves = [*calibration.uniform(records), *calibration.curve(records)]
        calibration.plot_curve(curves, args.plot, title=args.model, points=[row])


def _dynamics(args: argparse.Namespace) -> None:
    from . import cifar, dynamics, equilibrium, figures, runs

    if args.limit < 1:
        raise ValueError(f"limit={args.limit} must be at least 1")
    runs.import_figure()
    _use_device(args)
    model = _load(args.model).to(args.device)
    horizon = dynamics.resolve_horizon(model, args.horizon)
    split, folder = cifar.load(args.data, "test")[: args.limit], Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)

    seen = dynamics.measure(model, split, horizon=horizon, batch_size=args.batch_size, progress=True)
    jacobians = dynamics.jacobians(model, split, horizon=horizon, progress=True)
    solved = list(equilibrium.controls(model, split, methods=_available_methods(), progress=True))
    steps, solvers = dynamics.rows(seen, jacobians), [row for row, _ in solved]
    shown = [printing.step(row) for row in steps if row["step"] in printing.landmarks(seen)]
    compared = list(map(printing.control, solvers))
    title = f"{args.model}: {len(split)} test images, {horizon} steps (made for {seen.trained_horizon}), {model.solver}"
    controls = {row["method"]: solution for row, solution in solved}
    tables = {
        "The state": f"{printing.STEPS}\n\n{printing.markdown_table(shown)}",
        "Controls": f"{printing.CONTROLS}\n\n{printing.markdown_table(compared) if compared else 'not run'}",
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

    from . import runs

    machine, command = runs.hardware(args.device), f"recurrent-vit dynamics {args.model} --horizon {horizon}"
    versions = ", ".join(f"{name} {version}" for name, version in runs.versions().items())
    return (
        f"`{command} --limit {args.limit} --device {args.device}`, {date.today().isoformat()}; "
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads; {versions}"
    )


def _available_methods() -> list[str]:
    """The controls that can be run here; a line on standard error says if one can't."""
    from importlib.util import find_spec

    from .equilibrium import METHODS

    if find_spec("torchdiffeq") is not None:
        return list(METHODS)
    print('recurrent-vit: dopri5 is not run; it needs pip install "recurrent-vit[ode]"', file=sys.stderr)
    return [name for name in METHODS if name != "dopri5"]


def _labelled(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows with what they were measured on: "test", or "held out N"."""
    return [{"split": f"held out {args.held_out}" if args.held_out else "test", **row} for row in rows]


def _write_json(target: str, rows: list[dict[str, Any]]) -> None:
    """Rows as JSON lines, into a file or, for "-", to standard output."""
    from . import runs

    text = "".join(json.dumps(row) + "\n" for row in rows)
    if target == "-":
        print(text, end="")
    else:
        runs.write_atomically(Path(target), lambda file: file.write(text.encode()))


def _accuracy(model: Any, split: Any, **kwargs: Any) -> list[dict[str, Any]]:
    from .evaluate import evaluate

    return list(evaluate(model, split, progress=True, **kwargs))


def _load(text: str) -> Any:
    """The model of a name with weights, of `local-dir:PATH`, or of the folder of a run."""
    import timm

    from . import runs, zoo

    if Path(text).is_dir():
        return runs.load_result(Path(text))
    if not text.startswith(("local-dir:", "hf-hub:")):
        if text.partition(".")[0] not in zoo.VARIANTS:
            raise ValueError(f"{text!r} is neither a folder nor a name of the zoo ({', '.join(zoo.VARIANTS)})")
        if not timm.is_model_pretrained(text):
            raise ValueError(f"{text!r} has no published weights; give the folder of a run, or local-dir:PATH")
    return timm.create_model(text, pretrained=True)


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

    try:
        kind = torch.device(args.device).type
    except RuntimeError as error:
        raise ValueError(f"--device {args.device!r}: {str(error).splitlines()[0]}") from error
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device!r}: give cpu or cuda")
    on_gpu = kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device!r}: torch sees no GPU here")
    if "TORCHELASTIC_RUN_ID" not in os.environ or torch.distributed.is_initialized():
        return
    if on_gpu:
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    atexit.register(torch.distributed.destroy_process_group)


if __name__ == "__main__":
    sys.exit(main())
