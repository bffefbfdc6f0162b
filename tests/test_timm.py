"""Every timm feature on every name: registry, building, heads, masks, initialisation, parameter groups, precision."""

import copy

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.layers import set_fused_attn, use_fused_attn
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, group_parameters, model_parameters
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.utils import ModelEmaV3, freeze, unfreeze
from torch import nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from recurrent_vit import VARIANTS, checkpoints

IMAGENET_NAMES = [name for name in VARIANTS if "224" in name]
TINY = {"embed_dim": 32, "num_heads": 4, "num_classes": 10}

every_name = pytest.mark.parametrize("name", VARIANTS)
PREFIX = {"class_token": True, "global_pool": "token", "reg_tokens": 2}


def tensors(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same_tensors(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.keys()
    return all(torch.equal(state[key], expected[key]) for key in expected)


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_the_registered_models_are_the_rows_of_the_table():
    assert set(timm.list_models(module="zoo")) == set(VARIANTS)
    tags = {row.id for row in checkpoints()} | {f"{name}.untrained" for name in VARIANTS if not checkpoints(name)}
    assert set(timm.list_models(module="zoo", include_tags=True)) == tags


@every_name
def test_a_name_is_registered_once_with_an_entry_point_of_that_name(name):
    assert timm.is_model(name)
    assert timm.models.is_model_in_modules(name, ["zoo"])
    assert timm.model_entrypoint(name).__name__ == name
    assert timm.list_models(name) == [name]
    assert get_arch_pretrained_cfgs(name)


@every_name
def test_every_tag_describes_the_pictures_and_the_ends_of_the_network(name):
    if name in IMAGENET_NAMES:  # timm's usual numbers
        expected = {"num_classes": 1000, "input_size": (3, 224, 224), "crop_pct": 0.9}
        expected |= {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    else:  # the means and deviations of CIFAR-100's training pictures, which are seen whole
        expected = {"num_classes": 100, "input_size": (3, 32, 32), "crop_pct": 1.0}
        expected |= {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)}
    expected |= {"fixed_input_size": True, "interpolation": "bicubic", "architecture": name}
    model = timm.create_model(name, device="meta")
    for tag, cfg in [("default", get_pretrained_cfg(name)), *get_arch_pretrained_cfgs(name).items()]:
        assert {key: getattr(cfg, key) for key in expected} == expected, tag
        assert isinstance(model.get_submodule(cfg.first_conv), nn.Conv2d), tag
        assert model.get_submodule(cfg.classifier) is model.get_classifier(), tag
    assert (model.num_classes, model.get_classifier().out_features) == (expected["num_classes"],) * 2
    assert model.patch_embed.img_size == expected["input_size"][1:]


def test_the_evaluation_transform_of_a_cifar_picture_only_normalises_it(name):
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    config = resolve_model_data_config(timm.create_model(name, device="meta"))
    x = create_transform(**config, is_training=False)(Image.fromarray(picture))
    pixels = torch.from_numpy(picture).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    torch.testing.assert_close(x, (pixels - mean) / std, rtol=1e-6, atol=1e-6)


@every_name
def test_weights_that_do_not_exist_are_refused(name):
    weightless = [tag for tag, cfg in get_arch_pretrained_cfgs(name).items() if not cfg.has_weights]
    assert bool(weightless) == (not checkpoints(name)), "a name is untrained until it has a checkpoint"
    for tag in weightless:
        with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
            timm.create_model(tag, pretrained=True)
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model(f"{name}.no_such_tag")


@pytest.mark.parametrize("name", IMAGENET_NAMES)
def test_an_imagenet_row_takes_its_pictures(name):
    model = timm.create_model(name, **TINY).eval()
    assert model(torch.randn(1, 3, 224, 224)).shape == (1, 10)
    assert (model.patch_embed.num_patches, model.num_prefix_tokens, model.nfe) == (196, 1, 12)


# ---- create_model: sizes, pooling, drop rates ------------------------------------------------------------------------


def test_num_classes_sizes_the_head_and_zero_leaves_the_pooled_features(small, images, name):
    model = small(name, num_classes=7)
    bare = small(name, num_classes=0)
    assert isinstance(bare.head, nn.Identity)
    assert set(bare.load_state_dict(model.state_dict(), strict=False).unexpected_keys) == {"head.weight", "head.bias"}
    assert torch.equal(model.head(bare(images)), model(images))
    assert model(images).shape == (4, 7)


@pytest.mark.parametrize("in_chans", [1, 5])
def test_in_chans_is_the_number_of_colours(small, name, in_chans):
    model = small(name, in_chans=in_chans)
    x = torch.randn(2, in_chans, 32, 32)
    assert model(x).shape == (2, 10)
    for channel in range(in_chans):
        changed = x.clone()
        changed[:, channel] += 1
        assert not torch.equal(model(changed), model(x)), f"channel {channel} is not seen"
    with pytest.raises(RuntimeError, match=f"to have {in_chans} channels"):
        model(torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize(("img_size", "tokens"), [(48, 144), ((16, 64), 64)], ids=["square", "oblong"])
def test_img_size_is_the_size_that_is_taken(small, images, name, img_size, tokens):
    model = small(name, img_size=img_size)
    assert model.forward_features(torch.randn(2, 3, *timm.layers.to_2tuple(img_size))).shape == (2, tokens, 32)
    with pytest.raises(AssertionError, match=r"Input height \(32\) doesn't match model"):
        model(images)


NAIVE_POOLS = {
    "avg": lambda z: z.mean(1),
    "max": lambda z: z.amax(1),
    "avgmax": lambda z: 0.5 * (z.mean(1) + z.amax(1)),
    "": lambda z: z,
}


@pytest.mark.parametrize("prefix", [{}, {"class_token": True, "reg_tokens": 2}], ids=["patches", "prefix"])
@pytest.mark.parametrize("global_pool", NAIVE_POOLS)
def test_global_pool_pools_the_patches_of_the_normalised_final_state(small, images, name, global_pool, prefix):
    model = small(name, global_pool=global_pool, **prefix)
    z = model.forward_features(images)
    assert z.shape == (4, 64 + (3 if prefix else 0), 32)
    patches = z[:, 3:] if prefix and global_pool else z  # '' keeps all tokens
    assert torch.equal(model(images), model.head(NAIVE_POOLS[global_pool](patches)))


@pytest.mark.parametrize("global_pool", ["map", "prr"])
def test_attention_pooling_pools_the_normalised_final_state(small, images, name, global_pool):
    model = small(name, global_pool=global_pool)
    assert torch.equal(model(images), model.head(model.attn_pool(model.forward_features(images))))
    assert model(images).shape == (4, 10)


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_a_class_token_is_the_first_token_and_is_pooled(small, images, name, no_embed_class):
    model = small(name, **PREFIX, no_embed_class=no_embed_class)
    z = model.patch_embed(images)
    prefix = torch.cat([model.cls_token, model.reg_token], 1).expand(4, -1, -1)
    z = torch.cat([prefix, z + model.pos_embed], 1) if no_embed_class else torch.cat([prefix, z], 1) + model.pos_embed
    for i in range(model.num_states):
        z = model.step(z) if model.tableau else model.blocks[i % model.depth](z)
    assert torch.equal(model(images), model.head(model.norm(z)[:, 0]))


def test_token_pooling_needs_a_class_token(name):
    with pytest.raises(AssertionError, match="Token pooling needs the class token"):
        timm.create_model(name, global_pool="token", device="meta")


@pytest.mark.parametrize(
    "rate",
    ["drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"],
)
def test_a_drop_rate_acts_in_training_alone(small, images, name, rate):
    model, plain = small(name, **{rate: 0.4}), small(name)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images), plain(images))
    model.train()
    plain.train()
    assert torch.equal(plain(images), plain(images))
    assert not torch.equal(model(images), model(images))
    assert model(images).isfinite().all()


def test_patch_dropout_keeps_that_share_of_the_patches(small, images, name):
    model = small(name, patch_drop_rate=0.75, **PREFIX).train()
    assert model.forward_features(images).shape == (4, 3 + 16, 32)


def test_a_dynamic_image_size_resamples_the_positions_as_set_input_size_does(small, images, name):
    dynamic, fixed = small(name, dynamic_img_size=True), small(name)
    fixed.load_state_dict(dynamic.state_dict())
    assert torch.equal(dynamic(images), fixed(images))
    for size in ((48, 48), (16, 40)):
        x = torch.randn(2, 3, *size)
        fixed.set_input_size(size)
        torch.testing.assert_close(dynamic(x), fixed(x), rtol=1e-5, atol=1e-5)
        fixed = small(name)
        fixed.load_state_dict(dynamic.state_dict())


# ---- changes after construction --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_classes", "global_pool"), [(7, None), (0, ""), (5, "max")])
def test_reset_classifier_changes_the_head_and_the_pooling_alone(small, images, name, num_classes, global_pool):
    model = small(name)
    features = model.forward_features(images)
    body = {key: value for key, value in tensors(model).items() if not key.startswith("head.")}
    model.reset_classifier(num_classes, global_pool)
    assert same_tensors(model, body | {f"head.{key}": value for key, value in model.head.state_dict().items()})
    pooled = NAIVE_POOLS["avg" if global_pool is None else global_pool](features)
    assert torch.equal(model(images), model.head(pooled))
    assert model.num_classes == num_classes
    assert model.get_classifier() is model.head
    if num_classes:
        assert [id(p) for p in list(model.parameters())[-2:]] == [id(p) for p in model.head.parameters()]


def test_reset_classifier_keeps_the_precision(small, name):
    model = small(name).bfloat16()
    model.reset_classifier(3)
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_set_input_size_resamples_the_positions_and_leaves_the_rest(small, images, name):
    model = small(name, **PREFIX)
    before, macs = tensors(model), model.macs
    model.set_input_size((48, 64))
    assert model.pos_embed.shape == (1, 3 + 12 * 16, 32)
    assert torch.equal(model.pos_embed[:, :3], before["pos_embed"][:, :3])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if k != "pos_embed")
    assert model(torch.randn(2, 3, 48, 64)).shape == (2, 10)
    assert model.macs == small(name, **PREFIX, img_size=(48, 64)).macs > macs
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(images)


