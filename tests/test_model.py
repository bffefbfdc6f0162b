"""Laws of the recurrence: the unrolled timm ViT, Euler and the plain loop, torchdiffeq, steps, stages, bad input."""

import copy

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.functional import cross_entropy

from recurrent_vit import VARIANTS, RecurrentVisionTransformer
from recurrent_vit.cifar import Split
from recurrent_vit.evaluate import evaluate
from recurrent_vit.solvers import TABLEAUS, step

STATE = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))


def timm_twin(model):
    """timm's own ViT with model's widths, whose block i carries the weights of block i mod D."""
    depth = model.num_states
    variant = VARIANTS[model.pretrained_cfg["architecture"]]
    kwargs = {k: v for k, v in variant.args.items() if k not in ("steps", "stages", "solver")}
    kwargs |= {"pre_norm": isinstance(model.norm_pre, nn.LayerNorm)}
    kwargs |= {"embed_dim": model.embed_dim, "num_heads": 4, "num_classes": model.num_classes, "depth": depth}
    twin = VisionTransformer(**kwargs).eval()
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("blocks.")}
    for i in range(depth):
        block = model.blocks[i % model.depth].state_dict()
        weights |= {f"blocks.{i}.{k}": v for k, v in block.items()}
    twin.load_state_dict(weights, strict=True)
    return twin


PLAIN_MODELS = [("vit_cifar", {}), ("bvit", {}), ("bvit_ds", {}), ("bvit", {"depth": 3, "steps": 4, "horizon": 5})]
plain_models = pytest.mark.parametrize(("name", "kwargs"), PLAIN_MODELS, ids=lambda v: str(v))


# ---- the looped model is a deep timm ViT with the same weights in every block ----------------------------------------


@plain_models
def test_loop_equals_the_unrolled_timm_vit(small, images, name, kwargs):
    model = small(name, **kwargs)
    twin = timm_twin(model)
    assert torch.equal(model(images), twin(images))
    assert torch.equal(model.forward_features(images), twin.forward_features(images))
    assert torch.equal(
        model.forward_head(twin.forward_features(images), pre_logits=True),
        twin.forward_head(model.forward_features(images), pre_logits=True),
    )


@pytest.mark.parametrize("kwargs", [{}, {"dynamic_img_size": True}, {"class_token": True}], ids=str)
def test_states_lie_in_memory_as_they_are_read(small, images, kwargs):
    """timm's patches come with tokens fastest, and sums would hand that on to every state."""
    model = small("bvit", **kwargs)
    *_, last = model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    assert model.initial_state(images).is_contiguous()
    assert last.stride(-1) == 1


@plain_models
@pytest.mark.parametrize("kind", ["bool", "additive", "causal"])
def test_loop_equals_the_unrolled_timm_vit_under_a_mask(small, images, name, kwargs, kind):
    model = small(name, **kwargs)
    allowed = torch.rand(64, 64) < 0.5
    allowed.fill_diagonal_(True)
    mask = {
        "bool": {"attn_mask": allowed},
        "additive": {"attn_mask": torch.randn(64, 64)},
        "causal": {"is_causal": True},
    }[kind]
    output = model.forward_features(images, **mask)
    assert torch.equal(output, timm_twin(model).forward_features(images, **mask))
    assert not torch.equal(output, model.forward_features(images))


@plain_models
def test_loop_equals_the_unrolled_timm_vit_in_its_intermediates(small, images, name, kwargs):
    model = small(name, **kwargs)
    ours = model.forward_intermediates(images, norm=True)
    theirs = timm_twin(model).forward_intermediates(images, norm=True)
    assert len(ours[1]) == model.num_states == model.depth * model.horizon
    for a, b in zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True):
        assert torch.equal(a, b)


@plain_models
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loop_has_the_summed_gradients_of_the_unrolled_timm_vit(small, images, name, kwargs, checkpointing):
    model = small(name, **kwargs)
    twin = timm_twin(model)
    model.set_grad_checkpointing(checkpointing)
    twin.set_grad_checkpointing(checkpointing)
    for m in (model, twin):
        m(images).square().sum().backward()
    for i, block in enumerate(model.blocks):
        uses = [dict(twin.blocks[j].named_parameters()) for j in range(i, model.num_states, model.depth)]
        for key, parameter in block.named_parameters():
            expected = sum(use[key].grad for use in uses)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    torch.testing.assert_close(model.pos_embed.grad, twin.pos_embed.grad, rtol=1e-4, atol=1e-5)


