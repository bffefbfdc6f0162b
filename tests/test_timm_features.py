"""Every timm feature on every name: intermediates, pruning, features_only, gradient checkpointing."""

import pytest
import timm
import torch
from torch import nn

from recurrent_vit import VARIANTS

SMALL = {"embed_dim": 32, "num_heads": 4}
PREFIX = {"class_token": True, "global_pool": "token", "reg_tokens": 2}

# Each name of the zoo at its own depth, steps and solver, and what the names leave out.
CASES = {
    **{name: (name, {}) for name in VARIANTS},
    "bvit-depth3": ("bvit", {"depth": 3, "steps": 2}),
    "bvit-prefix": ("bvit", {"depth": 2, "steps": 3, **PREFIX}),
    "bvit_ode_rk4-depth2": ("bvit_ode_rk4", {"depth": 2, "solver": "rk4_38", "step_size": 0.5, **PREFIX}),
    "bvit_ode_heun-black_box": ("bvit_ode_heun", {"steps": 3, "field": "black_box"}),
}


@pytest.fixture(params=CASES)
def model(request, small):
    """A narrow model of each case, on a grid of 4 x 4 patches."""
    name, kwargs = CASES[request.param]
    return small(name, img_size=32, patch_size=8, **kwargs)


def evaluations_per_state(model):
    """Applications of each block between one state and the next."""
    return model.evaluations_per_step * (1 if model.tableau is None else model.depth)


def naive_states(model, images, **mask):
    """Every state on the way, by the plainest loop there is."""
    z = model.norm_pre(model._pos_embed(model.patch_embed(images)).contiguous())  # in this order a mean rounds alike
    states = []
    for i in range(model.num_states):
        z = model.step(z, **mask) if model.tableau else model.blocks[i % model.depth](z, **mask)
        states.append(z)
    return states


def as_map(model, z):
    """Patch tokens (B, 16 + prefix, C) to (B, C, 4, 4), token by token."""
    out = torch.empty(z.shape[0], z.shape[2], 4, 4)
    for i in range(16):
        out[:, :, i // 4, i % 4] = z[:, model.num_prefix_tokens + i]
    return out


def patches(model, z):
    return z[:, model.num_prefix_tokens :]


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert a.shape == b.shape, i
        assert torch.equal(a, b), i


@pytest.fixture
def count():
    """Count the calls of modules: count(modules) gives a list whose one entry grows."""
    handles = []

    def start(modules):
        calls = [0]
        for module in modules:
            handles.append(module.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1)))
        return calls

    yield start
    for handle in handles:
        handle.remove()


# ---- forward_intermediates -------------------------------------------------------------------------------------------


def test_intermediates_are_all_states_and_the_final_features(model, images):
    final, maps = model.forward_intermediates(images)
    states = naive_states(model, images)
    assert_same(maps, [as_map(model, z) for z in states])
    assert torch.equal(final, model.forward_features(images))
    assert torch.equal(final, model.norm(states[-1]))


@pytest.mark.parametrize(
    ("indices", "taken"),
    [(1, [-1]), (3, [-3, -2, -1]), ([0, 2], [0, 2]), ((-1,), [-1]), ([-1, 0, 1], [0, 1, -1]), ([1, 1], [1])],
    ids=str,
)
def test_indices_choose_states_in_the_order_of_the_schedule(model, images, indices, taken):
    states = naive_states(model, images)
    maps = model.forward_intermediates(images, indices=indices, intermediates_only=True)
    assert_same(maps, [as_map(model, states[i]) for i in taken])


@pytest.mark.parametrize("indices", [0, 1000, [1000], [-1000]], ids=str)
def test_an_index_outside_the_schedule_is_refused(model, images, indices):
    with pytest.raises(AssertionError, match="out of range"):
        model.forward_intermediates(images, indices=indices)