def test_set_input_size_takes_another_patch_size(small, images, name):
    model = small(name)
    model.set_input_size(patch_size=8)
    assert model.patch_embed.proj.weight.shape[-2:] == (8, 8)
    assert model.forward_features(images).shape == (4, 16, 32)
    assert model.macs == small(name, patch_size=8).macs


# ---- masks -----------------------------------------------------------------------------------------------------------

# The patch of token 5, in the first row of an 8 x 8 grid.
PATCH_5 = (slice(None), slice(None), slice(0, 4), slice(20, 24))
FORBID_5 = torch.ones(64, 64, dtype=torch.bool).index_fill(1, torch.tensor(5), False)
MASKS = {
    "bool": FORBID_5,
    "bool-row": FORBID_5[None, None, :1],
    "bool-batch": FORBID_5.expand(4, 1, 64, 64),
    "additive": torch.zeros(64, 64).masked_fill(~FORBID_5, float("-inf")),
    "additive-heads": torch.randn(4, 64, 64).masked_fill(~FORBID_5, float("-inf")),
}


@pytest.fixture(params=[True, False], ids=["fused", "unfused"])
def fused(request):
    """timm's two attention kernels in turn; the choice is made when a model is built."""
    before = use_fused_attn()
    set_fused_attn(request.param)
    yield request.param
    set_fused_attn(before)