def test_features_only_equals_the_unrolled_timm_vit(small, images):
    model = small("bvit")
    features = timm.create_model("bvit", features_only=True, out_indices=(3, 7, 11), embed_dim=32, num_heads=4)
    missing, unexpected = features.model.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert set(unexpected) == {"head.weight", "head.bias", "norm.weight", "norm.bias"}
    theirs = timm_twin(model).forward_intermediates(images, indices=[3, 7, 11], intermediates_only=True)
    for a, b in zip(features(images), theirs, strict=True):
        assert torch.equal(a, b)


def test_a_bvit_starts_from_the_weights_of_a_one_block_timm_vit():
    torch.manual_seed(3)
    bvit = timm.create_model("bvit").state_dict()
    torch.manual_seed(3)
    args = {k: v for k, v in VARIANTS["bvit"].args.items() if k != "steps"}
    for key, value in VisionTransformer(**args, num_classes=100).state_dict().items():
        assert torch.equal(bvit[key], value), key


# ---- solvers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_euler_with_step_one_is_the_plain_recurrence(small, images, depth):
    plain = small("bvit", depth=depth)
    euler = small("bvit_ode_euler", depth=depth)
    euler.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(euler(images), plain(images), rtol=1e-5, atol=1e-5)


def test_every_checkpoint_loads_under_every_solver_field_horizon_and_step_size(small, images):
    weights = small("bvit").state_dict()
    outputs = []
    for kwargs in (
        {"solver": "rk4"},
        {"solver": "heun3", "step_size": 0.5},
        {"solver": "euler", "field": "black_box"},
        {"solver": "midpoint", "horizon": 2},
        {"solver": "plain", "stages": 3, "steps": 2},
    ):
        model = small("bvit", **kwargs)
        model.load_state_dict(weights, strict=True)
        outputs.append(model(images))
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


@pytest.mark.parametrize("depth", [1, 3])
def test_residual_is_the_difference_of_states_and_keeps_its_digits(small, depth):
    model = small("bvit_ode_euler", depth=depth, steps=1)
    residual, difference = model.vector_field(STATE), model.block_set(STATE) - STATE
    torch.testing.assert_close(residual, difference, rtol=1e-5, atol=1e-5)

    exact = model.double().vector_field(STATE.bfloat16().double())
    rounded = model.bfloat16().vector_field(STATE.bfloat16()).double()
    naive = (model.block_set(STATE.bfloat16()) - STATE.bfloat16()).double()
    error, naive_error = ((value - exact).norm() / exact.norm() for value in (rounded, naive))
    assert error < 0.5 * naive_error  # a difference of bfloat16 states loses the digits that the sum keeps


