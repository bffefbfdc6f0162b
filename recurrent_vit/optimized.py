"""A model whose blocks are run by ONNX Runtime: the fast way through it on a CPU, in fp32 or int8.

    >>> import timm, torch, recurrent_vit
    >>> model = recurrent_vit.optimize(timm.create_model("bvit", embed_dim=16, num_heads=2, num_classes=10))
    >>> with torch.inference_mode():
    ...     model(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 10])

What is notable:

- Only the blocks are replaced, so all that a model can do between them goes on working: every solver, any horizon,
  `forward_steps`, features, `Anytime`, `evaluate`.
- A runtime session belongs to its process: a copy, or what comes out of a pickle, makes its own at the first call.
- The file of `recurrent_vit.export` is for where torch isn't; where it is, this is as fast to a few per cent.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import export
from .model import RecurrentVisionTransformer, ResidualBlock

__all__ = ["OnnxBlock", "optimize"]


def optimize(model: nn.Module, int8: bool = False) -> RecurrentVisionTransformer:
    """A copy of the model for inference on the CPU, in float32, with its blocks run by ONNX Runtime.

    It computes what the model computes in evaluation mode, to rounding, or, in int8, nearly so (benchmarks/README.md
    has the accuracy). It uses as many threads as torch (`torch.get_num_threads()`). Building takes seconds a block.

    Args:
        model: A `RecurrentVisionTransformer`, of whatever solver, depth and stages. It stays as it is.
        int8: Multiply the blocks' matrices in 8 bits, as :func:`recurrent_vit.export.export_onnx` does.

    Raises:
        ValueError: The model is none of ours, has no weights, or is optimized already.
        ImportError: A package of the extra `export` is missing; says how to install it.

    Example:
        >>> import timm, torch, recurrent_vit
        >>> model = timm.create_model("bvit_ds", embed_dim=16, num_heads=2, num_classes=10).eval()
        >>> images = torch.randn(2, 3, 32, 32)
        >>> with torch.inference_mode():
        ...     bool((optimize(model)(images) - model(images)).abs().max() < 1e-4)
        True
    """
    export.check_packages("onnx", "onnxscript", "onnxruntime")
    twin = export.copy_for_inference(model)
    integrated = twin.tableau is not None and twin.field == "state_subtracted"
    blocks: Any = twin.blocks
    for i, block in enumerate(blocks):
        blocks[i] = OnnxBlock(block, int8)
        blocks[i].session(residual=integrated)  # the other graph is made if somebody asks for it
    return twin


class OnnxBlock(nn.Module):
    """A block that ONNX Runtime computes: F(x), or R(x) = F(x) - x if `residual`, for any number of images and tokens.

    Args:
        block: In float32, on the CPU, in evaluation mode. It stays inside, for its parameters.
        int8: As in :func:`optimize`.
    """

    def __init__(self, block: ResidualBlock, int8: bool = False) -> None:
        super().__init__()
        self.block = block
        self.int8 = int8
        self._sessions: dict[bool, Any] = {}  # by `residual`

    @property
    def attn(self) -> nn.Module:
        """The block's attention."""
        return self.block.attn

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sessions": {}}

    def session(self, residual: bool) -> Any:
        """The onnxruntime.InferenceSession that computes F or R."""
        if residual not in self._sessions:
            self._sessions[residual] = _start(export.block_to_onnx(self.block, residual, self.int8))
        return self._sessions[residual]

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, residual: bool = False
    ) -> Tensor:
        """(B, N, C), float32 on the CPU, to the same shape.

        Raises:
            ValueError: A mask is given, or x isn't float32 on the CPU.
            RuntimeError: A gradient is wanted.
        """
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask, is_causal: an optimized model takes no masks")
        if x.device.type != "cpu" or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} on {x.device}: an optimized model takes float32 on the CPU")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("an optimized model has no gradients: call it under torch.inference_mode()")
        if not len(x):  # not every kernel takes an empty batch
            return torch.empty_like(x)
        (y,) = self.session(residual).run(None, {"x": x.detach().contiguous().numpy()})
        return torch.from_numpy(y)


def _start(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors; a warning would say that it knows no GPU
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