@pytest.mark.parametrize("kind", MASKS)
def test_a_token_that_a_mask_forbids_changes_no_other_token(small, images, name, fused, kind):
    model = small(name)
    changed = images.clone()
    changed[PATCH_5] += 1
    others = [i for i in range(64) if i != 5]
    a, b = (model.forward_features(x, attn_mask=MASKS[kind]) for x in (images, changed))
    assert torch.equal(a[:, others], b[:, others])
    assert not torch.equal(a[:, 5], b[:, 5])
    assert not torch.equal(*(model.forward_features(x)[:, others] for x in (images, changed)))


def test_forms_of_the_same_mask_agree(small, images, name):
    model = small(name)
    expected = model.forward_features(images, attn_mask=MASKS["bool"])
    for kind in ("bool-row", "bool-batch", "additive"):
        output = model.forward_features(images, attn_mask=MASKS[kind])
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5, msg=lambda m, k=kind: f"{k}: {m}")


def test_a_causal_state_depends_on_earlier_tokens_alone(small, images, name, fused):
    model = small(name)
    causal = model.forward_features(images, is_causal=True)
    triangle = model.forward_features(images, attn_mask=torch.ones(64, 64, dtype=torch.bool).tril())
    torch.testing.assert_close(causal, triangle, rtol=1e-5, atol=1e-5)
    changed = images.clone()
    changed[PATCH_5] += 1
    after = model.forward_features(changed, is_causal=True)
    assert torch.equal(after[:, :5], causal[:, :5])
    assert all(not torch.equal(after[:, i], causal[:, i]) for i in range(5, 64))


