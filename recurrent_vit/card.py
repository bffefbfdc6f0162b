"""The card of a checkpoint: README.md of its repository, a function of its row alone."""

from __future__ import annotations

import shlex
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCardData

from .cifar import ROWS
from .classify import bar
from .printing import percent
from .recipes import PFLOP, RECIPES, make_plan
from .weights import Checkpoint
from .zoo import VARIANTS

__all__ = ["card"]

DATASET = "uoft-cs/cifar100"
PAPER = "https://arxiv.org/abs/2608.04879"


def card(row: Checkpoint) -> str:
    """The content of README.md: metadata for the Hub, then what a user must know.

    Example:
        >>> from recurrent_vit import checkpoints
        >>> all(card(row).startswith("---") for row in checkpoints())
        True
    """
    metrics, recipe = row.metrics, RECIPES[row.recipe]
    model: Any = timm.create_model(row.name, device="meta", **row.model_kwargs)
    fields = {
        **row.meta,
        "id": row.id,
        "summary": VARIANTS[row.name].summary,
        "parameters": f"{row.parameters:,}",
        "size": f"{row.bytes / 1e6:.1f} MB",
        "macs": f"{model.macs / 1e6:,.0f}",
        "source": f"hf-hub:{row.repo}" if row.repo else row.id,
        "top1": f"{percent(metrics, 'top1')} %",
        "top5": f"{100 * metrics['top5']:.2f} %",
        "loss": f"{metrics['loss']:.3f}",
        "count": f"{metrics['count']:,}",
        "horizon": metrics["horizon"],
        "horizons": ",".join(row.sweep),
        "chart": _chart(row),
        "recipe_source": recipe.source + ("" if _is_default(row) else f" This run had {row.pflop:.3g} PFLOP of it."),
        "trained_on": row.trained_on,
        "publish": {"raw": "raw, not averaged", "ema": "their moving average"}[recipe.publish],
        "pflop": f"{row.pflop:.3g}",
        "hours": f"{row.seconds / 3600:.1f}",
        "hardware": f"{row.hardware['gpu'] or row.hardware['cpu']}, {row.hardware['threads']} threads",
        "versions": ", ".join(f"{name} {version}" for name, version in row.versions.items()),
        "command": row.command or _command(row),
        **_of_shared_weights(row),
        "paper": PAPER,
    }
    return f"---\n{_metadata(row).to_yaml()}\n---\n\n{BODY.format(**fields)}"


def _command(row: Checkpoint) -> str:
    """The command of `train` that made it, with the options that are not at their default."""
    left = row.images
    options = {
        "--pflop": "" if _is_default(row) else f"{row.pflop:g}",
        "--held-out": str(ROWS["train"] - left) if left < ROWS["train"] else "",
        "--precision": row.precision if row.precision != "fp32" else "",
        "--device": "cuda" if row.hardware["gpu"] else "",
        "--model-kwargs": " ".join(shlex.quote(f"{key}={value}") for key, value in row.model_kwargs.items()),
    }
    given = "".join(f" {name} {value}" for name, value in options.items() if value)
    name = _run_of(row)
    return f"recurrent-vit train {name} --recipe {row.recipe} --seed {row.seed}{given} --data DIR --out runs/{name}"


def _run_of(row: Checkpoint) -> str:
    """The name whose run it was."""
    return (row.same_as or row.id).split(".")[0]


def _of_shared_weights(row: Checkpoint) -> dict[str, str]:
    """What the card says otherwise of weights that another name has too."""
    if not row.same_as:
        return {"run": row.name, "shared": "", "solver": "", "results": "test.jsonl"}
    told = (
        f"There was no run of its own: these are the weights of `{row.same_as}`, bit for bit. Euler's method with step "
        "size 1\nalong F(z) - z is the plain recurrence, so both names are the same function.\n\n"
    )
    return {"run": _run_of(row), "shared": told, "solver": " --solver euler", "results": "test.euler.jsonl"}


