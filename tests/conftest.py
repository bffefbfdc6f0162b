"""What several test files share: the names of the zoo and small models of them."""

import os

import pytest
import timm
import torch

import recurrent_vit

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
