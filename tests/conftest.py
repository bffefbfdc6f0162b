"""What several test files share: the names of the zoo, small models of them, small data."""

import os
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import recurrent_vit
from recurrent_vit import calibration, cifar

# The models are tiny: a second thread costs more than it brings, above all beside another job.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start

CIFAR_NAMES = [name for name in recurrent_vit.VARIANTS if "224" not in name]
SMALL = {"embed_dim": 32, "num_heads": 4, "num_classes": 10}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=CIFAR_NAMES)
def name(request):
    """Each CIFAR-sized name of the zoo in turn."""
    return request.param


@pytest.fixture
def small():
    """Build a narrow model of that name with weights far from their initial values, in evaluation mode."""

    def build(name, **kwargs):
        model = timm.create_model(name, **{**SMALL, **kwargs}).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    return build


@pytest.fixture
def images():
    return torch.randn(4, 3, 32, 32)


@pytest.fixture
def sharp(small):
    """Build a model whose logits differ much between images and steps."""

    def build(name="bvit", **kwargs):
        model = small(name, **{"embed_dim": 16, "num_heads": 2, "steps": 5, **kwargs})
        nn.init.normal_(model.head.weight)
        return model

    return build


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`evaluate` of a small model, on a CIFAR-100 of five hundred noisy images, a hundred of them to calibrate on."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8, generator=generator)
    found = cifar.Split(images, torch.arange(500) % 100)
    splits = {"train": found, "test": found[:60]}
    monkeypatch.setattr(cifar, "load", lambda root, split="train": splits[split])
    monkeypatch.setattr(calibration, "HELD_OUT", 100)
    model = timm.create_model("bvit_ds", embed_dim=16, num_heads=2)
    nn.init.normal_(model.head.weight)
    (tmp_path / "model").mkdir()
    save_for_hf(model, tmp_path / "model", safe_serialization=True)
    return SimpleNamespace(
        words=["evaluate", f"local-dir:{tmp_path / 'model'}"], model=model.eval(), splits=splits, folder=tmp_path
    )