def _is_default(row: Checkpoint) -> bool:
    """Whether the compute is what the recipe spends when nothing is asked for, up to an update."""
    recipe = RECIPES[row.recipe]
    budget = recipe.pflop
    if budget is None:  # it has epochs, which cost what the model costs
        budget = sum(leg.flop for leg in make_plan(row.name, recipe, row.images, **row.model_kwargs)) / PFLOP
    return abs(row.pflop - budget) < 0.001 * budget


def _metadata(row: Checkpoint) -> ModelCardData:
    def result(metric: str, label: str) -> EvalResult:
        return EvalResult(
            task_type="image-classification",
            dataset_type=DATASET,
            dataset_name="CIFAR-100",
            dataset_split="test",
            metric_type="accuracy",
            metric_name=label,
            metric_value=round(100 * row.metrics[metric], 2),
        )

    return ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        license=row.license,
        datasets=[DATASET],
        metrics=["accuracy"],
        tags=["timm", "transformers", "recurrent-vit", "image-classification", "arxiv:2608.04879"],
        model_name=row.id,
        eval_results=[result("top1", "top-1 accuracy, %"), result("top5", "top-5 accuracy, %")],
    )


def _chart(row: Checkpoint) -> str:
    """Accuracy against steps as bars of text, which every viewer shows and no drawing library's release changes."""
    most = max(result["top1"] for result in row.sweep.values())
    lines = []
    for steps, result in row.sweep.items():
        mark = "  <- trained" if int(steps) == row.metrics["horizon"] else ""
        lost = f"  ({result['non_finite']:,} images without finite logits)" if result["non_finite"] else ""
        lines.append(f"{steps:>5}  {100 * result['top1']:5.2f} %  {bar(result['top1'] / most, cells=40)}{mark}{lost}")
    return "\n".join(["steps    top-1", *lines])


BODY = """# {id}

A recurrent Vision Transformer for CIFAR-100 ({summary}). {parameters} parameters ({size}, float32), {macs} million
multiply-accumulates an image. It belongs to the Python package recurrent-vit, which implements "Training Crossroads for
Recurrent Vision Transformers" ([arXiv 2608.04879]({paper})); these are not the authors' weights.

## Use

```python
import timm, torch, recurrent_vit                                # the import registers the name with timm
from PIL import Image
model = timm.create_model("{source}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
probabilities = model(transform(Image.open("picture.png").convert("RGB"))[None]).softmax(-1)
```

`model.set_horizon(24)` runs another number of steps. transformers loads a folder or repository of this form with
`AutoModelForImageClassification.from_pretrained`, after `import recurrent_vit`.

## Accuracy

On the {count} test images of CIFAR-100, which played no part in any choice, after the {horizon} steps that it was
trained with: **top-1 {top1}** (standard error over the images), top-5 {top5}, cross-entropy {loss} nats. After other
numbers of steps, without any further training:

```text
{chart}
```

## Training

{shared}\
{trained_on}; recipe `{recipe}`, {pflop} PFLOP in {hours} hours on {hardware}; {versions}; seed {seed}, one run; {date}.
These are the weights after the last update ({publish}). The recipe is {recipe_source}

To reproduce it:

```bash
{command}
recurrent-vit evaluate runs/{run}{solver} --data DIR --horizon {horizons} --json runs/{run}/{results}
```

Other machines, numbers of threads and versions round differently, and end with other weights of about this accuracy.

## Limits

It knows the 100 classes of CIFAR-100 and will name one of them for any picture. It sees 32 x 32 pixels, to which larger
pictures are reduced, so small things are lost. Five classes are people (baby, boy, girl, man, woman),
and many are animals; the images were collected from the web by search terms, with the errors and prejudices of that,
and the model is not fit to decide anything about a person. It is an object of research, far from the accuracy of large
models.

## Citation

```bibtex
@misc{{crossroads2026,
  title         = {{Training Crossroads for Recurrent Vision Transformers: Recurrence, Neural {{ODE}}s, and Deep
                   Supervision}},
  year          = {{2026}},
  eprint        = {{2608.04879}},
  archivePrefix = {{arXiv}}
}}
```
"""
