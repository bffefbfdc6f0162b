"""Blocks run by ONNX Runtime: the same numbers, under everything that a model can do between its blocks."""

import copy
import itertools
import os
import pickle
import sys
import threading

import onnx
import pytest
import timm
import torch
from torch import nn

import recurrent_vit
from recurrent_vit import Anytime, augment, cifar, evaluate, export
from recurrent_vit.measures import sigma_max
from recurrent_vit.optimized import OnnxBlock, optimize

CASES = [
    ("bvit", {}),
    ("bvit", {"depth": 3, "steps": 2}),
    ("bvit", {"solver": "midpoint", "step_size": 0.5}),
    ("bvit_ds", {}),
    ("bvit_ode_euler", {"field": "black_box", "steps": 3}),
    ("bvit_ode_heun", {"depth": 2, "steps": 2}),
    ("bvit_ode_rk4", {}),
    ("vit_cifar", {"depth": 2}),
    ("bvit", {"class_token": True, "global_pool": "token"}),
]


@torch.inference_mode()
def largest_difference(one, other, images):
    """Relative to the largest logit, over all steps."""
    ours, theirs = (model.eval().forward_steps(images) for model in (one, other))
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=lambda value: str(value))
def test_it_computes_what_the_model_computes(name, kwargs, small, images):
    model = small(name, **kwargs)
    fast = optimize(model)
    assert largest_difference(fast, model, images) < 1e-5
    assert largest_difference(fast, model, images[:1]) < 1e-5
    longer = 2 * model.horizon + 1
    model.set_horizon(longer)
    fast.set_horizon(longer)
    assert largest_difference(fast, model, images) < 1e-5


@pytest.mark.parametrize(("name", "kwargs"), CASES[:4], ids=lambda value: str(value))
def test_in_int8_the_products_of_a_block_are_quantised(name, kwargs, small, images):
    model = small(name, **kwargs)
    fast = optimize(model, int8=True)
    assert 1e-4 < largest_difference(fast, model, images) < 0.1
    for block, residual in itertools.product(model.blocks, (False, True)):
        graph = onnx.load_from_string(export.block_to_onnx(block.eval(), residual, int8=True)).graph
        assert sum(node.op_type == "MatMulInteger" for node in graph.node) == 5


def test_field_and_block_set_are_both_there(small, images):
    model = small("bvit", depth=2)
    fast = optimize(model)
    with torch.inference_mode():
        z = model.initial_state(images)
        torch.testing.assert_close(fast.block_set(z), model.eval().block_set(z), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fast.vector_field(z), model.vector_field(z), rtol=1e-5, atol=1e-5)


def test_the_model_stays_as_it_is(small, images):
    model = small("bvit").train()
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model)
    assert model.training
    assert not fast.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(module, OnnxBlock) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert fast.macs == model.macs
    assert fast.horizon == model.horizon


def test_other_numbers_of_tokens(small):
    model = small("bvit", dynamic_img_size=True)
    fast = optimize(model)
    for size in (16, 24, 32):
        assert largest_difference(fast, model, torch.randn(2, 3, size, size)) < 1e-5


def test_early_exit_is_the_same(small, images):
    model = small("bvit", steps=6).eval()
    with torch.inference_mode():
        threshold = model.forward_steps(images).softmax(-1).amax(-1)[2].median().item()
        plain, fast = (Anytime(one, "confidence", threshold)(images) for one in (model, optimize(model)))
    assert plain.steps.unique().numel() > 1, "some leave early"
    assert fast.steps.tolist() == plain.steps.tolist()
    torch.testing.assert_close(fast.logits, plain.logits, rtol=1e-5, atol=1e-5)


def test_copies_make_sessions_of_their_own(small, images):
    fast = optimize(small("bvit"))
    with torch.inference_mode():
        expected = fast(images)
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            torch.testing.assert_close(twin(images), expected, rtol=0, atol=0)
            assert twin.blocks[0].session(False) is not fast.blocks[0].session(False)