@pytest.mark.parametrize("field", ["state_subtracted", "black_box"])
@pytest.mark.parametrize("solver", TABLEAUS)
def test_a_model_step_is_the_solver_step_along_a_naive_field(small, solver, field):
    model = small("bvit", depth=2, steps=2, solver=solver, field=field, step_size=0.5).double()

    def naive(z):
        value = model.blocks[1](model.blocks[0](z))
        return value - z if field == "state_subtracted" else value

    z = STATE.double()
    torch.testing.assert_close(model.step(z), step(naive, z, 0.5, TABLEAUS[solver]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs"), [("euler", "euler"), ("heun2", "heun2"), ("rk4_38", "rk4")])
@pytest.mark.parametrize("field", ["state_subtracted", "black_box"])
def test_a_model_equals_torchdiffeq_on_a_real_block(small, images, ours, theirs, field):
    from torchdiffeq import odeint

    model = small("bvit", steps=3, solver=ours, field=field, step_size=0.25).double()
    images = images.double()
    block = model.blocks[0]

    def f(t, z):
        return block(z) - z if field == "state_subtracted" else block(z)

    times = torch.tensor([0.0, 0.75], dtype=torch.float64)
    z = odeint(f, model.initial_state(images), times, method=theirs, options={"step_size": 0.25})[-1]
    torch.testing.assert_close(model(images), model.forward_head(model.norm(z)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("solver", ["plain", *TABLEAUS])
def test_the_block_set_is_applied_as_often_as_nfe_says(small, images, solver):
    model = small("bvit", depth=2, steps=3, horizon=5, solver=solver)
    calls = [0, 0]
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    model(images)
    assert calls == [model.nfe, model.nfe]
    assert model.nfe == 5 * (1 if solver == "plain" else TABLEAUS[solver].evaluations)


def test_refining_euler_along_a_fixed_time_converges_with_order_one(small, images):
    model = small("bvit", steps=1, solver="rk4", step_size=1 / 32, horizon=32).double()
    exact = model.forward_features(images.double())
    errors = []
    for n in (16, 32, 64):
        euler = small("bvit", steps=1, solver="euler", step_size=1 / n, horizon=n).double()
        euler.load_state_dict(model.state_dict())
        errors.append((euler.forward_features(images.double()) - exact).norm().item())
    assert 1.8 < errors[0] / errors[1] < 2.2
    assert 1.8 < errors[1] / errors[2] < 2.2


@pytest.mark.parametrize("solver", ["euler", "heun2", "rk4"])
def test_a_black_box_horizon_of_96_overflows_and_is_reported_as_not_finite(small, solver):
    # dz/dt = F(z) contains z itself, so that every step doubles the state and more: 2^96, 2.5^96, 2.7^96
    split = Split(torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8), torch.arange(5))
    black_box = small("bvit", solver=solver, field="black_box")
    subtracted = small("bvit", solver=solver)
    subtracted.load_state_dict(black_box.state_dict())
    first, last = evaluate(black_box, split, horizons=[1, 96])
    assert (first["non_finite"], last["non_finite"]) == (0, 5)
    assert last["top1"] == 0
    assert [row["non_finite"] for row in evaluate(subtracted, split, horizons=[96])] == [0]


def test_an_overflow_is_reported_even_where_the_final_norm_hides_it(small):
    class Hiding(nn.Module):  # LayerNorm where it divides by an infinite deviation
        def forward(self, z):
            return torch.zeros_like(z)

    model = small("bvit", solver="euler", field="black_box")
    model.norm = Hiding()
    split = Split(torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8), torch.arange(5))
    assert [row["non_finite"] for row in evaluate(model, split, horizons=[1, 96])] == [0, 5]


# ---- horizon, steps, stages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["steps", "horizon"])
def test_parameters_do_not_depend_on_steps_and_macs_are_linear_in_them(name, argument):
    one, two, ten = (timm.create_model(name, device="meta", stages=1, **{argument: n}) for n in (1, 2, 10))
    shapes = [{k: v.shape for k, v in model.state_dict().items()} for model in (one, two, ten)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert ten.macs - one.macs == 9 * (two.macs - one.macs) > 0
    assert one.count_macs(horizon=10) == ten.macs


def test_steps_end_in_the_output_and_do_not_depend_on_the_horizon(small, images, name):
    model = small(name, horizon=6)
    long = model.forward_steps(images)
    assert long.shape == (6, 4, 10)
    torch.testing.assert_close(long[-1], model(images), rtol=0, atol=0)
    assert torch.equal(model(images, return_all_steps=True), long)
    for horizon in (1, 4):
        model.set_horizon(horizon)
        assert torch.equal(model.forward_steps(images), long[:horizon])
        assert torch.equal(model(images), long[horizon - 1])


def test_set_horizon_gives_the_model_built_with_that_horizon(small, images, name):
    built = small(name, horizon=7)
    set_later = small(name)
    set_later.load_state_dict(built.state_dict())
    set_later.set_horizon(7)
    assert torch.equal(set_later(images), built(images))
    assert (set_later.horizon, set_later.nfe, set_later.num_states) == (7, built.nfe, built.num_states)
    assert set_later.feature_info == built.feature_info
    with pytest.raises(AttributeError):
        set_later.horizon = 3


def test_stages_end_in_the_output_of_that_many_steps(small, images, name):
    model = small(name, stages=3, steps=2)
    steps = model.forward_steps(images)
    stages = list(model.forward_stages(images))
    assert len(stages) == 3
    for k, logits in enumerate(stages):
        assert torch.equal(logits, steps[2 * k + 1])


def test_backward_per_stage_equals_the_averaged_loss_on_detached_states(small, images):
    model = small("bvit_ds")
    labels = torch.tensor([1, 3, 5, 7])
    for logits in model.forward_stages(images):
        (cross_entropy(logits, labels) / model.stages).backward()

    twin = copy.deepcopy(model)  # the naive way: keep every graph, one backward on the mean
    twin.zero_grad()
    z, losses = twin.initial_state(images), []
    for _ in range(twin.stages):
        for _ in range(twin.steps):
            z = twin.blocks[0](z)
        losses.append(cross_entropy(twin.head(twin.norm(z).mean(1)), labels))
        z = z.detach()
    torch.stack(losses).mean().backward()
    for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_a_later_stage_gives_no_gradient_to_the_stem_and_the_default_forward_does(small, images):
    model = small("bvit_ds")
    list(model.forward_stages(images))[-1].sum().backward()
    assert model.patch_embed.proj.weight.grad is None
    assert model.blocks[0].attn.proj.weight.grad is not None
    model(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_horizon_holds_in_training_mode(small, images):
    model = small("bvit", horizon=3)
    assert torch.equal(model.train()(images), model.eval()(images))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"steps": 0}, r"steps=0 must be an integer from 1 to 10000"),
        ({"steps": 10**9}, r"steps=1000000000 must be an integer from 1 to 10000"),
        ({"steps": True}, r"steps=True must be an integer"),
        ({"steps": 2.0}, r"steps=2.0 must be an integer"),
        ({"steps": 1000, "stages": 1000}, r"steps=1000, stages=1000: their product must be at most 10000"),
        ({"stages": -1}, r"stages=-1 must be an integer from 1"),
        ({"depth": 0}, r"depth=0 must be an integer from 1"),
        ({"depth": 10**9}, r"depth=1000000000 must be an integer from 1 to 1000"),
        ({"horizon": "12"}, r"horizon='12' must be an integer from 1"),
        ({"horizon": -1}, r"horizon=-1 must be an integer from 1"),
        (
            {"solver": "rk5"},
            r"solver='rk5' is unknown; known solvers: plain, euler, midpoint, heun2, heun3, rk4, rk4_38",
        ),
        ({"solver": ["rk4"]}, r"solver=\['rk4'\] is unknown"),
        (
            {"solver": "rk4", "field": "residual"},
            r"field='residual' is unknown; known fields: state_subtracted, black_box",
        ),
        ({"solver": "rk4", "step_size": 0}, r"step_size=0 must be a number above 0, at most"),
        ({"solver": "rk4", "step_size": torch.tensor([1.0, 2.0])}, r"step_size=tensor.* must be a number above 0"),
        ({"solver": "rk4", "step_size": -1.0}, r"step_size=-1.0 must be"),
        ({"solver": "rk4", "step_size": float("nan")}, r"step_size=nan must be"),
        ({"solver": "rk4", "step_size": float("inf")}, r"step_size=inf must be"),
        ({"solver": "rk4", "step_size": "1"}, r"step_size='1' must be"),
        ({"solver": "rk4", "step_size": True}, r"step_size=True must be"),
        ({"solver": "rk4", "step_size": 1e308}, r"step_size=1e\+308 must be a number above 0, at most 10000"),
        ({"solver": "rk4", "step_size": 10**400}, r"step_size=10+ must be a number above 0, at most 10000"),
        ({"mlp_ratio": 1e-300}, r"mlp_ratio=1e-300 leaves a gate without width at embed_dim=256"),
        ({"mlp_ratio": True}, r"mlp_ratio=True must be a number"),
        ({"embed_dim": 8192, "mlp_ratio": 0.01, "global_pool": "map"}, r"embed_dim=8192, .* parameters, more than"),
        ({"step_size": 0.5}, r"step_size=0.5: solver='plain' takes neither a field nor"),
        ({"field": "black_box"}, r"field='black_box', .* choose a Runge-Kutta solver"),
        ({"embed_dim": 250}, r"embed_dim=250 must be divisible by num_heads=8"),
        ({"embed_dim": 10**9}, r"embed_dim=1000000000 must be an integer from 1 to 16384"),
        ({"num_heads": 0}, r"num_heads=0 must be"),
        ({"num_classes": -1}, r"num_classes=-1 must be an integer from 0"),
        ({"num_classes": 10**12}, r"num_classes=1000000000000 must be"),
        ({"in_chans": 0}, r"in_chans=0 must be"),
        ({"reg_tokens": -2}, r"reg_tokens=-2 must be"),
        ({"mlp_ratio": 0}, r"mlp_ratio=0 must be a number above 0"),
        ({"img_size": 0}, r"img_size=0 must be"),
        ({"img_size": (3, 32, 32)}, r"img_size=\(3, 32, 32\) must be one integer or a pair"),
        ({"img_size": "32"}, r"img_size='32' must be"),
        ({"patch_size": 64}, r"patch_size=64 is larger than img_size=32"),
        ({"patch_size": 1, "img_size": 16384}, r"img_size=16384, patch_size=1: a state of"),
        ({"depth": 1000, "embed_dim": 8192}, r"depth=1000, embed_dim=8192, .*: about .* parameters, more than"),
        ({"in_chans": 4096, "patch_size": 1024, "img_size": 1024}, r"in_chans=4096, patch_size=1024, .* parameters"),
        ({"num_classes": 10**6, "embed_dim": 16384}, r"num_classes=1000000: about .* parameters, more than"),
        ({"depth": 100, "steps": 10000}, r"horizon=10000 steps of depth=100 blocks: their product must be at most"),
        ({"reg_tokens": 10**9}, r"reg_tokens=1000000000 must be an integer from 0 to 4096"),
        ({"num_heads": 2048, "embed_dim": 4096}, r"num_heads=2048 must be an integer from 1 to 1024"),
        ({"in_chans": 10**9}, r"in_chans=1000000000 must be an integer from 1 to 4096"),
        ({"stages": 10**9}, r"stages=1000000000 must be an integer from 1 to 10000"),
        ({"img_size": 10**9}, r"img_size=1000000000 must be an integer from 1 to 16384"),
        ({"patch_size": 2048, "img_size": 2048}, r"patch_size=2048 must be an integer from 1 to 1024"),
        ({"mlp_ratio": 65}, r"mlp_ratio=65 must be a number above 0, at most 64"),
        ({"patch_size": (64, 4)}, r"patch_size=\(64, 4\) is larger than img_size=32"),
        ({"patch_size": (4, 64)}, r"patch_size=\(4, 64\) is larger than img_size=32"),
        ({"depth": 100, "embed_dim": 1024, "mlp_ratio": 3}, r"depth=100, embed_dim=1024, .* 1.4e\+09 parameters, more"),
        ({"embed_dim": 2048, "patch_size": 1, "img_size": 1024}, r"a state of 1048576 tokens of width 2048"),
        ({"drop_path_rate": 1.0}, r"drop_path_rate=1.0 must be"),
        ({"drop_path_rate": "0.1"}, r"drop_path_rate='0.1' must be"),
        ({"block_fn": nn.Linear}, r"block_fn=.*Linear.* must be a subclass of"),
    ],
    ids=lambda v: None if isinstance(v, str) else "-".join(f"{k}={x}"[:30] for k, x in v.items()),
)
def test_a_bad_argument_is_named_before_memory_is_spent(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("bvit", **kwargs)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="number_of_steps"):
        timm.create_model("bvit", number_of_steps=3)