@pytest.mark.parametrize("mask", [{"attn_mask": FORBID_5}, {"is_causal": True}], ids=["mask", "causal"])
def test_forward_is_the_head_on_the_masked_features(small, images, name, mask):
    model = small(name)
    features = model.forward_features(images, **mask)
    assert torch.equal(model(images, **mask), model.head(features.mean(1)))
    assert torch.equal(model.forward_steps(images, **mask)[-1], model(images, **mask))


@every_name
def test_pre_logits_are_what_the_classifier_takes(small, name):
    model = small(name, img_size=32, patch_size=8, drop_rate=0.5).eval()
    features = model.forward_features(torch.randn(2, 3, 32, 32))
    pooled = features[:, 0] if model.has_class_token else features.mean(1)
    assert torch.equal(model.forward_head(features, pre_logits=True), pooled)
    assert torch.equal(model.forward_head(features), linear(pooled, model.head.weight, model.head.bias))


# ---- initialisation and stochastic depth -----------------------------------------------------------------------------


def drop_path_rates(model):
    return [[getattr(getattr(b, f"drop_path{i}"), "drop_prob", 0.0) for i in (1, 2)] for b in model.blocks]


def test_drop_path_grows_linearly_over_blocks_used_once_and_is_uniform_over_shared_ones(name):
    rates = drop_path_rates(timm.create_model(name, drop_path_rate=0.33, device="meta"))
    if name == "vit_cifar":
        assert np.allclose(rates, np.linspace(0, 0.33, 12)[:, None], rtol=0, atol=1e-7)
    else:
        assert rates == [[0.33, 0.33]]


def test_drop_path_is_uniform_over_several_shared_blocks():
    model = timm.create_model("bvit", depth=3, steps=4, drop_path_rate=0.2, device="meta")
    assert drop_path_rates(model) == [[0.2, 0.2]] * 3
    once = timm.create_model("bvit", depth=3, steps=1, drop_path_rate=0.2, device="meta")
    assert np.allclose(drop_path_rates(once), [[0, 0], [0.1, 0.1], [0.2, 0.2]], rtol=0, atol=1e-7)
    longer = timm.create_model("bvit", depth=3, steps=1, horizon=5, drop_path_rate=0.2, device="meta")
    assert drop_path_rates(longer) == drop_path_rates(once)  # the horizon is not what it is trained with
    staged = timm.create_model("bvit", depth=3, steps=1, stages=4, drop_path_rate=0.2, device="meta")
    assert drop_path_rates(staged) == [[0.2, 0.2]] * 3


@pytest.mark.parametrize("depth", [1, 3])
def test_a_shared_block_whose_paths_are_dropped_is_the_identity(small, images, name, depth):
    if name == "vit_cifar":
        depth = 1
    model = small(name, depth=depth, steps=4, drop_path_rate=1 - 1e-7, horizon=2).train()
    z = model.initial_state(images)
    assert torch.equal(model.forward_features(images), model.norm(z))
    assert not torch.equal(model.eval().forward_features(images), model.norm(z))


