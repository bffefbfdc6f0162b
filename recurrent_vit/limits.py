"""What a configuration may ask for, checked before any memory is spent.

Names and numbers can come from a file that somebody else wrote. Each check raises a ValueError with the argument, its
value, and what is allowed. The bounds lie far above any use, and low enough that a hostile configuration fails at once.
"""

import math
from inspect import signature
from operator import index
from typing import Any

from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer

from . import solvers

__all__ = [
    "FIELDS",
    "LIMITS",
    "PLAIN",
    "bounded_horizon",
    "bounded_int",
    "bounded_number",
    "check_integration",
    "check_sizes",
    "get_tableau",
]

PLAIN = "plain"
FIELDS = ("state_subtracted", "black_box")

LIMITS = {
    "depth": 1_000,
    "steps": 10_000,
    "stages": 10_000,
    "horizon": 10_000,
    "embed_dim": 16_384,
    "num_heads": 1_024,
    "in_chans": 4_096,
    "reg_tokens": 4_096,
    "num_classes": 1_000_000,
    "mlp_ratio": 64,
    "img_size": 16_384,
    "patch_size": 1_024,
}
MAX_STEP_SIZE = 10_000
MAX_PARAMETERS = 2**28
MAX_NUMBERS_IN_STATE = 2**26
MAX_STATES = 20_000


def bounded_int(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int, if it is one from `least` to `LIMITS[name]`; otherwise a ValueError that says so."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= LIMITS[name]:
        raise ValueError(f"{name}={value!r} must be an integer from {least} to {LIMITS[name]}")
    return number


def _is_no_number(value: Any) -> bool:
    """Whether float() would take it all the same: truth values, of numpy and torch too, and texts."""
    return isinstance(value, (bool, str, bytes, bytearray)) or "bool" in str(getattr(value, "dtype", ""))


def bounded_number(
    name: str, value: Any, least: float, most: float, *, whole: bool = False, above: bool = False
) -> Any:
    """`value` as a float (an int if `whole`), if it is a number in that range; otherwise a ValueError that says so.

    With `above` the least value is not in the range.
    """
    try:
        number = math.nan if _is_no_number(value) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, for a tensor of several numbers
        number = math.nan
    if not least <= number <= most or (above and number == least) or (whole and number != int(number)):
        kind = "a whole number" if whole else "a number"
        span = f"above {least}, at most {most}" if above else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r:.50} must be {kind} {span}")
    return int(number) if whole else number


def bounded_horizon(horizon: Any, depth: int) -> int:
    horizon = bounded_int("horizon", horizon)
    if horizon * depth > MAX_STATES:
        raise ValueError(f"horizon={horizon} steps of depth={depth} blocks: their product must be at most {MAX_STATES}")
    return horizon


def _bounded_pair(name: str, value: Any) -> tuple[int, int]:
    pair = to_2tuple(value)
    if len(pair) != 2:
        raise ValueError(f"{name}={value!r} must be one integer or a pair (height, width)")
    return bounded_int(name, pair[0]), bounded_int(name, pair[1])


def get_tableau(solver: str) -> solvers.Tableau | None:
    if isinstance(solver, str) and solver == PLAIN:
        return None
    if not isinstance(solver, str) or solver not in solvers.TABLEAUS:
        raise ValueError(f"solver={solver!r} is unknown; known solvers: {PLAIN}, {', '.join(solvers.TABLEAUS)}")
    return solvers.TABLEAUS[solver]


def check_integration(field: str, step_size: float, solver: str) -> None:
    if not isinstance(field, str) or field not in FIELDS:
        raise ValueError(f"field={field!r} is unknown; known fields: {', '.join(FIELDS)}")
    step_size = bounded_number("step_size", step_size, 0, MAX_STEP_SIZE, above=True)
    if solver == PLAIN and (field != FIELDS[0] or step_size != 1):
        raise ValueError(
            f"field={field!r}, step_size={step_size!r}: solver='{PLAIN}' takes neither a field nor a step size; "
            f"choose a Runge-Kutta solver ({', '.join(solvers.TABLEAUS)})"
        )


def check_sizes(depth: int, arguments: dict[str, Any]) -> None:
    defaults = {name: p.default for name, p in signature(VisionTransformer.__init__).parameters.items()}
    size = {**defaults, **arguments}
    embed_dim, num_heads = (bounded_int(name, size[name]) for name in ("embed_dim", "num_heads"))
    bounded_int("in_chans", size["in_chans"])
    bounded_int("num_classes", size["num_classes"], least=0)
    bounded_int("reg_tokens", size["reg_tokens"], least=0)
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}")
    mlp_ratio = bounded_number("mlp_ratio", size["mlp_ratio"], 0, LIMITS["mlp_ratio"], above=True)
    if int(embed_dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio={mlp_ratio!r} leaves a gate without width at embed_dim={embed_dim}")
    height, width = _bounded_pair("img_size", size["img_size"])
    patch_height, patch_width = _bounded_pair("patch_size", size["patch_size"])
    if patch_height > height or patch_width > width:
        raise ValueError(f"patch_size={size['patch_size']!r} is larger than img_size={size['img_size']!r}")
    tokens = (height // patch_height) * (width // patch_width)
    if tokens * embed_dim > MAX_NUMBERS_IN_STATE:
        raise ValueError(
            f"img_size={size['img_size']!r}, patch_size={size['patch_size']!r}: a state of {tokens} tokens of width "
            f"{embed_dim} has more than {MAX_NUMBERS_IN_STATE:.1e} numbers"
        )
    blocks = depth * embed_dim * (4 + 3 * mlp_ratio)  # attention, and the three matrices of a gate
    if size["global_pool"] in ("map", "prr"):
        blocks += embed_dim * (4 + 2 * mlp_ratio)
    stem = size["in_chans"] * patch_height * patch_width + tokens + size["reg_tokens"]
    parameters = embed_dim * (blocks + stem + size["num_classes"])
    if parameters > MAX_PARAMETERS:
        raise ValueError(
            f"depth={depth}, embed_dim={embed_dim}, mlp_ratio={mlp_ratio}, in_chans={size['in_chans']}, "
            f"patch_size={size['patch_size']!r}, num_classes={size['num_classes']}: about {parameters:.1e} parameters, "
            f"more than {MAX_PARAMETERS:.1e}"
        )
