"""What the command line prints: rows as tables, and their columns as a person reads them."""

from collections.abc import Iterable
from typing import Any

__all__ = [
    "CONTROLS", "STEPS", "accuracy", "checkpoint", "controls", "early_exit", "exits", "landmarks", "markdown_table",
    "percent", "step", "table",
]  # fmt: skip

Row = dict[str, Any]


def table(rows: list[Row], gap: str = "  ") -> str:
    """Rows as aligned text under their keys: words to the left, numbers to the right."""
    if not rows:
        return "none"
    lines = [list(rows[0])] + [
        [f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows
    ]
    sides = [">" if isinstance(value, int) else "<" for value in rows[0].values()]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(gap.join(f"{cell:{s}{w}}" for cell, s, w in zip(line, sides, widths)) for line in lines)


def markdown_table(rows: list[Row]) -> str:
    """Rows as a table in Markdown."""
    if not rows:
        return table(rows)
    head, *lines = table(rows, gap=" | ").splitlines()
    rule = " | ".join("---:" if isinstance(value, int) else "---" for value in rows[0].values())
    return "\n".join(f"| {line} |" for line in [head, rule, *lines])


def percent(row: Row, name: str) -> str:
    """A fraction of a row and its standard error, in per cent or points.

    Example:
        >>> percent({"top1": 0.5988, "top1_stderr": 0.0049}, "top1")
        '59.88 ± 0.49'
    """
    return f"{100 * row[name]:.2f} ± {100 * row[f'{name}_stderr']:.2f}"


def checkpoint(row: Any) -> Row:
    """A checkpoint as a person reads it."""
    metrics = row.metrics
    return {
        "checkpoint": row.id,
        "parameters": row.parameters,
        "bytes": row.bytes,
        "top-1 %": percent(metrics, "top1"),
        "top-5 %": f"{100 * metrics['top5']:.2f}",
        "recipe": row.recipe,
        "PFLOP": f"{row.pflop:.3g}",
        "sha256": row.sha256[:12],
    }


def accuracy(row: Row) -> Row:
    """A row of `evaluate` as a person reads it."""
    return {
        "steps": row["horizon"],
        **_answers(row),
        "NFE": row["NFE"],
        "MACs": row["MACs"],
        "parameters": row["parameters"],
        "seconds": f"{row['seconds']:.1f}",
    }


def _answers(row: Row) -> Row:
    return {
        "top-1 %": percent(row, "top1"),
        "top-5 %": f"{100 * row['top5']:.2f}",
        "loss": "-" if row["loss"] is None else f"{row['loss']:.4f}",
        "not finite": row["non_finite"],
        "images": row["count"],
    }


def early_exit(row: Row) -> Row:
    """A row of `calibration.measure` as a person reads it."""
    return {
        "criterion": row["criterion"],
        "threshold": "never" if row["threshold"] is None else f"{row['threshold']:.9g}",  # enough to give it again
        "mean steps": f"{row['mean_steps']:.2f}",
        "mean NFE": f"{row['mean_NFE']:.2f}",
        "NFE": row["NFE"],
        "saved %": f"{100 * row['saved']:.1f}",
        **_answers(row),
        "seconds": f"{row['seconds']:.1f}",
    }


def exits(row: Row) -> str:
    """How many images took how many steps, and, where it was, what the threshold was calibrated on."""
    lines = [f"steps: {', '.join(f'{step} ({images} images)' for step, images in row['exits'].items())}"]
    if row["calibrated_on"]:
        line = (
            f"The threshold was calibrated on {row['calibrated_on']}, to lose at most {100 * row['max_lost']:g} points "
            "there."
        )
        if not row["calibrated_on"].endswith("held out"):
            line += " On images that it was trained on a model is too sure, and on others it loses more."
        lines.append(line)
    return "\n".join(lines)


STEPS = (
    "z is the state, u its last update, R the field; medians over the images, means for accuracy and entropy (nats). "
    "rms: root mean square of the numbers in z. step norm: |u| / |z before|. residual: |R(z)| / |z|, 0 at a fixed "
    "point. cosine: between u and the update before it. PR: participation ratio, the number of directions that the "
    "variance is spread over, of the tokens of all images and of their class states. CKA: similarity of the "
    "representation with that of the step before, and of the trained step. growth: factor by which the step that led "
    "here stretched a small change of the state, on the way; sigma_max and radius: largest singular value and spectral "
    "radius of the step's Jacobian here. A dash: there is no such number, or it was not measured at this step."
)
CONTROLS = (
    "Solvers on the first images: fixed_point repeats the step until the field vanishes, anderson accelerates that, "
    "dopri5 integrates up to the trained time with steps of its own choice. converged: the field fell to the tolerance "
    "(dopri5: the final time was reached). field left: |f| where it ended over |f| at the start, the median."
)


def landmarks(seen: Any) -> set[int]:
    """The steps that a table shows: 0, the powers of two, multiples of the trained number, the last."""
    powers = {2**k for k in range(seen.horizon.bit_length())}
    return powers | {0, seen.horizon, *(k * seen.trained_horizon for k in (1, 2, 4))}


def step(row: Row) -> Row:
    """A row of `dynamics.rows` as a person reads it."""
    return {
        "steps": row["step"],
        "NFE": row["NFE"],
        "top-1 %": percent(row, "top1"),
        "entropy": _digits(row["entropy"]),
        "rms": _digits(row["rms"]),
        "step norm": _digits(row["step_norm"]),
        "residual": _digits(row["residual"]),
        "cosine": _digits(row["cosine"]),
        "PR tokens": _digits(row["participation_tokens"]),
        "PR class": _digits(row["participation_class"]),
        "CKA before": _digits(row["cka_previous"]),
        "CKA trained": _digits(row["cka_trained"]),
        "growth": _digits(row["growth"]),
        "sigma_max": _digits(row["sigma_max"]),
        "radius": _digits(row["spectral_radius"]),
        "not finite": row["non_finite"],
        "images": row["count"],
    }


def controls(rows: Iterable[Row], methods: Iterable[str]) -> list[Row]:
    """Rows of `equilibrium.controls` as a person reads them, one for each method, whether or not it was run."""
    found = {row["method"]: _control(row) for row in rows}
    columns = next(iter(found.values()), {"method": ""})
    return [found.get(name, {**dict.fromkeys(columns, "not run"), "method": name}) for name in methods]


def _control(row: Row) -> Row:
    return {
        "method": row["method"],
        "NFE": row["NFE"],
        "converged %": f"{100 * row['converged']:.1f}",
        "field left": _digits(row["field_left"]),
        "top-1 %": percent(row, "top1"),
        "not finite": row["non_finite"],
        "images": row["count"],
    }


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
