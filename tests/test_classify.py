"""Any picture to an answer: what is made of its pixels, what the model says of them, and what the command prints."""

import io
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import recurrent_vit
from recurrent_vit import augment, cifar, classify
from recurrent_vit.__main__ import main


@pytest.fixture(autouse=True)
def _no_request(monkeypatch):
    """Nothing here asks the network for anything."""
    asked = []

    def refuse(*arguments, **kwargs):
        asked.append(arguments)
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


# ---- from a file to a picture ----------------------------------------------------------------------------------------

ROWS, COLUMNS = np.mgrid[:40, :48]
GREY = (5 * COLUMNS).astype(np.uint8)  # 0 to 235; oblong, and no two turns of it are alike
GREY_RGB = np.stack([GREY, GREY, GREY], axis=-1)
RGB = np.stack([5 * COLUMNS, 6 * ROWS, 3 * COLUMNS + 2 * ROWS], axis=-1).astype(np.uint8)
ALPHA = (6 * ROWS).astype(np.uint8)
PICTURE, GREY_PICTURE = Image.fromarray(RGB), Image.fromarray(GREY)
PALETTE = PICTURE.quantize(64)
RED, BLUE = Image.new("RGB", (48, 40), "red"), Image.new("RGB", (48, 40), "blue")


def over_white(colours):
    share = ALPHA[..., None] / 255
    return share * colours + (1 - share) * 255


def where(condition, colours):
    """The colours, white where the condition holds."""
    return np.where(condition[..., None], 255, colours)


def with_alpha(picture):
    picture = picture.copy()
    picture.putalpha(Image.fromarray(ALPHA))
    return picture


def numbers(values):
    return Image.fromarray(np.ascontiguousarray(values))


KINDS = {  # name: suffix, the picture, how it is saved, the RGB values expected
    "RGB": ("png", PICTURE, {}, RGB),
    "RGB BMP": ("bmp", PICTURE, {}, RGB),
    "grey": ("png", GREY_PICTURE, {}, GREY_RGB),
    "black and white": ("png", numbers(GREY > 99), {}, where(GREY > 99, 0 * RGB)),
    "palette": ("png", PALETTE, {}, np.asarray(PALETTE.convert("RGB"))),
    "RGBA": ("png", with_alpha(PICTURE), {}, over_white(RGB)),
    "RGBA TIFF": ("tif", with_alpha(PICTURE), {}, over_white(RGB)),
    "grey with alpha": ("png", with_alpha(GREY_PICTURE), {}, over_white(GREY_RGB)),
    "transparent colour": ("png", PICTURE, {"transparency": (25, 18, 21)}, where((RGB == (25, 18, 21)).all(-1), RGB)),
    "transparent grey": ("png", GREY_PICTURE, {"transparency": 50}, where(GREY == 50, GREY_RGB)),
    "transparent entry": (
        "png", PALETTE, {"transparency": 3}, where(np.asarray(PALETTE) == 3, np.asarray(PALETTE.convert("RGB")))
    ),
    "CMYK": ("tif", PICTURE.convert("CMYK"), {}, RGB),
    "16 bits": ("png", numbers(GREY.astype(np.uint16) * 257), {}, GREY_RGB),
    "16 bits, transparent grey": (
        "png", numbers(GREY.astype(np.uint16) * 257), {"transparency": 50 * 257}, where(GREY == 50, GREY_RGB)
    ),
    "16 bits, big-endian": (
        "tif", Image.frombytes("I;16B", (48, 40), (GREY.astype(np.uint16) * 257).astype(">u2").tobytes()), {}, GREY_RGB
    ),
    "32 bits that hold 16": ("tif", numbers(GREY.astype(np.int32) * 257), {}, GREY_RGB),
    "32 bits": ("tif", numbers(1000 * (GREY.astype(np.int32) - 100)), {}, GREY_RGB * (255 / 235)),
    "float, 0 to 1": ("tif", numbers((GREY / 255).astype(np.float32)), {}, GREY_RGB),
    "float, 0 to 255": ("tif", numbers(GREY.astype(np.float32)), {}, GREY_RGB),
    "float, 0 to 65535": ("tif", numbers(GREY.astype(np.float32) * 257), {}, GREY_RGB),
    "float, from below 0": ("tif", numbers((GREY / 235 - 0.5).astype(np.float32)), {}, GREY_RGB * (255 / 235)),
    "float, all alike": ("tif", numbers(np.full((40, 48), -3, np.float32)), {}, 0 * RGB),
    "animated GIF": ("gif", RED, {"save_all": True, "append_images": [BLUE]}, np.asarray(RED)),
    "animated PNG": ("png", RED, {"save_all": True, "append_images": [BLUE]}, np.asarray(RED)),
    "two pages": ("tif", RED, {"save_all": True, "append_images": [BLUE]}, np.asarray(RED)),
}  # fmt: skip