def test_output_fmt_is_a_map_or_a_sequence_and_nothing_else(model, images):
    states = naive_states(model, images)
    for output_fmt, expected in (("NCHW", as_map), ("NLC", patches)):
        _, ours = model.forward_intermediates(images, indices=[0, -1], output_fmt=output_fmt)
        assert_same(ours, [expected(model, states[0]), expected(model, states[-1])])
    with pytest.raises(AssertionError, match="NCHW or NLC"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_norm_is_applied_to_the_intermediates_before_the_prefix_is_split(model, images):
    expected = [model.norm(z) for z in naive_states(model, images)]
    pairs = model.forward_intermediates(
        images, norm=True, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
    )
    if model.num_prefix_tokens:
        assert_same([prefix for _, prefix in pairs], [z[:, : model.num_prefix_tokens] for z in expected])
        pairs = [spatial for spatial, _ in pairs]
    assert_same(pairs, [patches(model, z) for z in expected])
    assert not torch.equal(pairs[-1], patches(model, naive_states(model, images)[-1]))


def test_output_dict_holds_what_was_asked_for(model, images):
    final, maps = model.forward_intermediates(images, indices=2)
    full = model.forward_intermediates(images, indices=2, output_dict=True)
    assert full.keys() == {"image_intermediates", "image_features"}
    assert torch.equal(full["image_features"], final)
    assert_same(full["image_intermediates"], maps)

    bare = model.forward_intermediates(
        images, indices=2, output_dict=True, intermediates_only=True, return_prefix_tokens=True
    )
    assert_same(bare.pop("image_intermediates"), maps)
    if model.num_prefix_tokens:
        expected = [z[:, : model.num_prefix_tokens] for z in naive_states(model, images)[-2:]]
        assert_same(bare.pop("image_intermediates_prefix"), expected)
    assert not bare


def test_stop_early_stops_at_the_last_state_asked_for(model, images, count):
    states = naive_states(model, images)
    calls = count(model.blocks)
    final, maps = model.forward_intermediates(images, indices=[0, 1], stop_early=True)
    assert calls[0] == 2 * evaluations_per_state(model)
    assert_same(maps, [as_map(model, z) for z in states[:2]])
    assert torch.equal(final, model.norm(states[1]))
    model.forward_intermediates(images, indices=[0, 1])
    assert calls[0] == (2 + model.num_states) * evaluations_per_state(model)


@pytest.mark.parametrize("kind", ["mask", "causal"])
def test_intermediates_see_the_mask(model, images, kind):
    tokens = 16 + model.num_prefix_tokens
    allowed = torch.rand(tokens, tokens) < 0.5
    mask = {"is_causal": True} if kind == "causal" else {"attn_mask": allowed.fill_diagonal_(True)}
    states = naive_states(model, images, **mask)
    final, maps = model.forward_intermediates(images, **mask)
    assert_same(maps, [as_map(model, z) for z in states])
    assert torch.equal(final, model.forward_features(images, **mask))
    assert not torch.equal(final, model.forward_features(images))
    if kind == "mask":
        last = model.get_intermediate_layers(images, 1, **mask)
        assert_same(last, [patches(model, states[-1])])


def test_get_intermediate_layers_is_the_same_in_dino_terms(model, images):
    states = naive_states(model, images)
    assert_same(model.get_intermediate_layers(images, [0, -1]), [patches(model, states[i]) for i in (0, -1)])
    assert_same(
        model.get_intermediate_layers(images, 2, reshape=True, norm=True),
        [as_map(model, model.norm(z)) for z in states[-2:]],
    )
    if model.num_prefix_tokens:
        ((spatial, prefix),) = model.get_intermediate_layers(images, return_prefix_tokens=True)
        assert torch.equal(torch.cat([prefix, spatial], 1), states[-1])


def test_intermediates_of_other_image_sizes_have_their_shape(small, name):
    model = small(name, img_size=(16, 32), patch_size=8, dynamic_img_size=True)
    for height, width in ((16, 32), (24, 8)):
        maps = model.forward_intermediates(torch.randn(2, 3, height, width), indices=1, intermediates_only=True)
        assert maps[0].shape == (2, 32, height // 8, width // 8)


# ---- prune_intermediate_layers ---------------------------------------------------------------------------------------


def test_pruning_shortens_the_schedule_and_leaves_the_states_as_they_were(model, images):
    states, macs = naive_states(model, images), model.macs
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert model.num_states == len(model.feature_info) == 2
    assert model.macs < macs
    assert isinstance(model.head, nn.Identity)
    final, maps = model.forward_intermediates(images, indices=[0, 1])
    assert_same(maps, [as_map(model, z) for z in states[:2]])
    assert torch.equal(final, model.norm(states[1]))
    assert torch.equal(model.forward_features(images), final)
    with pytest.raises(ValueError, match="this model was pruned to its first 2 states; horizon and stages went"):
        model.set_horizon(3)


def test_pruning_normalises_negative_indices(model, images):
    states = naive_states(model, images)
    last = model.num_states - 1
    assert model.prune_intermediate_layers([-1, 0]) == [last, 0]
    assert model.num_states == last + 1
    maps = model.forward_intermediates(images, indices=[last, 0], intermediates_only=True)
    assert_same(maps, [as_map(model, states[0]), as_map(model, states[-1])])


@pytest.mark.parametrize(("last", "blocks"), [(0, 1), (1, 2), (2, 3), (3, 3), (5, 3)])
def test_pruning_drops_the_blocks_that_are_out_of_reach(small, images, count, last, blocks):
    model = small("bvit", depth=3, steps=2)
    states = naive_states(model, images)
    kept = list(model.blocks)[:blocks]
    model.prune_intermediate_layers([last], prune_head=False)
    assert list(model.blocks) == kept
    calls = count(model.blocks)
    assert torch.equal(model(images), model.head(model.norm(states[last]).mean(1)))
    assert calls[0] == last + 1


def test_pruning_a_solver_keeps_every_block(small, images):
    model = small("bvit_ode_rk4", depth=3)
    states = naive_states(model, images)
    model.prune_intermediate_layers([0])
    assert model.depth == 3
    assert torch.equal(model.forward_features(images), model.norm(states[0]))


@pytest.mark.parametrize("prune_norm", [False, True])
@pytest.mark.parametrize("prune_head", [False, True])
def test_pruning_removes_the_norm_and_the_head_when_asked(model, images, prune_norm, prune_head):
    head, z = model.head, naive_states(model, images)[0]
    z = z if prune_norm else model.norm(z)
    model.prune_intermediate_layers([0], prune_norm=prune_norm, prune_head=prune_head)
    assert torch.equal(model.forward_features(images), z)
    if prune_head:
        assert torch.equal(model(images), z)
        assert model.num_classes == 0
    else:
        pooled = z[:, 0] if model.has_class_token else z.mean(1)
        assert torch.equal(model(images), head(pooled))


@pytest.mark.parametrize("index", range(6))
def test_a_pruned_model_ends_its_steps_in_its_output(small, images, index):
    model = small("bvit", depth=3, steps=2)
    model.prune_intermediate_layers([index], prune_head=False)
    steps = model.forward_steps(images)
    assert len(steps) == model.horizon
    assert torch.equal(steps[-1], model(images))


# ---- features_only ---------------------------------------------------------------------------------------------------


def features_net(case, model, **kwargs):
    """timm's feature extractor of that case with the weights of model."""
    name, arguments = CASES[case]
    net = timm.create_model(name, features_only=True, img_size=32, patch_size=8, **{**SMALL, **arguments, **kwargs})
    body = next(m for m in (getattr(net, key, None) for key in ("model", "body", "graph_module")) if m is not None)
    assert not body.load_state_dict(model.state_dict(), strict=False).missing_keys
    return net.eval()


@pytest.mark.parametrize("case", CASES)
def test_getter_hooks_and_fx_give_the_same_features(small, images, case):
    name, arguments = CASES[case]
    model = small(name, img_size=32, patch_size=8, **arguments)
    states = naive_states(model, images)
    indices = (0, 1, model.num_states - 1)
    expected = [states[i] for i in indices]
    for feature_cls in ("getter", "hook", "fx"):
        net = features_net(case, model, feature_cls=feature_cls, out_indices=indices)
        features = net(images)
        if feature_cls == "getter":
            assert_same(features, [as_map(model, z) for z in expected])
        else:
            assert_same(features, expected)  # as sequences with their prefix
        assert net.feature_info.channels() == [32] * 3
        assert net.feature_info.reduction() == [8] * 3
        assert net.feature_info.module_name() == [f"taps.{i}" for i in indices]


@pytest.mark.parametrize("case", CASES)
def test_features_only_takes_the_last_three_states_and_negative_indices(small, images, case):
    name, arguments = CASES[case]
    model = small(name, img_size=32, patch_size=8, **arguments)
    states = naive_states(model, images)
    assert_same(features_net(case, model)(images), [as_map(model, z) for z in states[-3:]])
    for feature_cls in ("getter", "hook", "fx"):
        first, last = features_net(case, model, feature_cls=feature_cls, out_indices=(-3, -1))(images)
        if feature_cls == "getter":
            first, last = (y.flatten(2).mT for y in (first, last))
        else:
            first, last = patches(model, first), patches(model, last)
        assert_same([first, last], [patches(model, states[i]) for i in (-3, -1)])


def test_features_come_from_a_horizon_that_is_asked_for(small, images, name):
    net = timm.create_model(name, features_only=True, horizon=20, **SMALL)
    assert len(net.feature_info) == 20 * net.model._states_per_step
    first = timm.create_model(name, features_only=True, out_indices=[0], **SMALL)
    assert (first.model.num_states, len(first(images))) == (1, 1)


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


def gradients(model, forward):
    model.zero_grad()
    torch.manual_seed(7)  # of the dropout masks
    output = forward(model)
    output.square().sum().backward()
    return output, [p.grad.clone() for p in model.parameters()]


PATHS = {
    "forward": lambda model, x: model(x),
    "causal": lambda model, x: model(x, is_causal=True),
    "mask": lambda model, x: model(x, attn_mask=torch.ones(16 + model.num_prefix_tokens).diag().bool()),
    "steps": lambda model, x: model.forward_steps(x),
    "stages": lambda model, x: torch.stack(list(model.forward_stages(x))),
}


@pytest.mark.parametrize("path", PATHS)
def test_checkpointing_changes_neither_output_nor_gradients(model, images, path):
    model.train()
    output, expected = gradients(model, lambda m: PATHS[path](m, images))
    model.set_grad_checkpointing()
    ours, grads = gradients(model, lambda m: PATHS[path](m, images))
    assert torch.equal(ours, output)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_checkpointed_intermediates_have_the_same_gradients(model, images):
    def forward(m):
        final, maps = m.forward_intermediates(images, indices=2)
        return torch.stack([m.forward_head(final).sum(), *(y.square().mean() for y in maps)])

    output, expected = gradients(model, forward)
    model.set_grad_checkpointing()
    ours, grads = gradients(model, forward)
    assert torch.equal(ours, output)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_checkpointing_recomputes_the_same_dropout(small, images, name):
    rates = {
        "drop_path_rate": 0.3,
        "proj_drop_rate": 0.2,
        "attn_drop_rate": 0.2,
        "pos_drop_rate": 0.1,
        "drop_rate": 0.1,
    }
    model = small(name, patch_size=8, **rates).train()
    output, expected = gradients(model, lambda m: m(images))
    assert not torch.equal(model(images), output)
    model.set_grad_checkpointing()
    ours, grads = gradients(model, lambda m: m(images))
    assert torch.equal(ours, output)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_checkpointing_runs_every_block_twice(model, images, count):
    attention, blocks = count(block.attn for block in model.blocks), count(model.blocks)
    total = model.num_states * evaluations_per_state(model)
    model.set_grad_checkpointing()
    loss = model(images).sum()
    assert (attention[0], blocks[0]) == (total, total)
    loss.backward()
    assert attention[0] == 2 * total
    model.set_grad_checkpointing(False)
    model(images).sum().backward()
    assert attention[0] == 3 * total


def saved_bytes(model, images):
    """Bytes that the forward pass keeps for the backward pass, parameters left out."""
    own = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # alive, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_checkpointing_keeps_one_state_for_each_block_application(model, images):
    model.train()
    state = 4 * images.shape[0] * (16 + model.num_prefix_tokens) * 32
    before = saved_bytes(model, images)
    model.set_grad_checkpointing()
    short = saved_bytes(model, images)
    assert short < before / 3
    horizon = model.horizon
    model.set_horizon(horizon + 4)
    per_step = model.depth * model.evaluations_per_step
    assert saved_bytes(model, images) - short == 4 * per_step * state


def test_a_pruned_model_refuses_stages_which_need_whole_steps(small, images):
    model = small("bvit", depth=3, steps=2)
    model.prune_intermediate_layers([1])
    with pytest.raises(ValueError, match="pruned to its first 2 states"):
        next(model.forward_stages(images))