def test_parameters_keep_their_names_and_loaded_weights_take_effect(small, images):
    model, other = small("bvit", depth=2), small("bvit", depth=2)
    fast = optimize(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert largest_difference(fast, other, images) > 1e-2
    fast.load_state_dict(other.state_dict())
    assert largest_difference(fast, other, images) < 1e-5


def test_threads_are_those_of_the_call(small):
    model, before = small("bvit"), torch.get_num_threads()
    fast = optimize(model, threads=2)
    torch.set_num_threads(1)
    try:
        for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            for residual in (False, True):
                assert one.blocks[0].session(residual).get_session_options().intra_op_num_threads == 2
        assert optimize(model).blocks[0].session(False).get_session_options().intra_op_num_threads == 1
    finally:
        torch.set_num_threads(before)


def test_what_a_model_is_used_by_takes_it(small, images):
    model = small("bvit_ode_heun", depth=2, steps=2)
    fast = optimize(model)
    split = cifar.Split(torch.randint(256, (7, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (7,)))
    (ours,), (theirs,) = (evaluate.evaluate(one, split) for one in (fast, model))
    for key in ("top1", "NFE", "MACs", "parameters", "solver"):
        assert ours[key] == theirs[key], key
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    with torch.inference_mode():
        for ours, theirs in zip(*(one.forward_intermediates(images, intermediates_only=True) for one in (fast, model))):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    again = evaluate.rebuild(fast, solver="rk4")
    assert not any(isinstance(module, OnnxBlock) for module in again.modules())
    assert largest_difference(again, evaluate.rebuild(model, solver="rk4"), images) < 1e-5


def test_a_model_in_another_dtype_becomes_float32(small, images):
    model = small("bvit")
    fast = optimize(copy.deepcopy(model).double())
    assert largest_difference(fast, model, images) < 1e-5


def test_no_image_gives_no_logits(small):
    with torch.inference_mode():
        assert optimize(small("bvit"))(torch.empty(0, 3, 32, 32)).shape == (0, 10)


def test_what_it_cannot_do_is_an_error(small, images):
    fast = optimize(small("bvit"))
    with pytest.raises(ValueError, match="takes no masks"):
        fast(images, is_causal=True)
    with pytest.raises(ValueError, match="takes no masks"):
        fast(images, attn_mask=torch.ones(64, 64, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="no derivatives"):
        fast(images.clone().requires_grad_())
    z = torch.randn(2, 64, 32)
    with pytest.raises(RuntimeError, match="no derivatives"):
        sigma_max(fast.step, z)
    with pytest.raises(ValueError, match=r"torch\.float64 on cpu"):
        fast.double()(images.double())
    with pytest.raises(ValueError, match="blocks have been replaced"):
        optimize(fast)
    with pytest.raises(ValueError, match="must be a RecurrentVisionTransformer"):
        optimize(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        empty = small("bvit")
    with pytest.raises(ValueError, match="no weights"):
        optimize(empty)


def test_a_missing_package_is_named(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'needs onnxruntime: pip install "recurrent-vit\[export\]"'):
        optimize(small("bvit"))


@pytest.mark.skipif("RECURRENT_VIT_DATA" not in os.environ, reason="needs CIFAR-100: set RECURRENT_VIT_DATA")
@pytest.mark.skipif(not recurrent_vit.checkpoints("bvit"), reason="this checkout has no weights of bvit")
def test_int8_hardly_changes_the_answers_of_trained_weights():
    model = timm.create_model("bvit", pretrained=True).eval()
    split = cifar.load(None, "test")[:200]
    images = augment.normalize(split.images)
    with torch.inference_mode():
        plain, fast = model(images).argmax(-1), optimize(model, int8=True)(images).argmax(-1)
    assert (plain == fast).float().mean() > 0.95


# ---- threads, autocast, weights --------------------------------------------------------------------------------------


def test_several_threads_may_make_the_first_call(small, images):
    model, found = small("bvit"), []
    fast = copy.deepcopy(optimize(model))  # a copy has no session yet

    def call():
        with torch.inference_mode():
            found.append(fast(images))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for logits in found:
        torch.testing.assert_close(logits, model(images).detach(), rtol=1e-4, atol=1e-4)


def test_a_session_made_under_autocast_is_the_same(small, images):
    model = small("bvit")
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimize(model)
        again = copy.deepcopy(fast)
        with torch.inference_mode():
            z = again.initial_state(images).float()
            y = again.blocks[0](z)
    with torch.inference_mode():
        torch.testing.assert_close(y, model.blocks[0](z), rtol=1e-4, atol=1e-4)


def test_a_change_in_place_changes_neither_of_the_two_graphs(small, images):
    fast = optimize(small("bvit"))
    with torch.inference_mode():
        z = fast.initial_state(images)
        before = fast.blocks[0](z)
    with torch.no_grad():
        for parameter in fast.blocks.parameters():
            parameter.mul_(1.5)
    with torch.inference_mode():
        for twin in (fast, copy.deepcopy(fast)):
            torch.testing.assert_close(twin.blocks[0](z), before)
            torch.testing.assert_close(z + twin.blocks[0](z, residual=True), before, rtol=1e-4, atol=1e-4)
    fast.load_state_dict(fast.state_dict())
    with torch.inference_mode():
        assert (fast.blocks[0](z) - before).norm() > 0.01 * before.norm(), "loading them does"


def test_parameters_of_the_block_itself_keep_their_names(small, images):
    model = small("bvit")
    model.blocks[0].gain = nn.Parameter(torch.ones(3))
    model.blocks[0].register_buffer("count", torch.zeros(1))
    fast = optimize(model)
    assert fast.state_dict().keys() == model.state_dict().keys()
    fast.load_state_dict(model.state_dict())


@pytest.mark.parametrize("threads", [0, 1.5, "2", True, 10**6])
def test_threads_are_a_whole_number(threads, small):
    with pytest.raises(ValueError, match=r"threads=.* must be a whole number from 1 to 1024"):
        optimize(small("bvit"), threads=threads)