def write(kind, folder):
    suffix, picture, options, _ = KINDS[kind]
    path = folder / f"{kind}.{suffix}"
    picture.save(path, **options)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_picture_becomes_rgb(kind, tmp_path):
    image = classify.open_image(write(kind, tmp_path))
    assert (image.mode, image.size) == ("RGB", (48, 40))
    np.testing.assert_allclose(np.asarray(image).astype(float), KINDS[kind][3], atol=1)


@pytest.mark.parametrize("kind", ["16 bits", "16 bits, big-endian", "32 bits that hold 16", "float, 0 to 1"])
def test_deep_grey_is_scaled_exactly(kind, tmp_path):
    np.testing.assert_array_equal(np.asarray(classify.open_image(write(kind, tmp_path))), GREY_RGB)


def test_values_that_are_not_finite_are_black_or_white(tmp_path):
    values = (GREY / 255).astype(np.float32)
    values[0, :3] = np.nan, np.inf, -np.inf
    numbers(values).save(tmp_path / "x.tif")
    pixels = np.asarray(classify.open_image(tmp_path / "x.tif"))
    assert pixels[0, :3, 0].tolist() == [0, 255, 0]


T = Image.Transpose
TURNS = {  # EXIF's orientation: what makes the stored picture of the upright one
    1: None, 2: T.FLIP_LEFT_RIGHT, 3: T.ROTATE_180, 4: T.FLIP_TOP_BOTTOM,
    5: T.TRANSPOSE, 6: T.ROTATE_90, 7: T.TRANSVERSE, 8: T.ROTATE_270,
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("kind", ["RGB", "16 bits"])
@pytest.mark.parametrize("orientation", TURNS)
def test_a_turned_picture_is_the_same_as_the_upright_one(orientation, kind, suffix, tmp_path):
    _, upright, _, expected = KINDS[kind]
    turn, exif = TURNS[orientation], Image.Exif()
    exif[0x0112] = orientation
    stored = upright if turn is None else upright.transpose(turn)
    stored.save(tmp_path / f"x.{suffix}", exif=exif)
    np.testing.assert_array_equal(np.asarray(classify.open_image(tmp_path / f"x.{suffix}")), expected)


def test_damaged_exif_turns_nothing(tmp_path):
    PICTURE.save(tmp_path / "x.jpg", exif=b"Exif\0\0rubbish")
    assert classify.open_image(tmp_path / "x.jpg").size == PICTURE.size


def cut(suffix):
    """Writes the first half of a picture."""

    def make(path):
        buffer = io.BytesIO()
        PICTURE.save(buffer, suffix)
        path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])

    return make