@pytest.mark.parametrize("horizon", [0, -1, 1.5, "12", None, 10**9, True])
def test_a_bad_horizon_leaves_the_model_as_it_was(small, images, horizon):
    model = small("bvit")
    before = model(images)
    with pytest.raises(ValueError, match=f"horizon={horizon!r} must be an integer from 1 to 10000"):
        model.set_horizon(horizon)
    assert torch.equal(model(images), before)


def test_an_image_of_the_wrong_size_is_refused(small):
    with pytest.raises(AssertionError, match=r"height \(33\) doesn't match model \(32\)"):
        small("bvit")(torch.randn(1, 3, 33, 32))


def test_integer_images_are_refused_with_the_remedy(small):
    with pytest.raises(AssertionError, match=r"images must be floating point.*images.float\(\) / 255"):
        small("bvit")(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_an_empty_batch_gives_empty_logits(small, name):
    model = small(name)
    assert model(torch.zeros(0, 3, 32, 32)).shape == (0, 10)
    assert model.forward_steps(torch.zeros(0, 3, 32, 32)).shape == (model.horizon, 0, 10)


def test_the_class_can_be_used_without_the_registry():
    model = RecurrentVisionTransformer(img_size=16, patch_size=4, embed_dim=8, num_heads=2, num_classes=3, steps=2)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)


def test_set_horizon_has_the_limit_of_the_constructor():
    model = timm.create_model("bvit", depth=100, steps=1, device="meta")
    with pytest.raises(ValueError, match="horizon=10000 steps of depth=100 blocks: their product must be at most"):
        model.set_horizon(10_000)


def test_norm_pre_is_applied_to_the_tokens_of_the_stem(small, images):
    model = small("bvit", pre_norm=True)
    assert isinstance(model.norm_pre, nn.LayerNorm)
    assert torch.equal(model(images), timm_twin(model)(images))


@pytest.mark.parametrize("kind", ["attn_mask", "is_causal"])
def test_steps_and_stages_see_the_mask(small, images, name, kind):
    model = small(name, stages=3, steps=2)
    mask = {"attn_mask": torch.randn(64, 64), "is_causal": True}
    mask = {kind: mask[kind]}
    steps = model.forward_steps(images, **mask)
    assert torch.equal(model(images, return_all_steps=True, **mask), steps)
    assert torch.equal(torch.stack(list(model.forward_stages(images, **mask))), steps[1::2])
    assert torch.equal(model(images, **mask), steps[-1])
    assert not torch.equal(steps, model.forward_steps(images))
