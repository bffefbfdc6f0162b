"""A model whose blocks are run by ONNX Runtime: a fast way through it on a CPU, in fp32 or int8.

    >>> import timm, torch, recurrent_vit
    >>> model = recurrent_vit.optimize(timm.create_model("bvit", embed_dim=16, num_heads=2, num_classes=10))
    >>> with torch.inference_mode():
    ...     model(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 10])

What is notable:

- Only the blocks are replaced, so all that a model can do between them goes on working: every solver, any horizon,
  `forward_steps`, features, `Anytime`, `evaluate`. Parameters keep their names; weights that are loaded take effect.
- ONNX Runtime has threads of its own, and so has torch. Where both have as many as there are cores they contend, since
  each spins on for a while after its work: give torch one.
- A runtime session belongs to its process: a copy, a fork, or what comes out of a pickle makes its own at the first
  call.
- The file of `recurrent_vit.export` is for where torch isn't.
"""

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn

from . import export
from .limits import bounded_number
from .model import RecurrentVisionTransformer, ResidualBlock

__all__ = ["OnnxBlock", "optimize", "start_session"]


def optimize(model: nn.Module, int8: bool = False, threads: int | None = None) -> RecurrentVisionTransformer:
    """A copy of the model for inference on the CPU, in float32, with its blocks run by ONNX Runtime.

    It computes what the model computes in evaluation mode: to rounding, or, in int8, nearly. Its blocks do so in
    whatever mode it is put into; dropout around them is the model's. It is made for a model of one block, or few: each
    has a session, which takes seconds to build, with threads.

    Args:
        model: A `RecurrentVisionTransformer`, of whatever solver, depth and stages. It stays as it is.
        int8: Multiply the blocks' matrices in 8 bits, as :func:`recurrent_vit.export.export_onnx` does.
        threads: Of ONNX Runtime; default: as many as torch has now (`torch.get_num_threads()`).

    Raises:
        ValueError: The model is none of ours, has no weights, or is optimized already; or `threads` is out of range.
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
    threads = bounded_number("threads", torch.get_num_threads() if threads is None else threads, 1, 1024, whole=True)
    twin = export.copy_for_inference(model)
    integrated = twin.tableau is not None and twin.field == "state_subtracted"
    blocks: Any = twin.blocks
    for i, block in enumerate(blocks):
        blocks[i] = OnnxBlock(block, int8, threads)
        blocks[i].session(residual=integrated)  # the other graph is made if somebody asks for it
    return twin


class OnnxBlock(nn.Module):
    """A block that ONNX Runtime computes: F(x), or R(x) = F(x) - x if `residual`, for any number of images and tokens.

    It has the block's children, so its parameters are the block's, by the same names. What it computes has the weights
    of the moment it was made, or of the last `load_state_dict` of it or of a model that holds it; a change of them in
    place has no effect.

    Args:
        block: In float32, on the CPU, in evaluation mode.
        int8: As in :func:`optimize`.
        threads: Of ONNX Runtime.
    """

    def __init__(self, block: ResidualBlock, int8: bool, threads: int) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        for name, parameter in block.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.int8, self.threads = int8, threads
        self._block = [block]  # in a list: it is no child
        self._frozen = [copy.deepcopy(block)]  # what sessions are made of; nothing after new weights were loaded
        self._sessions: dict[tuple[int, bool], Any] = {}  # by process and `residual`

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sessions": {}}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._sessions.clear()  # they have the old weights; the children get the new ones after this
        self._frozen.clear()

    def session(self, residual: bool) -> Any:
        """The onnxruntime.InferenceSession that computes F or R."""
        place = (os.getpid(), residual)
        if place not in self._sessions:
            with export.LOCK:  # of several threads the first makes it
                if not self._frozen:
                    self._frozen.append(copy.deepcopy(self._block[0]))
                if place not in self._sessions:
                    content = export.block_to_onnx(self._frozen[0], residual, self.int8)
                    self._sessions[place] = start_session(content, self.threads)
        return self._sessions[place]

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, residual: bool = False
    ) -> Tensor:
        """(B, N, C), float32 on the CPU, to the same shape.

        Raises:
            ValueError: A mask is given, or x isn't float32 on the CPU.
            RuntimeError: A derivative is wanted.
        """
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask, is_causal: an optimized model takes no masks")
        if x.device.type != "cpu" or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} on {x.device}: an optimized model takes float32 on the CPU")
        if not len(x):  # not every kernel takes an empty batch
            return torch.empty_like(x)
        (y,) = self.session(residual).run(None, {"x": _array(x)})
        return torch.from_numpy(y)


def _array(x: Tensor) -> Any:
    """The numbers of x.

    Raises:
        RuntimeError: A derivative is to be taken through it.
    """
    message = "an optimized model has no derivatives: call it under torch.inference_mode()"
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(message)
    try:
        return x.detach().contiguous().numpy()
    except RuntimeError as error:  # a tensor of torch.func has no storage
        raise RuntimeError(message) from error


def start_session(content: bytes, threads: int) -> Any:
    """An onnxruntime.InferenceSession on the CPU, of the content of a file.

    Args:
        content: The file.
        threads: That work on one call.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors; a warning would say that it knows no GPU
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
