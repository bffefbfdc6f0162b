"""The set is one and the same from every source; its augmentation is a pure function of (seed, epoch, batch)."""

import hashlib
import io
import itertools
import os
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR100
from torchvision.transforms import v2

from recurrent_vit import augment, cifar
from recurrent_vit.augment import Augmentation
from recurrent_vit.cifar import Split

pa = pytest.importorskip("pyarrow", reason="writing and reading parquet needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="writing and reading parquet needs pyarrow")

needs_data = pytest.mark.skipif(
    not os.environ.get("RECURRENT_VIT_DATA"), reason="RECURRENT_VIT_DATA is not set: needs the real CIFAR-100"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU with the CPU: no GPU here")

TINY = {"train": 300, "test": 200}  # three and two images a class


def noise(count, seed=0):
    """Random images with labels 0, 1, .. 99, 0, 1 ..."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(count) % 100)


# Writing the three layouts ------------------------------------------------------------------------------------------


def encode(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"compress_level": 1} if kind == "PNG" else {}))
    return file.getvalue()


def images(split):
    return [np.ascontiguousarray(image) for image in split.images.permute(0, 2, 3, 1).numpy()]


def columns(split):
    """The columns of the Hub's parquet, as lists."""
    fine = split.labels.tolist()
    return {
        "img": [{"bytes": encode(pixels), "path": f"{row}.png"} for row, pixels in enumerate(images(split))],
        "fine_label": fine,
        "coarse_label": [cifar.COARSE_OF_FINE[label] for label in fine],
    }


def write_parquet(folder, splits):
    folder.mkdir(parents=True)
    for name, split in splits.items():
        pq.write_table(pa.table(columns(split)), folder / f"{name}-00000-of-00001.parquet")


def write_shards(folder, splits):
    """As the Hub does with larger sets, in the folder that its checkout has."""
    (folder / "cifar100").mkdir(parents=True)
    for name, split in splits.items():
        table, middle = pa.table(columns(split)), len(split) // 3
        pq.write_table(table[:middle], folder / f"cifar100/{name}-00000-of-00002.parquet")
        pq.write_table(table[middle:], folder / f"cifar100/{name}-00001-of-00002.parquet")


def write_torchvision(folder, splits):
    inside = folder / "cifar-100-python"
    inside.mkdir(parents=True)
    for name, split in splits.items():
        entry = {"data": split.images.flatten(1).numpy(), "fine_labels": split.labels.tolist()}
        (inside / name).write_bytes(pickle.dumps(entry))
    (inside / "meta").write_bytes(pickle.dumps({"fine_label_names": list(cifar.FINE_NAMES)}))


def write_folders(folder, splits):
    for name, split in splits.items():
        for fine in cifar.FINE_NAMES:
            (folder / name / fine).mkdir(parents=True)
        for row, (pixels, label) in enumerate(zip(images(split), split.labels, strict=True)):
            (folder / name / cifar.FINE_NAMES[label] / f"{row}.png").write_bytes(encode(pixels))


WRITERS = {"parquet": write_parquet, "shards": write_shards, "torchvision": write_torchvision, "folders": write_folders}


def accept_pickles(monkeypatch, folder):
    """Have torchvision expect the md5 sums of our pickles: those of the true ones cannot be met by a copy."""
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (folder / "cifar-100-python").iterdir()}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})


def class_sums(split):
    """The number of images and the sum over all pixels of each class."""
    sums = split.images.flatten(1).sum(1, dtype=torch.int64)
    return split.labels.bincount(), torch.zeros(100, dtype=torch.int64).index_add(0, split.labels, sums)


def multiset(split):
    return sorted(zip(split.labels.tolist(), (image.tobytes() for image in split.images.numpy()), strict=True))


@pytest.fixture
def tiny(monkeypatch):
    """A small set, with `load` told to expect that many."""
    monkeypatch.setattr(cifar, "ROWS", TINY)
    monkeypatch.delenv("RECURRENT_VIT_DATA", raising=False)
    return {name: noise(count, seed=count) for name, count in TINY.items()}


# The set ------------------------------------------------------------------------------------------------------------


