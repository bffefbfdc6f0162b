"""The published folders in transformers: auto classes, pipeline, Trainer, and back to timm."""

import pytest
import timm
import torch
from PIL import Image

from recurrent_vit import cifar
from recurrent_vit.weights import checkpoints

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(params=checkpoints(), ids=lambda row: row.id)
def folder(request):
    return request.param.path.parent


@pytest.fixture
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def timm_logits(folder, images):
    with torch.no_grad():
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images)


def transformers_logits(folder, images):
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(images).logits


def test_the_auto_class_gives_the_logits_of_timm(folder, images):
    torch.testing.assert_close(transformers_logits(folder, images), timm_logits(folder, images))


def test_the_pipeline_names_the_class_that_timm_finds(folder):
    row = next(row for row in checkpoints() if row.path.parent == folder)
    image = Image.effect_noise((45, 37), 80).convert("RGB")
    probabilities = timm_logits(folder, row.transforms()(image)[None]).softmax(-1)[0]
    first, *_ = transformers.pipeline("image-classification", model=str(folder))(image)
    assert first["label"] == cifar.FINE_NAMES[probabilities.argmax()]
    assert first["score"] == pytest.approx(probabilities.max().item(), abs=1e-4)


def test_trainer_trains_it_and_both_libraries_load_the_result(folder, images, tmp_path):
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    examples = [{"pixel_values": image, "labels": label} for label, image in enumerate(images)]
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    trainer.train()
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())

    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        expected = model.eval()(images).logits
    torch.testing.assert_close(transformers_logits(tmp_path / "saved", images), expected)
    torch.testing.assert_close(timm_logits(tmp_path / "saved", images), expected)
