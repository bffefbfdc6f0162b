"""The recurrent Vision Transformer: one set of blocks, applied again and again to the same tokens.

What is notable:

- The model is a timm `VisionTransformer`. Stem, position table, final norm, pooling, head, initialisation and
  state-dict keys are timm's; only what happens between stem and final norm is ours.
- `blocks` holds the D unique blocks, once each: the set F = b_D o ... o b_1. The state z (B, N, C) goes through F once
  a step, S times, so parameters do not depend on the number of steps, and arithmetic does.
- The solver says what a step is. `plain`: z <- F(z), literally. A Runge-Kutta method: a step of size h along the field
  R(z) = F(z) - z (`state_subtracted`) or F(z) (`black_box`, the mis-specified control). R is the sum of the residual
  branches, never a difference of states: in bfloat16 the difference would lose the last digits of R.
- `taps` is a list of identities, one for each state on the way. It is the schedule (its length is the number of
  states) and gives each of them a name for hooks, since a shared block has only one.

Reference: "Training Crossroads for Recurrent Vision Transformers" (2026), https://arxiv.org/abs/2608.04879
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from timm.layers import DropPath, _assert
from timm.models import checkpoint
from timm.models._features import feature_take_indices  # these two have no public name in timm 1.0.31
from timm.models._input import update_model_args
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from . import solvers
from .limits import LIMITS, PLAIN, bounded_horizon, bounded_int, check_integration, check_sizes, get_tableau

__all__ = ["RecurrentVisionTransformer", "ResidualBlock", "check_model"]


class ResidualBlock(Block):
    """timm's pre-norm block F(x) = x + R(x), able to return R(x) alone and to recompute itself in the backward pass.

    Both parts are here so that everything that acts on a module through its call (hooks, `block.compile()`, FLOP
    counters) sees every evaluation, whichever of the two is asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_checkpointing = False

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, residual: bool = False
    ) -> Tensor:
        """F(x), or R(x) = F(x) - x if `residual`; x and the result are (B, N, C)."""
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint(self._forward, x, attn_mask, is_causal, residual)
        return self._forward(x, attn_mask, is_causal, residual)

    def _forward(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, residual: bool) -> Tensor:
        attention = self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        if residual:
            return attention + self.drop_path2(self.ls2(self.mlp(self.norm2(x + attention))))
        x = x + attention
        del attention  # its memory serves the gate
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class RecurrentVisionTransformer(VisionTransformer):
    """A Vision Transformer whose set of `depth` blocks is applied `steps * stages` times.

    In shapes, B counts images, N tokens (patches and prefix tokens), and C is embed_dim. After construction only the
    horizon can be changed (`set_horizon`); for another solver, field or step size build another model, which loads the
    same weights.

    Args:
        depth: D, number of unique blocks. They are applied in order b1..bD, and that set cycles.
        steps: S, steps in one supervised stage; with stages=1 the trained number of steps.
        stages: K, number of supervised stages (`forward_stages`).
        horizon: H, steps that `forward` runs; default steps * stages. Training by `forward_stages` runs steps * stages
            whatever H is.
        solver: "plain" (z <- F(z)) or a Runge-Kutta method: euler, midpoint, heun2, heun3, rk4, rk4_38.
        field: What a Runge-Kutta method integrates: "state_subtracted", F(z) - z, or "black_box", F(z).
        step_size: h, the time that one step of a Runge-Kutta method takes.
        drop_path_rate: Stochastic depth. A stack whose blocks are trained to be used once follows timm's linear rule
            from 0 to this rate; a block that is used again and again stands at every depth, so shared blocks all have
            this rate, and so has a single one.
        block_fn: The class of the blocks, `ResidualBlock` or a subclass: a solver needs a block that returns R alone.
        kwargs: timm's own arguments of `VisionTransformer`: img_size, patch_size, in_chans, num_classes,
            global_pool, embed_dim, num_heads, mlp_ratio, class_token, ... `fix_init` scales a block by its
            place in the set.

    Dropout and stochastic depth draw fresh masks at every evaluation, so under them the field of a Runge-Kutta step is
    a random one.

    Raises:
        ValueError: An argument out of its range; the message has the name, the value and what is allowed.
        TypeError: An argument that neither this class nor timm knows.

    Example:
        >>> model = RecurrentVisionTransformer(
        ...     img_size=32, patch_size=8, embed_dim=16, num_heads=2, num_classes=10, depth=1, steps=3
        ... )
        >>> images = torch.randn(2, 3, 32, 32)
        >>> model(images).shape
        torch.Size([2, 10])
        >>> model.set_horizon(5)
        >>> model.forward_steps(images).shape
        torch.Size([5, 2, 10])
    """

    __jit_unused_properties__ = [  # noqa: RUF012 (torch's form)
        "depth", "horizon", "trained_horizon", "trained_time", "num_states", "evaluations_per_step", "nfe", "macs",
    ]  # fmt: skip

    def __init__(
        self,
        *,
        depth: int = 1,
        steps: int = 12,
        stages: int = 1,
        horizon: int | None = None,
        solver: str = PLAIN,
        field: str = "state_subtracted",
        step_size: float = 1.0,
        drop_path_rate: float = 0.0,
        block_fn: type[nn.Module] = ResidualBlock,
        **kwargs: Any,
    ) -> None:
        depth = bounded_int("depth", depth)
        steps = bounded_int("steps", steps)
        stages = bounded_int("stages", stages)
        if steps * stages > LIMITS["horizon"]:
            raise ValueError(f"steps={steps}, stages={stages}: their product must be at most {LIMITS['horizon']}")
        horizon = bounded_horizon(steps * stages if horizon is None else horizon, depth)
        tableau = get_tableau(solver)
        check_integration(field, step_size, solver)
        check_sizes(depth, kwargs)
        if not isinstance(drop_path_rate, (int, float)) or not 0 <= drop_path_rate < 1:
            raise ValueError(f"drop_path_rate={drop_path_rate!r} must be at least 0 and below 1")
        if not (isinstance(block_fn, type) and issubclass(block_fn, ResidualBlock)):
            raise ValueError(f"block_fn={block_fn!r} must be a subclass of recurrent_vit.model.ResidualBlock")

        super().__init__(depth=depth, drop_path_rate=drop_path_rate, block_fn=block_fn, **kwargs)

        self.steps = steps
        self.stages = stages
        self.solver = solver
        self.field = field
        self.step_size = float(step_size)
        self.tableau = tableau
        self._rows, self._weights = _scriptable(tableau or solvers.TABLEAUS["euler"])
        self._states_per_step = depth if tableau is None else 1
        self._pruned = False
        self.taps = nn.ModuleList()
        self._set_num_states(horizon * self._states_per_step)
        if steps * stages > 1 or depth == 1:
            _set_drop_path(self.blocks, drop_path_rate)

    # ---- the schedule ---------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """D, the number of unique blocks."""
        return len(self.blocks)

    @property
    def horizon(self) -> int:
        """H, the steps of one forward pass (a step that pruning cut short counts); `set_horizon` changes it."""
        return math.ceil(len(self.taps) / self._states_per_step)

    @property
    def trained_horizon(self) -> int:
        """The steps that the model is made for: steps * stages."""
        return self.steps * self.stages

    @property
    def trained_time(self) -> float:
        """The time that these steps cover: trained_horizon * step_size."""
        return self.trained_horizon * self.step_size

    @property
    def num_states(self) -> int:
        """States on the way from stem to final norm, and so the number of intermediate features: one after each block
        application of the plain recurrence (depth * horizon), one after each step of a Runge-Kutta method (horizon)."""
        return len(self.taps)

    @property
    def evaluations_per_step(self) -> int:
        """Applications of the block set in one step: plain and Euler 1, Heun 2, RK4 4."""
        return 1 if self.tableau is None else self.tableau.evaluations

    @property
    def nfe(self) -> int:
        """Applications of the block set in one forward pass."""
        return self.horizon * self.evaluations_per_step

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass, per image of the model's own size: see `count_macs`."""
        return self.count_macs()

    def count_macs(self, horizon: int | None = None, grid_size: tuple[int, int] | None = None) -> int:
        """Multiply-accumulates of the matrix products in a forward pass, per image; one of them is two FLOP.

        Counted are the patch embedding, attention, the linear layers of the blocks, and the head on one pooled vector;
        not counted are norms, activations and pooling, attention pooling included.

        Args:
            horizon: Number of steps; default the model's own.
            grid_size: Patches of an image, rows and columns; default the model's own.
        """
        num_states = self.num_states
        if horizon is not None:
            num_states = bounded_horizon(horizon, self.depth) * self._states_per_step
        patches = math.prod(grid_size or self.patch_embed.grid_size)
        per_block = [_block_macs(block, patches + self.num_prefix_tokens) for block in self.blocks]
        if self.tableau is None:  # a state is a block application; a pruned schedule may end inside a step
            trunk = sum(per_block[i % len(per_block)] for i in range(num_states))
        else:
            trunk = num_states * self.evaluations_per_step * sum(per_block)
        stem = patches * self.patch_embed.proj.weight.numel()
        return stem + trunk + sum(p.numel() for p in self.head.parameters() if p.ndim == 2)

    def set_horizon(self, horizon: int) -> None:
        """Run `horizon` steps from now on. It is exported with the model (timm's model_args).

        Raises:
            ValueError: `horizon` is not an integer of at least 1, or the model was pruned to some intermediate layers.

        Example:
            >>> import timm, recurrent_vit
            >>> model = timm.create_model("bvit")
            >>> model.set_horizon(24)
            >>> model.horizon, model.nfe
            (24, 24)
        """
        self.check_whole()
        self._set_num_states(bounded_horizon(horizon, self.depth) * self._states_per_step)
        update_model_args(self, horizon=self.horizon)

    def check_whole(self) -> None:
        """Raise ValueError if the model was pruned to some intermediate layers."""
        if self._pruned:
            raise ValueError(
                f"this model was pruned to its first {self.num_states} states; horizon and stages went with the rest: "
                "build a new model"
            )

    def _set_num_states(self, num_states: int) -> None:
        self._num_states = num_states
        del self.taps[num_states:]
        self.taps.extend(nn.Identity().train(self.training) for _ in range(num_states - len(self.taps)))
        self.feature_info = [
            {"module": f"taps.{i}", "num_chs": self.embed_dim, "reduction": self.patch_embed.feat_ratio()}
            for i in range(num_states)
        ]

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the size of images or patches, as in timm: positions and patch embedding are resampled."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        self._set_num_states(self.num_states)  # feature_info states the reduction

    # ---- the recurrence -------------------------------------------------------------------------------------------

    def initial_state(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W), floating point, to the state z_0 (B, N, C): patches, positions, prefix tokens.

        Raises:
            AssertionError: The images are integers, or of another size than the model's.
        """
        _assert(
            x.is_floating_point(),
            "images must be floating point, normalised with the mean and std of model.pretrained_cfg; "
            "convert integers first, e.g. images.float() / 255",
        )
        z = self.patch_embed(x)
        z = self._pos_embed(z).contiguous()  # timm's has tokens fastest, as would all states after it
        z = self.patch_drop(z)
        return self.norm_pre(z)

    def block_set(self, z: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """F(z): the D blocks in order, once. z and the result are (B, N, C)."""
        for block in self.blocks:
            z = block(z, attn_mask, is_causal)
        return z

    def vector_field(self, z: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """What the solver integrates: R(z) = F(z) - z for field="state_subtracted", F(z) for "black_box".

        With several blocks, z_i = z + r_i and r_(i+1) = r_i + R_i(z_i) give R as a sum, without a difference.
        """
        if self.field == "black_box":
            return self.block_set(z, attn_mask, is_causal)
        r = self.blocks[0](z, attn_mask, is_causal, residual=True)
        for i in range(1, len(self.blocks)):
            r = r + self.blocks[i](z + r, attn_mask, is_causal, residual=True)
        return r

    def step(self, z: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """One step of the state z (B, N, C): F(z), or a step of the solver along the field."""
        if self.tableau is None:
            return self.block_set(z, attn_mask, is_causal)
        return solvers.step(lambda y: self.vector_field(y, attn_mask, is_causal), z, self.step_size, self.tableau)

    def _states(self, z: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Iterator[Tensor]:
        """The states after z, one for each tap of the schedule."""
        for i, tap in enumerate(self.taps):
            if self.tableau is None:
                z = self.blocks[i % len(self.blocks)](z, attn_mask, is_causal)
            else:
                z = self.step(z, attn_mask, is_causal)
            z = tap(z)
            yield z

    # ---- timm's forward methods -----------------------------------------------------------------------------------

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images (B, in_chans, H, W) to the normalised final state (B, N, C)."""
        z = self.initial_state(x)
        if torch.jit.is_scripting():
            z = self._scripted_states(z, attn_mask, is_causal)
        else:
            for state in self._states(z, attn_mask, is_causal):
                z = state
        return self.norm(z)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        return_all_steps: bool = False,
    ) -> Tensor:
        """Logits (B, num_classes); with `return_all_steps` those after every step, as `forward_steps` gives them.

        Args:
            x: Images (B, in_chans, H, W), floating point.
            attn_mask: Attention mask that broadcasts to (B, num_heads, N, N): bool (True = attend) or additive.
            is_causal: Causal attention instead of a mask.
            return_all_steps: For callers that must go through `forward`, such as DistributedDataParallel. A model
                traced by fx does not look at it, a scripted one refuses it.
        """
        if torch.jit.is_scripting():
            _assert(not return_all_steps, "return_all_steps=True is not available in a scripted model")
        elif isinstance(return_all_steps, bool) and return_all_steps:  # under fx it is a Proxy, without a truth value
            return self.forward_steps(x, attn_mask, is_causal)
        return self.forward_head(self.forward_features(x, attn_mask=attn_mask, is_causal=is_causal))

    def forward_steps(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Logits after every step, (horizon, B, num_classes), in one pass; the last are those of `forward`.

        Args:
            x: Images (B, in_chans, H, W), floating point.
            attn_mask: As in `forward`.
            is_causal: As in `forward`.

        Example:
            >>> import timm, recurrent_vit
            >>> model = timm.create_model("bvit_ode_rk4").eval()
            >>> model.forward_steps(torch.randn(2, 3, 32, 32)).shape
            torch.Size([3, 2, 100])
        """
        logits = []
        for i, z in enumerate(self._states(self.initial_state(x), attn_mask, is_causal), start=1):
            if i % self._states_per_step == 0 or i == self.num_states:  # pruning may end the last step early
                logits.append(self.forward_head(self.norm(z)))
        return torch.stack(logits)

    def forward_stages(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Iterator[Tensor]:
        """Logits (B, num_classes) after each of the K stages of S steps; the state is detached between stages.

        Calling backward on a stage's loss before asking for the next stage frees its graph, so that memory does not
        grow with K. The stem gets its gradient from the first stage alone. The horizon plays no part.

        Args:
            x: Images (B, in_chans, H, W), floating point.
            attn_mask: As in `forward`.
            is_causal: As in `forward`.

        Raises:
            ValueError: The model was pruned.

        Example:
            >>> import timm, recurrent_vit
            >>> model = timm.create_model("bvit_ds", stages=2, steps=1)
            >>> images, labels = torch.randn(2, 3, 32, 32), torch.tensor([3, 5])
            >>> for logits in model.forward_stages(images):
            ...     (torch.nn.functional.cross_entropy(logits, labels) / model.stages).backward()
        """
        self.check_whole()
        z = self.initial_state(x)
        for _ in range(self.stages):
            for _ in range(self.steps):
                z = self.step(z, attn_mask, is_causal)
            yield self.forward_head(self.norm(z))
            z = z.detach()

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
        """Intermediate states, as timm's method of that name gives them; the index counts states (`num_states`).

        Args:
            x: Images (B, in_chans, H, W).
            indices: Which states: the last n if int, all if None, these (negative ones from the end) if a sequence.
            return_prefix_tokens: Give (spatial, prefix) pairs, where the model has prefix tokens.
            norm: Apply the final norm to each.
            stop_early: Stop at the last state that is asked for; the final features are then those of that state.
            output_fmt: "NCHW" (B, C, H, W) or "NLC" (B, N, C).
            intermediates_only: Leave the final features out.
            output_dict: Return a dict with image_intermediates, image_intermediates_prefix and image_features.
            attn_mask: As in `forward`.
            is_causal: As in `forward`.

        Returns:
            (final features, intermediates), the intermediates, or the dict.
        """
        _assert(output_fmt in ("NCHW", "NLC"), "Output format must be one of NCHW or NLC.")
        take_indices, max_index = feature_take_indices(self.num_states, indices)

        z = self.initial_state(x)
        intermediates = []
        for i, state in enumerate(self._states(z, attn_mask, is_causal)):
            z = state
            if i in take_indices:
                intermediates.append(self.norm(z) if norm else z)
            if stop_early and i == max_index:
                break

        prefix = [y[:, : self.num_prefix_tokens] for y in intermediates]
        intermediates = [y[:, self.num_prefix_tokens :] for y in intermediates]
        if output_fmt == "NCHW":
            height, width = self.patch_embed.dynamic_feat_size(x.shape[-2:])
            intermediates = [
                y.reshape(y.shape[0], height, width, -1).permute(0, 3, 1, 2).contiguous() for y in intermediates
            ]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0

        if output_dict:
            result: dict[str, Any] = {"image_intermediates": intermediates}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(z)
            return result
        pairs = list(zip(intermediates, prefix)) if with_prefix else intermediates
        return pairs if intermediates_only else (self.norm(z), pairs)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Shorten the schedule to the last state asked for and drop the blocks it does not reach.

        Args:
            indices: As in `forward_intermediates`.
            prune_norm: Replace the final norm by an identity.
            prune_head: Remove the classifier.

        Returns:
            The indices of the states kept, counted from the beginning.
        """
        take_indices, max_index = feature_take_indices(self.num_states, indices)
        self._set_num_states(max_index + 1)
        self._pruned = True
        if self.tableau is None:
            self.blocks = self.blocks[: self.num_states]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take_indices

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block application in the backward pass: memory for one of them, and one state for each."""
        super().set_grad_checkpointing(enable)
        for block in self.blocks:
            block.grad_checkpointing = enable  # type: ignore[assignment]

    # ---- TorchScript: it can neither index a module list nor pass a function, so the same loop in its language ----

    def _scripted_states(self, z: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        i = 0
        while i < self._num_states:
            if self.solver == "plain":
                for block in self.blocks:
                    if i < self._num_states:
                        z = block(z, attn_mask, is_causal)
                        i += 1
            else:
                slopes: list[Tensor] = []
                for row in self._rows:
                    y = solvers.advance(z, slopes, row, self.step_size)
                    slopes.append(self._scripted_field(y, attn_mask, is_causal))
                z = solvers.advance(z, slopes, self._weights, self.step_size)
                i += 1
        return z

    def _scripted_field(self, z: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.field == "black_box":
            return self.block_set(z, attn_mask, is_causal)
        r = torch.zeros_like(z)
        for block in self.blocks:
            r = r + block(z + r, attn_mask, is_causal, residual=True)
        return r


def check_model(model: nn.Module) -> RecurrentVisionTransformer:
    """The model, if it is one of ours that can be run to any horizon; otherwise a ValueError that says why not."""
    if not isinstance(model, RecurrentVisionTransformer):
        raise ValueError(
            f"model must be a RecurrentVisionTransformer, not wrapped in another; got {type(model).__name__}"
        )
    model.check_whole()
    return model


def _scriptable(tableau: solvers.Tableau) -> tuple[list[list[float]], list[float]]:
    """a, filled up with zeros, and b as lists: TorchScript cannot tell the type of an empty row."""
    rows = [[*row, *[0.0] * (tableau.evaluations - len(row))] for row in tableau.a]
    return rows, list(tableau.b)


def _block_macs(block: Any, tokens: int) -> int:
    linear = sum(module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear))
    return tokens * linear + 2 * tokens**2 * block.attn.attn_dim


def _set_drop_path(blocks: Iterable[Any], rate: float) -> None:
    for block in blocks:
        block.drop_path1 = DropPath(rate) if rate > 0 else nn.Identity()
        block.drop_path2 = DropPath(rate) if rate > 0 else nn.Identity()