def test_names():
    assert len(cifar.FINE_NAMES) == len(set(cifar.FINE_NAMES)) == 100
    assert list(cifar.FINE_NAMES) == sorted(cifar.FINE_NAMES)
    assert cifar.FINE_NAMES[44] == "lizard"
    assert list(cifar.COARSE_NAMES) == sorted(cifar.COARSE_NAMES)
    assert len(cifar.COARSE_NAMES) == 20
    assert np.bincount(cifar.COARSE_OF_FINE).tolist() == [5] * 20
    assert cifar.COARSE_NAMES[cifar.COARSE_OF_FINE[44]] == "reptiles"


def test_every_layout_has_a_writer():
    assert {layout.read.__name__ for layout in cifar.LAYOUTS} == {
        name.__name__.replace("write", "_read") for name in WRITERS.values() if name is not write_shards
    }


@pytest.mark.parametrize("split", TINY)
@pytest.mark.parametrize("layout", WRITERS)
def test_layouts_agree(tiny, tmp_path, monkeypatch, layout, split):
    WRITERS[layout](tmp_path / "set", tiny)
    if layout == "torchvision":
        accept_pickles(monkeypatch, tmp_path / "set")
    loaded = cifar.load(tmp_path / "set", split)
    assert loaded.images.is_contiguous()
    assert loaded.images.shape == (TINY[split], 3, 32, 32)
    assert multiset(loaded) == multiset(tiny[split])


def test_torchvision_folder_itself(tiny, tmp_path, monkeypatch):
    write_torchvision(tmp_path, tiny)
    accept_pickles(monkeypatch, tmp_path)
    assert multiset(cifar.load(tmp_path / "cifar-100-python", "test")) == multiset(tiny["test"])


@pytest.fixture(scope="module")
def real():
    return {name: cifar.load(split=name) for name in cifar.ROWS}


@needs_data
def test_real_statistics(real):
    assert {name: len(split) for name, split in real.items()} == {"train": 50_000, "test": 10_000}
    pixels = real["train"].images.transpose(0, 1).flatten(1)
    histograms = torch.stack([channel.bincount(minlength=256).double() for channel in pixels])
    values = torch.arange(256) / 255
    mean = (histograms * values).sum(1) / histograms.sum(1)
    std = ((histograms * (values - mean[:, None]) ** 2).sum(1) / histograms.sum(1)).sqrt()
    assert torch.allclose(mean, torch.tensor(augment.MEAN).double(), atol=5e-5)
    assert torch.allclose(std, torch.tensor(augment.STD).double(), atol=5e-5)


@needs_data
@pytest.mark.parametrize("layout", WRITERS)
def test_real_layouts_agree(real, tmp_path, monkeypatch, layout):
    """The real test split, written anew in each layout, has the same pixel sum in every class."""
    test = real["test"]
    WRITERS[layout](tmp_path / "set", {"test": test} if layout != "torchvision" else {"test": test, "train": test})
    if layout == "torchvision":
        accept_pickles(monkeypatch, tmp_path / "set")
    for found, expected in zip(class_sums(cifar.load(tmp_path / "set", "test")), class_sums(test), strict=True):
        assert torch.equal(found, expected)


# Where it is looked for ---------------------------------------------------------------------------------------------


def test_root_before_environment(tiny, tmp_path, monkeypatch):
    write_parquet(tmp_path / "root", {"test": noise(200, seed=1)})
    write_parquet(tmp_path / "environment", {"test": noise(200, seed=2)})
    monkeypatch.setenv("RECURRENT_VIT_DATA", str(tmp_path / "environment"))
    assert torch.equal(cifar.load(tmp_path / "root", "test").images, noise(200, seed=1).images)
    assert torch.equal(cifar.load(None, "test").images, noise(200, seed=2).images)


def test_nothing_is_printed(tiny, tmp_path, capsys):
    write_parquet(tmp_path / "set", tiny)
    assert len(cifar.load(tmp_path / "set")) == 300
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("place", "state"),
    [
        ("empty", r"given as root\)\. Looked"),
        ("nowhere", r"given as root\), which does not exist"),
        ("file", r"given as root\), which is not a folder"),
    ],
)
def test_nothing_found(tiny, tmp_path, place, state):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=state) as caught:
        cifar.load(tmp_path / place, "test")
    for part in (place, "test-*.parquet", "cifar-100-python", "test/<class", "RECURRENT_VIT_DATA", "download=True"):
        assert part in str(caught.value), part