def test_drop_path_drops_that_share_of_the_pictures_afresh_at_every_evaluation(small, name):
    model = small(name, depth=1, drop_path_rate=0.3, horizon=12).train()
    kept = []
    model.blocks[0].drop_path2.register_forward_hook(lambda _, __, y: kept.append(y.flatten(1).any(1)))
    model(torch.randn(64, 3, 32, 32))
    kept = torch.stack(kept)
    assert kept.shape == (model.nfe, 64)
    assert abs(kept.float().mean().item() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
    assert kept.unique(dim=0).shape == kept.shape


@pytest.mark.parametrize("kwargs", [{}, {"depth": 3}], ids=["default", "depth3"])
def test_fix_init_scales_a_block_by_its_place_in_the_set(name, kwargs):
    def build(**more):
        torch.manual_seed(5)
        return timm.create_model(name, **TINY, **kwargs, **more)

    plain, fixed = build(), build(fix_init=True)
    scales = {}
    for i in range(plain.depth):
        scales |= {f"blocks.{i}.{layer}.weight": (2 * (i + 1)) ** 0.5 for layer in ("attn.proj", "mlp.fc2")}
    for key, value in plain.state_dict().items():
        assert torch.equal(fixed.state_dict()[key], value / scales.get(key, 1.0)), key


def expected_statistics(key, value):
    """(mean, standard deviation) of a freshly initialised tensor."""
    if key.endswith("bias"):
        return (1.0, 0.0) if "fc1_g" in key else (0.0, 0.0)
    if "norm" in key:
        return 1.0, 0.0
    if key in ("cls_token", "reg_token") or "fc1_g" in key:
        return 0.0, 1e-6
    return 0.0, 0.02


@every_name
def test_a_model_built_on_the_meta_device_is_initialised_once_it_has_memory(name):
    kwargs = {**TINY, "img_size": 32, "patch_size": 8, "embed_dim": 64, "class_token": True}
    model = timm.create_model(name, **kwargs, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.detach().fill_(float("nan"))
    model.init_weights()
    for key, value in model.state_dict().items():
        if key.startswith("patch_embed"):  # the convolution keeps PyTorch's own initialisation, uniform in +-1/sqrt(48)
            bound = (3 * 8 * 8) ** -0.5
            assert value.abs().max() <= bound, key
            assert value.abs().max() > 0.9 * bound, key
            continue
        mean, std = expected_statistics(key, value)
        error = std / value.numel() ** 0.5  # standard error of the mean; that of the deviation is smaller
        assert (value.mean() - mean).abs() <= 4 * error, key
        assert (value.std(unbiased=False) - std).abs() <= 4 * error, key
    assert model.eval()(torch.randn(2, 3, 32, 32)).isfinite().all()


def test_a_meta_model_takes_a_state_dict_by_assignment(small, images, name):
    model = small(name)
    meta = timm.create_model(name, **TINY, device="meta").eval()
    meta.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(meta(images), model(images))


# ---- parameters and their groups -------------------------------------------------------------------------------------


@every_name
@pytest.mark.parametrize("kwargs", [{}, {"class_token": True, "global_pool": "map"}], ids=["default", "map"])
def test_the_last_two_parameters_are_the_classifier(name, kwargs):
    model = timm.create_model(name, **kwargs, device="meta")
    body = {id(p) for p in model_parameters(model, exclude_head=True)}
    assert {id(p) for p in model.parameters()} - body == {id(p) for p in model.get_classifier().parameters()}


def layers(model):
    """The layer of each parameter: stem 0, block i at i + 1, the final norm with the last block, then the head."""
    last = model.depth
    first = {"pos_embed": 0, "cls_token": 0, "reg_token": 0, "patch_embed": 0, "norm": last, "head": last + 1}
    names = [key for key, _ in model.named_parameters()]
    return {key: int(key.split(".")[1]) + 1 if "blocks" in key else first[key.split(".")[0]] for key in names}


@pytest.mark.parametrize("kwargs", [{}, {"depth": 3}, PREFIX], ids=["default", "depth3", "prefix"])
def test_layer_decay_scales_each_layer_by_its_distance_from_the_head(name, kwargs):
    model = timm.create_model(name, **TINY, **kwargs)
    expected = layers(model)
    assert group_parameters(model, model.group_matcher(), reverse=True) == expected

    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    groups = [(id(p), group) for group in optimizer.param_groups for p in group["params"]]
    assert len(groups) == len(expected) == len(dict(groups))
    for key, p in model.named_parameters():
        group = dict(groups)[id(p)]
        assert group["lr_scale"] == 0.5 ** (model.depth + 1 - expected[key]), key
        decays = p.ndim > 1 and key not in ("pos_embed", "cls_token", "reg_token")
        assert group["weight_decay"] == (0.05 if decays else 0.0), key


def test_no_weight_decay_spares_positions_tokens_norms_and_biases(name):
    model = timm.create_model(name, **TINY, **PREFIX)
    spared, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    assert (spared["weight_decay"], decayed["weight_decay"]) == (0.0, 0.05)
    keys = {id(p): key for key, p in model.named_parameters()}
    decayed_keys = {keys[id(p)] for p in decayed["params"]}
    matrices = {f"{key}.weight" for key, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert decayed_keys == matrices
    assert {keys[id(p)] for p in spared["params"]} == set(keys.values()) - matrices


def test_the_moving_average_decays_a_shared_block_once_an_update(small, name):
    model = small(name)
    ema = ModelEmaV3(model, decay=0.9)
    before = tensors(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    ema.update(model)
    assert ema.module.state_dict().keys() == before.keys()
    for key, value in ema.module.state_dict().items():
        expected = 0.9 * before[key] + 0.1 * model.state_dict()[key]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_frozen_parts_get_no_gradient_until_they_are_thawed(small, images, name):
    model = small(name)
    freeze(model, ["patch_embed", "blocks"])
    model(images).sum().backward()
    trained = {key for key, p in model.named_parameters() if p.grad is not None}
    assert trained == {"pos_embed", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    unfreeze(model)
    model(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- precision -------------------------------------------------------------------------------------------------------


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float64, 1e-5)], ids=str)
@pytest.mark.parametrize("how", ["cast", "built"])
def test_a_model_of_another_precision_keeps_it_everywhere(small, images, name, dtype, tolerance, how):
    reference = small(name)
    model = copy.deepcopy(reference).to(dtype)
    if how == "built":
        model = timm.create_model(name, **TINY, dtype=dtype).eval()
        model.load_state_dict(reference.state_dict())
    assert {p.dtype for p in model.parameters()} == {dtype}
    x = images.to(dtype)
    final, states = model.forward_intermediates(x)
    for output in (model(x), model.forward_steps(x), *model.forward_stages(x), final, *states):
        assert output.dtype == dtype
        assert output.isfinite().all()
    assert 0 < relative_error(model(x), reference(images)) < tolerance
    model.train()(x).square().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


def test_autocast_computes_in_bfloat16_and_keeps_float32_parameters(small, images, name):
    model = small(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images)
    assert output.dtype == torch.bfloat16
    assert 0 < relative_error(output, model(images)) < 0.05
    output.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# ---- FLOP counters ---------------------------------------------------------------------------------------------------

COUNTED = {
    **{name: (name, {}) for name in VARIANTS},
    "bvit-depth3": ("bvit", {"depth": 3, "steps": 2, **PREFIX}),
    "bvit_ode_heun-black_box": ("bvit_ode_heun", {"depth": 2, "steps": 2, "field": "black_box"}),
    "bvit-horizon": ("bvit", {"horizon": 5, "num_classes": 0}),
    "bvit_ode_rk4-oblong": ("bvit_ode_rk4", {"img_size": (16, 48), "in_chans": 1, **PREFIX}),
}


@pytest.fixture(params=COUNTED)
def counted(request, small):
    """A narrow model whose attention is spelled out, since counters do not see into the fused kernel, and its input."""
    before = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(False)
    name, kwargs = COUNTED[request.param]
    model = small(name, **{"img_size": 32, "patch_size": 8, **kwargs})
    yield model, torch.randn(1, model.in_chans, *model.patch_embed.img_size)
    timm.layers.set_fused_attn(before)


def test_macs_are_half_the_flop_that_torch_counts(counted):
    model, x = counted
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() == 2 * model.macs


def test_macs_are_those_that_fvcore_counts(counted):
    fvcore = pytest.importorskip("fvcore.nn")
    model, x = counted
    analysis = fvcore.FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    by_operator = analysis.by_operator()
    assert sum(by_operator[op] for op in ("conv", "linear", "matmul")) == model.macs
    assert set(by_operator) <= {"conv", "linear", "matmul", "layer_norm"}


def test_macs_of_a_schedule_that_ends_inside_a_step(small, counted):
    model, x = counted
    if model.num_states > 1:
        model.prune_intermediate_layers([model.num_states - 2])
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() == 2 * model.macs


def test_macs_of_another_horizon_and_grid_are_those_of_the_model_that_has_them(small, name):
    model, other = small(name), small(name, horizon=5, img_size=(16, 48))
    assert model.count_macs(horizon=5, grid_size=(4, 12)) == other.macs != model.macs
    assert model.count_macs() == model.macs


def test_a_new_patch_size_is_stated_as_the_reduction_of_the_features(small):
    model = small("bvit")
    model.set_input_size(img_size=64, patch_size=8)
    assert {info["reduction"] for info in model.feature_info} == {8}
    assert len(model.feature_info) == model.num_states
