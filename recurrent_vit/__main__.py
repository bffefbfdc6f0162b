"""The command line: `recurrent-vit COMMAND ...`, also `python -m recurrent_vit COMMAND ...`.

Results go to standard output, progress and warnings to standard error. Exit codes: 0 done, 1 failed, with a message
that says why, 2 wrong usage, 130 interrupted. torch and timm are imported after parsing.
"""

import argparse
import io
import os
import sys

from . import __version__, commands

# Errors that the user can act on are shown in one line; anything else is a bug of ours and keeps its traceback.
MISTAKES = (OSError, ValueError, ImportError, FloatingPointError)


def main(argv: list[str] | None = None) -> int:
    """Run one command; `argv` defaults to the program's own arguments. Returns the exit code.

    Example:
        >>> main(["run", "no/such/script.py"])
        1
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (stays open)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without "±" still gets its table
    args = _parser().parse_args(argv)
    code = 0
    try:
        from . import zoo  # noqa: F401 (registers the names with timm, for whatever the command builds)

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
MODEL = "NAME|RUN|local-dir:PATH|hf-hub:ORG/NAME"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recurrent-vit", description="Recurrent Vision Transformers for timm.")
    parser.add_argument("--version", action="version", version=f"recurrent-vit {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)

    add = subparsers.add_parser(
        "list", help="the zoo: size and cost of every name", description="The zoo, one row per name."
    )
    style = add.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="as a Markdown table")
    style.add_argument("--json", nargs="?", const="-", metavar="FILE", help=JSON_HELP)
    add.add_argument("--weights", action="store_true", help="the checkpoints that come with the package instead")
    add.set_defaults(command=commands.list_models)

    add = subparsers.add_parser(
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
    add.set_defaults(command=commands.classify_images)

    add = subparsers.add_parser(
        "verify",
        help="check the weights that come with the package",
        description="Check every checkpoint (or those named): sha256, and the logits of a fixed image.",
    )
    add.add_argument("names", metavar="NAME", nargs="*", help="NAME or NAME.TAG; default: all")
    add.set_defaults(command=commands.verify_weights)

    add = subparsers.add_parser(
        "run",
        help="run a script, such as timm's validate.py, with our names registered",
        description="Run a Python script with the names of the zoo registered with timm, e.g. "
        "`recurrent-vit run validate.py --model bvit ...`.",
    )
    add.add_argument("script", metavar="SCRIPT", help="path of the script")
    add.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    add.set_defaults(command=commands.run_script)

    add = subparsers.add_parser("train", help="train a model on CIFAR-100", description="Train a model on CIFAR-100.")
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
    add.set_defaults(command=commands.train_model)

    add = subparsers.add_parser("evaluate", help="accuracy on the test images", description="Accuracy on CIFAR-100.")
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
    add.add_argument("--limit", type=int, metavar="N", help="on N images, always the same")
    add.add_argument("--batch-size", type=int, default=250, help="default: 250")
    _add_device(add, precision="fp32")
    add.add_argument("--json", nargs="?", const="-", metavar="FILE", help=JSON_HELP)
    add.add_argument(
        "--plot", metavar="FILE", help="draw accuracy against steps, or, with --anytime, against mean evaluations"
    )
    add.set_defaults(command=commands.evaluate_model)

    add = subparsers.add_parser(
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
    add.set_defaults(command=commands.export_model)

    add = subparsers.add_parser(
        "dynamics",
        help="what the state does from step to step: a table and pictures",
        description="Watch the state of a model on CIFAR-100 test images from step to step, far beyond the trained "
        "number; write dynamics.md with tables and captioned pictures, and the rows as JSON lines.",
    )
    add.add_argument("model", metavar=MODEL, help="a pretrained name, a folder of one, or of a run")
    _add_data(add)
    add.add_argument("--out", required=True, metavar="DIR", help="folder for what is written")
    add.add_argument("--horizon", type=int, metavar="H", help="steps to run; default: four times the trained number")
    add.add_argument("--limit", type=int, default=512, metavar="N", help="on N images, always the same; default: 512")
    add.add_argument("--batch-size", type=int, default=64, help="default: 64")
    add.add_argument("--device", default="cpu", help="default: cpu")
    add.set_defaults(command=commands.watch_dynamics)

    add = subparsers.add_parser(
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
    add.set_defaults(command=commands.stage_run)

    add = subparsers.add_parser(
        "push",
        help="upload a repository folder to the Hugging Face Hub",
        description="Upload a folder made by `stage`, and print the commit to pin.",
    )
    add.add_argument("folder", metavar="FOLDER", help="e.g. hub/bvit.short_c100")
    add.add_argument("--repo-id", required=True, metavar="ORG/NAME")
    add.add_argument("--private", action="store_true", help="make the repository private, if it is made")
    add.add_argument("--dry-run", action="store_true", help="check the folder, and say what would be uploaded")
    add.set_defaults(command=commands.push_folder)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-100; default: the variable RECURRENT_VIT_DATA")


def _add_device(parser: argparse.ArgumentParser, precision: str | None) -> None:
    default = precision or "bf16 on a GPU, fp32 elsewhere"
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=precision, help=f"default: {default}")


if __name__ == "__main__":
    sys.exit(main())