EPS = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
BAD = {  # name: what makes the file, and what is said of it
    "missing.png": (lambda path: None, "No such file"),
    "folder.png": (lambda path: path.mkdir(), ""),  # the words are the system's
    "empty.png": (lambda path: path.touch(), "the file is empty"),
    "text.png": (lambda path: path.write_text("not a picture"), "not a picture of a format that Pillow reads"),
    "two\nlines.png": (lambda path: path.write_text("x"), "not a picture of a format that Pillow reads"),
    "cut.png": (cut("PNG"), "damaged or cut short"),
    "cut.jpg": (cut("JPEG"), "damaged or cut short"),
    "cut.gif": (cut("GIF"), "damaged or cut short"),
    "cut.tif": (cut("TIFF"), "damaged or cut short"),
    "program.eps": (lambda path: path.write_text(EPS), "not a picture of a format that Pillow reads"),
    "nan.tif": (lambda path: numbers(np.full((4, 4), np.nan, np.float32)).save(path), "none of its values is finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_that_names_it(name, tmp_path):
    make, said = BAD[name]
    make(tmp_path / name)
    with pytest.raises((OSError, ValueError)) as caught:
        classify.open_image(tmp_path / name)
    message = str(caught.value)
    assert said in message
    assert name.split("\n")[0] in message
    assert "\n" not in message


@pytest.mark.parametrize("limit", [1000, 500])  # Pillow warns of the first, and refuses the second
def test_a_huge_picture_is_refused(limit, tmp_path, monkeypatch):
    path = write("RGB", tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(ValueError, match=f"RGB.png: refused: it has more than {limit:,} pixels$"):
        classify.open_image(path)


# ---- from a picture to an answer -------------------------------------------------------------------------------------

SHAPES = [PICTURE, PICTURE.transpose(T.ROTATE_90), PICTURE.resize((32, 32)), PICTURE.resize((1, 1)), RED]


def test_the_input_is_the_central_square_resized_and_normalised(small):
    square = PICTURE.crop((4, 0, 44, 40)).resize((32, 32), Image.Resampling.BICUBIC)
    pixels = torch.tensor(np.asarray(square).astype(np.float32) / 255)
    expected = ((pixels - torch.tensor(augment.MEAN)) / torch.tensor(augment.STD)).permute(2, 0, 1)
    torch.testing.assert_close(classify.transform(small("bvit"))(PICTURE), expected)


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000), (33, 32), (5, 7)])
@pytest.mark.parametrize("img_size", [32, 64])
def test_every_shape_becomes_the_models_own(size, img_size, small):
    model = small("bvit", img_size=img_size)
    assert classify.transform(model)(PICTURE.resize(size)).shape == (3, img_size, img_size)


def test_probabilities_are_those_of_the_model_after_each_number_of_steps(name, small):
    model = small(name, num_classes=100)
    answers = classify.classify(model, SHAPES)
    batch = torch.stack([classify.transform(model)(image) for image in SHAPES])
    assert len(answers) == len(SHAPES)
    found = torch.stack([answer.probabilities for answer in answers], dim=1)
    assert found.shape == (model.horizon, len(SHAPES), 100)
    for step in range(1, model.horizon + 1):
        model.set_horizon(step)
        with torch.no_grad():
            torch.testing.assert_close(found[step - 1], model(batch).softmax(-1), msg=lambda text: f"{name}: {text}")


def test_top_is_sorted_and_of_the_last_step(small):
    model = small("bvit", num_classes=100)
    [answer] = classify.classify(model, [PICTURE], top=7)
    expected = sorted(zip(answer.probabilities[-1].tolist(), cifar.FINE_NAMES), reverse=True)[:7]
    assert answer.top == [(label, probability) for probability, label in expected]
    assert answer.leaders[-1] == answer.top[0]


def test_horizon_is_the_number_of_steps(small):
    model = small("bvit")
    [short], [long] = (classify.classify(model, [PICTURE], horizon=horizon) for horizon in (3, 15))
    assert (len(short.probabilities), len(long.probabilities), model.horizon) == (3, 15, 12)
    torch.testing.assert_close(long.probabilities[:3], short.probabilities)


def test_dropout_plays_no_part(small):
    model = small("bvit", proj_drop_rate=0.5).train()
    first, second = (classify.classify(model, [PICTURE])[0].probabilities for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("winners", "since"), [([0], 1), ([0, 0, 0], 1), ([1, 0], 2), ([0, 1, 0], 3), ([1, 1, 0, 0], 3), ([0, 0, 1], 3)]
)
def test_since_is_where_the_final_answer_came_to_stay(winners, since):
    answer = classify.Answer(torch.eye(2)[winners], ("cup", "bowl"), (winners[-1],))
    assert answer.since == since
    assert [label for label, _ in answer.leaders] == [("cup", "bowl")[winner] for winner in winners]


def test_labels(small):
    assert classify.labels(small("bvit", num_classes=100)) == cifar.FINE_NAMES
    assert classify.labels(small("bvit", num_classes=2)) == ("class 0", "class 1")
    model = small("bvit", num_classes=2)
    model.pretrained_cfg["label_names"] = ["yes", "n\no"]
    assert classify.labels(model) == ("yes", "'n\\no'")