def test_nothing_found_names_the_environment(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("RECURRENT_VIT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="from RECURRENT_VIT_DATA"):
        cifar.load()


def test_unknown_split(tmp_path):
    with pytest.raises(ValueError, match="split must be one of train, test, got 'val'"):
        cifar.load(tmp_path, "val")


def test_download_goes_to_the_cache(tiny, tmp_path, monkeypatch):
    """With no folder named, to torch's cache, where it is found the next time without being asked for."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def download(dataset):
        write_torchvision(tmp_path / "datasets", tiny)
        accept_pickles(monkeypatch, tmp_path / "datasets")

    monkeypatch.setattr(CIFAR100, "download", download)
    with pytest.raises(FileNotFoundError, match=r"torch's cache"):
        cifar.load(split="test")
    assert multiset(cifar.load(split="test", download=True)) == multiset(tiny["test"])
    monkeypatch.setattr(CIFAR100, "download", lambda dataset: pytest.fail("it is there already"))
    assert multiset(cifar.load(split="test", download=True)) == multiset(cifar.load(split="test"))


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("File not found or corrupted.")])
def test_download_fails(tiny, tmp_path, monkeypatch, error):
    def download(dataset):
        raise error

    monkeypatch.setattr(CIFAR100, "download", download)
    with pytest.raises(OSError, match=rf"could not download https://.*cifar-100.* into .*: {error}"):
        cifar.load(tmp_path, download=True)


def test_without_pyarrow(tiny, tmp_path, monkeypatch):
    write_parquet(tmp_path / "set", tiny)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'needs pyarrow: pip install "recurrent-vit\[train\]"'):
        cifar.load(tmp_path / "set")


# What is refused ----------------------------------------------------------------------------------------------------

GRAY = np.zeros((32, 32), dtype=np.uint8)
PIXELS = np.zeros((32, 32, 3), dtype=np.uint8)
BAD_PICTURES = {  # bytes -> what the error says
    "wide": (encode(np.zeros((32, 33, 3), dtype=np.uint8)), "an image of RGB 33x32, expected RGB 32x32"),
    "gray": (encode(GRAY), "an image of L 32x32, expected RGB 32x32"),
    "alpha": (encode(np.zeros((32, 32, 4), dtype=np.uint8)), "an image of RGBA 32x32"),
    "jpeg": (encode(PIXELS, "JPEG"), "not a readable PNG"),
    "cut": (encode(noise(1).images[0].permute(1, 2, 0).numpy())[:500], "not a readable PNG"),
    "empty": (b"", "not a readable PNG"),
}


def with_item(name, row, value):
    """An edit of the columns: one item replaced."""

    def edit(columns):
        return {**columns, name: [value if i == row else item for i, item in enumerate(columns[name])]}

    return edit


BAD_COLUMNS = {  # edit of the columns -> what the error says
    "no coarse": (lambda c: {k: v for k, v in c.items() if k != "coarse_label"}, "columns .* expected .*coarse_label"),
    "no struct": (lambda c: {**c, "img": [img["bytes"] for img in c["img"]]}, "'img': 'binary'"),
    "foreign": (lambda c: {"text": ["a", "b"]}, "columns .*'text': 'string'"),
    "text labels": (lambda c: {**c, "fine_label": [str(i) for i in c["fine_label"]]}, "'fine_label': 'string'"),
    "no label": (with_item("fine_label", 7, None), "missing values {'fine_label': 1}"),
    "no image": (with_item("img", 7, None), "missing values {'bytes': 1}"),
    "a row less": (lambda c: {k: v[1:] for k, v in c.items()}, "199 images, expected 200 for test"),
    "label 100": (with_item("fine_label", 7, 100), r"row 7 has label 100, expected 0\.\.99"),
    "label -1": (with_item("fine_label", 8, -1), r"row 8 has label -1, expected 0\.\.99"),
    "uneven": (with_item("fine_label", 0, 1), "1 images of apple, expected 2"),
    "coarse": (with_item("coarse_label", 0, 5), r"row 0 \(apple\) has coarse label 5, expected 4"),
    **{
        name: (with_item("img", 9, {"bytes": png, "path": ""}), f"row 9: {says}")
        for name, (png, says) in BAD_PICTURES.items()
    },
}


@pytest.mark.parametrize("bad", BAD_COLUMNS)
def test_bad_parquet(tiny, tmp_path, bad):
    edit, says = BAD_COLUMNS[bad]
    path = tmp_path / "test-00000-of-00001.parquet"
    pq.write_table(pa.table(edit(columns(tiny["test"]))), path)
    with pytest.raises(ValueError, match=says) as caught:
        cifar.load(tmp_path, "test")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_truncated_parquet(tiny, tmp_path, keep):
    write_parquet(tmp_path / "set", tiny)
    path = tmp_path / "set" / "train-00000-of-00001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ValueError, match="not a readable parquet file") as caught:
        cifar.load(tmp_path / "set")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("bad", BAD_PICTURES)
def test_bad_picture_in_folder(tiny, tmp_path, bad):
    png, says = BAD_PICTURES[bad]
    write_folders(tmp_path, {"test": tiny["test"]})
    path = tmp_path / "test" / "bear" / "3.png"
    assert path.exists()
    path.write_bytes(png)
    with pytest.raises(ValueError, match=says) as caught:
        cifar.load(tmp_path, "test")
    assert str(path) in str(caught.value)


def test_folders_are_not_read_class_after_class(tiny, tmp_path):
    write_folders(tmp_path, {"test": tiny["test"]})
    split = cifar.load(tmp_path, "test")
    assert len(split.labels[:100].unique()) > 50
    for got, label in zip(split.images, split.labels):  # each with its own label
        [place] = (tiny["test"].images == got).flatten(1).all(1).nonzero().flatten().tolist()
        assert tiny["test"].labels[place] == label


def test_bad_class_folders(tiny, tmp_path):
    write_folders(tmp_path, {"test": tiny["test"]})
    (tmp_path / "test" / "apple").rename(tmp_path / "test" / "apples")
    with pytest.raises(ValueError, match=r"1 missing \['apple'\], 1 foreign \['apples'\]"):
        cifar.load(tmp_path, "test")


def test_missing_picture_in_folder(tiny, tmp_path):
    write_folders(tmp_path, {"test": tiny["test"]})
    (tmp_path / "test" / "bear" / "3.png").unlink()
    with pytest.raises(ValueError, match="199 images, expected 200"):
        cifar.load(tmp_path, "test")


def test_wrong_md5(tiny, tmp_path):
    write_torchvision(tmp_path, tiny)
    (tmp_path / "cifar-100-python" / "meta").unlink()
    with pytest.raises(ValueError, match=r"md5 .*: train, test, meta\. Delete the folder"):
        cifar.load(tmp_path)


def test_wrong_number_of_rows_in_pickle(tiny, tmp_path, monkeypatch):
    write_torchvision(tmp_path, {**tiny, "test": tiny["test"][:100]})
    accept_pickles(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="cifar-100-python: 100 images, expected 200"):
        cifar.load(tmp_path, "test")


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 32, 32, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\(N, 3, H, W\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"labels must be int64 \(2,"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2), "labels must be int64"),
    ],
)
def test_split_refuses(images, labels, says):
    with pytest.raises(ValueError, match=says):
        Split(images, labels)


# The held-out split -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [100, 500])
def test_held_out_laws(size, seed):
    labels = torch.arange(1000)[torch.randperm(1000, generator=torch.Generator().manual_seed(7))] % 100
    train, held = cifar.held_out(labels, size, seed)
    assert labels[held].bincount().tolist() == [size // 100] * 100
    assert torch.equal(torch.cat([train, held]).sort().values, torch.arange(1000))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(held, held.sort().values)


def test_held_out_depends_on_its_seed_alone():
    labels = torch.arange(1000) % 100
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = cifar.held_out(labels, 100, seed=3)[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(cifar.held_out(labels, 100, seed=3)[1], first)
    assert not torch.equal(cifar.held_out(labels, 100, seed=4)[1], first)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (250, "multiple of the number of classes"),
        (0, "between 0 and"),
        (-100, "between 0 and"),
        (1000, "between 0 and"),
        (2000, "between 0 and"),
    ],
)
def test_held_out_refuses(size, says):
    with pytest.raises(ValueError, match=says):
        cifar.held_out(torch.arange(1000) % 100, size)


def test_held_out_refuses_to_empty_a_class():
    with pytest.raises(ValueError, match="takes 2 images a class, but a class has only 2"):
        cifar.held_out(torch.tensor([0] * 8 + [1] * 2), 4)


# Augmentation -------------------------------------------------------------------------------------------------------


def shifted(image, rows, columns, padding=4):
    """One image, the textbook way: pad by reflection, then crop."""
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
    return padded[:, padding + rows :, padding + columns :][:, : image.shape[1], : image.shape[2]]


def test_normalize():
    images = noise(5).images
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (augment.MEAN, augment.STD))
    expected = (images.numpy() / 255 - mean) / std
    found = augment.normalize(images)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"images must be uint8, got torch\.float32"):
        augment.normalize(found)


@pytest.mark.parametrize("size", [16, 20, 24, 32])
def test_downsample_is_that_of_pillow(size):
    images = augment.normalize(noise(3).images)
    expected = [
        [np.asarray(Image.fromarray(channel).resize((size, size), Image.Resampling.BILINEAR)) for channel in image]
        for image in images.numpy()
    ]
    np.testing.assert_allclose(augment.downsample(images, size).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("images", "size", "says"),
    [
        (torch.zeros(1, 3, 32, 32), 33, "between 1 and 32, got 33"),
        (torch.zeros(1, 3, 32, 32), 0, "between 1 and 32, got 0"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), 16, "floating point .* got torch.uint8"),
    ],
)
def test_downsample_refuses(images, size, says):
    with pytest.raises(ValueError, match=says):
        augment.downsample(images, size)


def test_shift_is_a_crop_of_the_padded_picture():
    """At every offset that padding 4 allows."""
    offsets = torch.cartesian_prod(torch.arange(-4, 5), torch.arange(-4, 5))
    images = noise(len(offsets)).images
    expected = [shifted(image.numpy(), *offset) for image, offset in zip(images, offsets.tolist(), strict=True)]
    np.testing.assert_array_equal(augment.shift(images, offsets).numpy(), expected)


def test_mirror():
    images, mirrored = noise(6).images, torch.tensor([True, False, True, True, False, False])
    expected = [image.numpy()[:, :, :: -1 if flag else 1] for image, flag in zip(images, mirrored, strict=True)]
    np.testing.assert_array_equal(augment.mirror(images, mirrored).numpy(), expected)


def test_alternating_flip_alternates():
    indices = torch.arange(1000)
    sides = torch.stack([augment.alternating_flip(indices, epoch, seed=5) for epoch in range(4)])
    assert torch.equal(sides[0], ~sides[1])
    assert torch.equal(sides[0], sides[2])
    assert torch.equal(sides[1], sides[3])


def test_alternating_flip_is_a_fair_coin_of_index_and_seed():
    """Half of the images, half of the neighbours, half of the images under two seeds: within 5 sigma."""
    coins = torch.stack([augment.alternating_flip(torch.arange(50_000), 0, seed) for seed in range(20)])
    sigma = 0.5 / 50_000**0.5
    for shares in (coins, coins[:, 1:] == coins[:, :-1], coins[1:] == coins[:-1], coins[2:] == coins[:-2]):
        assert (shares.double().mean(1) - 0.5).abs().max() < 5 * sigma
    some = torch.tensor([49_999, 3, 3, 17])
    assert torch.equal(augment.alternating_flip(some, 0, seed=0), coins[0, some])


@pytest.mark.parametrize("padding", [0, 2, 4])
def test_offsets_are_uniform(padding):
    draws = Augmentation(padding=padding).draw(torch.arange(20_000), epoch=0, batch=0, seed=0)
    width = 2 * padding + 1
    cells = (draws.offsets + padding) @ torch.tensor([width, 1])
    assert draws.offsets.abs().max() <= padding
    shares = cells.bincount(minlength=width**2) * width**2 / 20_000  # 1 where uniform
    assert (shares - 1).abs().max() < 5 * width / 20_000**0.5


def test_random_flip_is_fair_and_none_is_none():
    def share(flip):
        draws = Augmentation(flip=flip).draw(torch.arange(20_000), epoch=0, batch=0, seed=0)
        return draws.mirrored.double().mean()

    assert abs(share("random") - 0.5) < 5 * 0.5 / 20_000**0.5
    assert share("none") == 0


@pytest.mark.parametrize("flip", augment.FLIPS)
@pytest.mark.parametrize("size", [None, 24])
def test_augmentation_is_that_of_each_picture(flip, size):
    augmentation, images = Augmentation(padding=3, flip=flip, size=size), noise(40).images
    draws = augmentation.draw(torch.arange(40), epoch=1, batch=2, seed=3)
    expected = []
    for image, offset, mirrored in zip(images.numpy(), draws.offsets.tolist(), draws.mirrored, strict=True):
        image = shifted(image, *offset)
        expected.append(torch.from_numpy(image[:, :, ::-1].copy() if mirrored else image.copy()))
    expected = augment.downsample(augment.normalize(torch.stack(expected)), size or 32)
    assert torch.equal(augmentation(images, draws), expected)


@pytest.mark.parametrize("other", [{"epoch": 1}, {"batch": 1}, {"seed": 1}])
def test_draws_depend_on_seed_epoch_and_batch(other):
    def draw(**key):
        return Augmentation().draw(torch.arange(64), **{"epoch": 0, "batch": 0, "seed": 0, **key})

    for first, again, different in zip(draw(), draw(), draw(**other), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, different)


@pytest.mark.parametrize(
    ("augmentation", "transform"),
    [
        (Augmentation(0, "none", rand_ops=2), v2.RandAugment(2, 9, fill=[129, 124, 112])),
        (Augmentation(0, "none", rand_ops=1, rand_magnitude=20), v2.RandAugment(1, 20, fill=[129, 124, 112])),
        (Augmentation(0, "none", erase=0.5), v2.RandomErasing(0.5, value=[129, 124, 112])),
    ],
)
def test_torchvision_transforms_run_per_picture(augmentation, transform):
    """As if each image had been transformed alone under its seed; the global generator is left as it was."""
    images = noise(24).images
    draws = augmentation.draw(torch.arange(24), epoch=0, batch=0, seed=0)
    before = torch.get_rng_state()
    found = augmentation(images, draws)
    assert torch.equal(torch.get_rng_state(), before)
    expected = []
    for image, seed in zip(images, draws.seeds.tolist(), strict=True):
        torch.manual_seed(seed)
        # both pieces draw, in turn: a RandAugment of no operation draws nothing, erasing of probability 0 one coin
        expected.append(transform(image))
    assert torch.equal(found, augment.normalize(torch.stack(expected)))
    changed = (found != augment.normalize(images)).flatten(1).any(1)
    assert 4 <= changed.sum() <= 24


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"padding": -1}, r"padding must be 0\.\.31; got -1"),
        ({"padding": 32}, "padding must be"),
        ({"flip": "vertical"}, "flip must be one of random, alternating, none; got 'vertical'"),
        ({"rand_ops": -1}, "rand_ops must be >= 0"),
        ({"rand_magnitude": 31}, r"rand_magnitude must be 0\.\.30"),
        ({"erase": 1.5}, "erase must be a probability"),
        ({"size": 0}, "size must be >= 1"),
    ],
)
def test_augmentation_refuses(bad, says):
    with pytest.raises(ValueError, match=says):
        Augmentation(**bad)


# Batches ------------------------------------------------------------------------------------------------------------

ALL_OF_IT = Augmentation(padding=2, flip="alternating", rand_ops=1, erase=0.5, size=16)


def indices_of(*args, **kwargs):
    return torch.cat([batch.indices for batch in cifar.batches(*args, **kwargs)])


def test_an_epoch_is_a_permutation():
    split = noise(100)
    epochs = [indices_of(split, 16, epoch=epoch, seed=seed) for epoch in (0, 1) for seed in (0, 1)]
    for order in epochs:
        assert torch.equal(order.sort().values, torch.arange(100))
    assert len({tuple(order.tolist()) for order in epochs}) == 4
    assert torch.equal(indices_of(split, 16, shuffle=False), torch.arange(100))


def test_a_batch_holds_its_pictures_and_labels():
    split = noise(50)
    for images, labels, indices in cifar.batches(split, 16):
        assert torch.equal(images, augment.normalize(split.images[indices]))
        assert torch.equal(labels, split.labels[indices])


def test_two_epochs_show_both_sides():
    split = noise(50)
    seen = []
    for epoch in (3, 4):
        augmented = list(cifar.batches(split, 16, epoch=epoch, augmentation=Augmentation(0, "alternating")))
        order = torch.cat([batch.indices for batch in augmented]).argsort()
        seen.append(torch.cat([batch.images for batch in augmented])[order])
    plain = augment.normalize(split.images)
    as_is = (seen[0] == plain).flatten(1).all(1)
    assert 10 <= as_is.sum() <= 40
    assert torch.equal(seen[0], augment.mirror(plain, ~as_is))
    assert torch.equal(seen[1], augment.mirror(plain, as_is))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [16, 16, 16, 2]), (True, [16, 16, 16])])
def test_last_batch(drop_last, sizes):
    assert [len(batch.images) for batch in cifar.batches(noise(50), 16, drop_last=drop_last)] == sizes
    assert cifar.batches_per_epoch(50, 16, drop_last) == len(sizes)


@pytest.mark.parametrize("start", range(5))
def test_resuming_gives_the_same_batches(start):
    split, settings = noise(50), {"epoch": 2, "seed": 3, "augmentation": ALL_OF_IT}
    torch.manual_seed(start)  # of no influence
    whole = list(cifar.batches(split, 16, **settings))[start:]
    torch.manual_seed(99)
    resumed = list(cifar.batches(split, 16, start=start, **settings))
    assert len(resumed) == len(whole) == 4 - start
    for one, other in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
def test_ranks_share_the_batch_of_one_process(world_size):
    """Joined in order, bitwise, the short last batch included (of which some rank may have nothing)."""
    split, settings = noise(50), {"epoch": 2, "seed": 3, "augmentation": ALL_OF_IT}
    ranks = [cifar.batches(split, 12, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    for whole, *parts in zip(cifar.batches(split, 12, **settings), *ranks, strict=True):
        assert max(len(part.labels) for part in parts) - min(len(part.labels) for part in parts) <= 1
        assert all(torch.equal(column, torch.cat(pieces)) for column, *pieces in zip(whole, *parts, strict=True))


def test_no_two_streams_share_a_seed():
    keys = itertools.product(augment.PURPOSES, range(5), range(5), range(20))
    assert len({augment.seed_of(*key) for key in keys}) == len(augment.PURPOSES) * 5 * 5 * 20


def test_global_generator_is_left_alone():
    before = torch.get_rng_state()
    assert len(list(cifar.batches(noise(50), 16, augmentation=ALL_OF_IT))) == 4
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"batch_size": 15, "world_size": 2}, "batch_size must be a multiple of world_size=2; got 15"),
        ({"world_size": 0}, "world_size must be >= 1"),
        ({"rank": 2, "world_size": 2}, r"rank must be 0\.\.1"),
        ({"start": 5}, r"start must be 0\.\.4"),
        ({"start": -1}, "start must be"),
        ({"batch_size": 64, "drop_last": True}, "an epoch of 50 images has no batch of 64"),
        ({"seed": -1}, "seed must be"),
        ({"epoch": -1}, "epoch must be"),
    ],
)
def test_batches_refuses_at_the_call(bad, says):
    with pytest.raises(ValueError, match=says):
        cifar.batches(noise(50), **{"batch_size": 16, **bad})


@needs_gpu
def test_gpu_sees_the_pictures_of_the_cpu():
    split, settings = noise(50), {"epoch": 2, "seed": 3, "augmentation": ALL_OF_IT}
    state = torch.cuda.get_rng_state()
    for here, there in zip(
        cifar.batches(split, 16, **settings), cifar.batches(split.to("cuda"), 16, **settings), strict=True
    ):
        assert there.images.is_cuda
        assert torch.equal(here.indices, there.indices.cpu())
        assert torch.allclose(here.images, there.images.cpu(), atol=0.02)  # RandAugment rounds to 1/255 on its way
    assert torch.equal(torch.cuda.get_rng_state(), state)
