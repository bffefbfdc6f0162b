"""A zoo of recurrent Vision Transformers, registered with timm.

    >>> import timm, torch, recurrent_vit  # the import registers the names
    >>> model = timm.create_model("bvit", num_classes=10).eval()
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])

The names are those of `recurrent_vit.VARIANTS`, the arguments those of `recurrent_vit.RecurrentVisionTransformer`.
"""

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .anytime import Anytime
    from .model import RecurrentVisionTransformer
    from .optimized import optimize
    from .solvers import TABLEAUS, Tableau
    from .weights import Checkpoint, checkpoints
    from .zoo import VARIANTS, Variant

__version__ = "0.1.0.dev0"

__all__ = [
    "TABLEAUS", "VARIANTS", "Anytime", "Checkpoint", "RecurrentVisionTransformer", "Tableau", "Variant",
    "__version__", "checkpoints", "optimize",
]  # fmt: skip

_HOME = {
    "Anytime": "anytime",
    "Checkpoint": "weights",
    "RecurrentVisionTransformer": "model",
    "TABLEAUS": "solvers",
    "Tableau": "solvers",
    "VARIANTS": "zoo",
    "Variant": "zoo",
    "checkpoints": "weights",
    "optimize": "optimized",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name.isidentifier() and (spec := find_spec(f"{__name__}.{name}")) and spec.origin:  # a module, not a mere folder
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_command_line() -> bool:
    """Whether Python was started to run our own program: its --help and usage errors need not wait for torch."""
    if sys.argv[:1] == ["-m"]:  # still looking for the module of -m, which stands right before its arguments
        module = sys.orig_argv[-len(sys.argv)]
        return re.fullmatch(rf"(-\w*m)?{__name__}", module) is not None
    program = re.split(r"[/\\]", str(sys.argv[0]))[-1] if sys.argv else ""
    return program in ("recurrent-vit", "recurrent-vit.exe", "recurrent-vit-script.py")


if not _is_command_line():  # there, __main__ imports them after parsing
    from .model import RecurrentVisionTransformer
    from .solvers import TABLEAUS, Tableau
    from .weights import Checkpoint, checkpoints
    from .zoo import VARIANTS, Variant