def test_what_does_not_fit_is_an_error(small, monkeypatch):
    with pytest.raises(ValueError, match="must be a RecurrentVisionTransformer, not wrapped in another; got Identity"):
        classify.classify(torch.nn.Identity(), [PICTURE])
    with pytest.raises(ValueError, match="in_chans=1 and num_classes=10"):
        classify.classify(small("bvit", in_chans=1), [PICTURE])
    with pytest.raises(ValueError, match="num_classes=0"):
        classify.classify(small("bvit", num_classes=0), [PICTURE])
    with pytest.raises(ValueError, match="top=0 must be a whole number from 1"):
        classify.classify(small("bvit"), [PICTURE], top=0)
    model, step, taken = small("bvit"), small("bvit").step, []
    monkeypatch.setattr(model, "step", lambda z: taken.append(z) or step(z) * (torch.nan if len(taken) == 5 else 1))
    with pytest.raises(ValueError, match="not finite after step 5; give fewer steps"):
        classify.classify(model, [PICTURE])


def test_a_state_beyond_the_range_of_its_norm_has_no_answer(small):
    model = small("bvit_ode_rk4", field="black_box")
    assert classify.classify(model, [PICTURE], horizon=3)
    with pytest.raises(ValueError, match="state or logits are not finite after step"):
        classify.classify(model, [PICTURE], horizon=150)


def test_the_model_is_left_as_it_was(small):
    model = small("bvit", proj_drop_rate=0.5).train()
    model.patch_embed.eval()
    first, again = (classify.classify(model, [PICTURE], horizon=3)[0].probabilities for _ in range(2))
    assert first.shape == (3, 10)
    assert torch.equal(first, again), "dropout was on"
    assert model.training
    assert not model.patch_embed.training
    assert model.horizon == 12


# ---- as text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("glyphs", [classify.UNICODE, classify.ASCII])
def test_bars_and_curves_grow_with_the_fraction(glyphs):
    fractions = [i / 400 for i in range(401)]
    cells = [classify.bar(fraction, glyphs) for fraction in fractions]
    eighths = [len(glyphs.bar) * len(cell) + glyphs.bar.find(cell[-1:]) for cell in cells]
    assert eighths == sorted(eighths)
    assert (cells[0], cells[-1]) == ("", glyphs.bar[-1] * classify.BAR_CELLS)
    levels = [glyphs.levels.index(classify.curve([fraction], glyphs)) for fraction in fractions]
    assert levels == sorted(levels)
    assert set(levels) == set(range(len(glyphs.levels)))
    assert len(classify.curve(fractions, glyphs)) == classify.CURVE_CELLS


# ---- the samples -----------------------------------------------------------------------------------------------------


def test_the_samples_are_small_and_named_after_their_classes():
    assert 2 <= len(classify.samples()) <= 3
    for path in classify.samples():
        assert path.stem in cifar.FINE_NAMES
        assert path.stat().st_size < 60_000, path.name
        assert max(classify.open_image(path).size) <= 400, path.name


def test_the_licence_note_has_a_row_for_each_sample():
    note = (classify.SAMPLES / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\S+\.jpg) \|.*\| ([^|]+) \|$", note, flags=re.MULTILINE))
    assert sorted(rows) == [path.name for path in classify.samples()]
    assert {path.name for path in classify.SAMPLES.iterdir()} == {"README.md", *rows}
    for name, licence in rows.items():
        assert licence.startswith(("[CC0 1.0]", "public domain")), name


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(small, tmp_path):
    """`classify` with a narrow model of a hundred classes."""
    save_for_hf(small("bvit", num_classes=100), tmp_path / "model", safe_serialization=True)
    return ["classify", "--model", f"local-dir:{tmp_path / 'model'}"]


def heads(shown):
    """The pictures that were printed, by their first lines."""
    return [line.split(": ")[0] for line in shown.splitlines() if " since step " in line]


def test_every_kind_of_picture_gets_an_answer(command, tmp_path, capsys):
    paths = [str(write(kind, tmp_path)) for kind in KINDS]
    assert main([*command, *paths]) == 0
    shown = capsys.readouterr()
    assert heads(shown.out) == paths
    assert len(shown.out.splitlines()) == 7 * len(paths)
    assert shown.err == ""


def test_without_a_picture_it_takes_the_samples(command, capsys):
    assert main(command) == 0
    assert heads(capsys.readouterr().out) == [path.name for path in classify.samples()]


def test_what_is_printed_is_the_answer(command, small, tmp_path, capsys):
    path = write("RGB", tmp_path)
    assert main([*command, "--all-steps", "--horizon", "10", str(path)]) == 0
    head, columns, *lines = capsys.readouterr().out.splitlines()
    torch.manual_seed(0)  # the model of the command, again
    [answer] = classify.classify(small("bvit", num_classes=100), [PICTURE], horizon=10)
    assert head == f"{path}: {answer.top[0][0]} since step {answer.since}"
    assert columns.split() == ["class", "step", "10", "steps", "1", "to", "10"]
    found = [(label, share) for label, share, *_ in map(str.split, lines[:5])]
    assert found == [(label, f"{100 * probability:.1f}") for label, probability in answer.top]
    steps = [line.split()[:4] for line in lines[5:]]
    expected = [(label, f"{100 * probability:.1f}") for label, probability in answer.leaders]
    assert steps == [["step", str(step), *pair] for step, pair in enumerate(expected, start=1)]


def test_bad_files_are_a_line_each_and_the_others_are_done(command, tmp_path, capsys):
    first, last = write("RGB", tmp_path), write("grey", tmp_path)
    for name, (make, _) in BAD.items():
        make(tmp_path / name)
    bad = [str(tmp_path / name) for name in BAD]
    assert main([*command, str(first), *bad, str(last), "--plot", str(tmp_path / "plot.png")]) == 1
    shown = capsys.readouterr()
    assert heads(shown.out) == [str(first), str(last)]
    lines = shown.err.splitlines()
    assert len(lines) == len(BAD)
    for line, (name, (_, said)) in zip(lines, BAD.items()):
        assert line.startswith("recurrent-vit: ")
        assert name.split("\n")[0] in line
        assert said in line
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_without_an_answer_is_a_line_and_the_others_are_done(command, tmp_path, capsys, monkeypatch):
    paths = [write("RGB", tmp_path), write("grey", tmp_path)]
    answer = classify.classify

    def one_fails(model, images, horizon):
        if images[0].getpixel((9, 9)) == PICTURE.getpixel((9, 9)):
            raise ValueError("state or logits are not finite after step 2; give fewer steps")
        return answer(model, images, horizon=horizon)

    monkeypatch.setattr(classify, "classify", one_fails)
    assert main([*command, *map(str, paths)]) == 1
    shown = capsys.readouterr()
    assert heads(shown.out) == [str(paths[1])]
    assert "not finite after step 2" in shown.err


@pytest.mark.parametrize("horizon", ["0", "-1", "10001"])
def test_a_horizon_out_of_range_is_said_once(horizon, command, tmp_path, capsys):
    assert main([*command, "--horizon", horizon]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"recurrent-vit: horizon={horizon} must be an integer from 1 to 10000\n"


def test_names_of_other_models_are_refused_before_anything_is_asked(capsys):
    assert main(["classify", "--model", "resnet50"]) == 1
    assert "'resnet50' is neither a folder nor a name of the zoo" in capsys.readouterr().err


def test_if_no_picture_is_good_nothing_is_drawn(command, tmp_path, capsys):
    assert main([*command, "no/such.png", "--plot", str(tmp_path / "plot.png")]) == 1
    shown = capsys.readouterr()
    assert shown.err == "recurrent-vit: no/such.png: No such file or directory\n"
    assert shown.out == ""
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_draws_them_all(suffix, begins, command, tmp_path):
    pictures = [str(write(kind, tmp_path)) for kind in ("RGB", "grey")]
    named = tmp_path / "$x$ 猫.png"  # neither mathematics nor in the font
    PICTURE.save(named)
    plot = tmp_path / f"plot.{suffix}"
    assert main([*command, *pictures, str(named), "--horizon", "30", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(begins)


def test_the_plot_has_a_curve_for_each_top_class(small):
    answers = classify.classify(small("bvit", num_classes=100), [PICTURE, RED])
    rows = [("first", PICTURE, answers[0]), ("second", RED, answers[1])]
    panels = classify._draw(rows, "title").axes
    assert [panels[0].get_title(), panels[2].get_title()] == ["first", "second"]
    for axes, answer in zip(panels[1::2], answers):
        assert [line.get_label().split(",")[0] for line in axes.lines] == [label for label, _ in answer.top]
        for line, index in zip(axes.lines, answer.best):
            assert line.get_ydata().tolist() == answer.probabilities[:, index].tolist()


def test_a_plot_that_fails_leaves_the_old_file(command, tmp_path, capsys, monkeypatch):
    def fail(figure, file, **kwargs):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    folder = tmp_path / "plots"
    folder.mkdir()
    (folder / "plot.png").write_bytes(b"old")
    picture = write("RGB", tmp_path)
    assert main([*command, str(picture), "--plot", str(folder / "plot.png")]) == 1
    shown = capsys.readouterr()
    assert shown.err == "recurrent-vit: no space left\n"
    assert heads(shown.out) == [str(picture)]
    assert [path.name for path in folder.iterdir()] == ["plot.png"]
    assert (folder / "plot.png").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "plot.txt"], "plot 'plot.txt' must end in one of .pdf, .png, .svg"),
        (["--plot", "no/such/plot.png"], "there is no folder"),
        (["--plot", "RGB.png"], "plot 'RGB.png' is one of the pictures, which it would replace"),
        (["--plot", "plot.png", *["RGB.png"] * 50], "plot takes at most 50 pictures, not 51"),
        (["--horizon", "0"], "horizon=0 must be an integer from 1 to 10000"),
        (["--model", "bvitt"], "'bvitt' is neither a folder nor a name of the zoo"),
        (["--model", "bvit_small_patch16_224"], "has no published weights"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = write("RGB", tmp_path).read_bytes()
    assert main([*command, *arguments, "RGB.png"]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert (tmp_path / "RGB.png").read_bytes() == before
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(("encoding", "level"), [("ascii", "_"), ("latin-1", "_"), ("utf-8", "▁")])
def test_bars_are_of_what_standard_output_can_show(encoding, level, command, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert main([*command, "--all-steps"]) == 0
    shown = out.buffer.getvalue().decode(encoding)
    assert "\\u" not in shown
    assert level in shown


@pytest.mark.skipif(not recurrent_vit.checkpoints("bvit"), reason="this checkout has no weights of bvit")
def test_the_first_command_needs_nothing(capsys):
    assert main(["classify"]) == 0
    shown = capsys.readouterr()
    assert heads(shown.out) == [path.name for path in classify.samples()]
    assert shown.err == ""


@pytest.mark.skipif(not recurrent_vit.checkpoints("bvit"), reason="this checkout has no weights of bvit")
def test_the_readme_shows_what_the_first_command_prints(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- recurrent-vit classify -->\n```\n(.*?)```", readme, flags=re.DOTALL)
    assert main(["classify"]) == 0
    shown = capsys.readouterr().out
    assert heads(block) == heads(shown)
    for told, found in zip(block.splitlines(), shown.splitlines(), strict=True):
        assert told.split()[0] == found.split()[0]
        if "%" in told:  # the last digit may differ between machines
            assert float(told.split()[1]) == pytest.approx(float(found.split()[1]), abs=0.11)


# ---- what has been tried against it ----------------------------------------------------------------------------------


def test_no_program_in_a_picture_is_run(tmp_path, monkeypatch):
    """A container of pictures, IPTC, with PostScript in it, which Pillow alone would have Ghostscript run."""
    from PIL import EpsImagePlugin

    ran = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **kwargs: ran.append(arguments))

    def field(tag, data):
        return bytes([0x1C, *tag]) + len(data).to_bytes(2, "big") + data

    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    header = [((3, 60), b"\1\0"), ((3, 20), b"\n"), ((3, 30), b"\n"), ((3, 120), b"\5"), ((8, 10), script)]
    (tmp_path / "a.png").write_bytes(b"".join(field(*part) for part in header) + bytes([0x1C, 8, 11, 0, 0]))
    with pytest.raises(ValueError, match="not a picture of a format that Pillow reads"):
        classify.open_image(tmp_path / "a.png")
    assert not ran


@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_a_text_called_transparency_is_no_transparency(mode, tmp_path):
    from PIL.PngImagePlugin import PngInfo

    texts, picture = PngInfo(), Image.new("RGB", (40, 30), (10, 200, 90)).convert(mode)
    texts.add_text("transparency", "x")
    picture.save(tmp_path / "text.png", pnginfo=texts)
    picture.save(tmp_path / "plain.png")
    found, expected = (classify.open_image(tmp_path / name) for name in ("text.png", "plain.png"))
    assert found.tobytes() == expected.tobytes()


def test_a_reader_that_leaves_takes_no_picture_with_it(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "recurrent_vit", "classify", "--plot", str(tmp_path / "plot.png")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("top", [0, 2.5, "3", True])
def test_top_is_a_whole_number(top):
    with pytest.raises(ValueError, match=f"top={top!r} must be a whole number from 1 to"):
        classify.classify(timm.create_model("bvit", embed_dim=16, num_heads=2), [], top=top)
