"""The table of variants: what the rows promise, and that README and registry say the same."""

from pathlib import Path

import pytest

from recurrent_vit import VARIANTS, zoo

README = Path(__file__).parents[1] / "README.md"


def test_the_cifar_rows_cost_the_same():
    rows = {name: zoo.describe(name) for name in VARIANTS if "224" not in name}
    assert {row["MACs"] for row in rows.values()} == {633_103_360}
    assert {row["NFE"] * row["depth"] for row in rows.values()} == {12}


CIFAR_SIZE = {"width": 256, "gate": 688, "matrices": 3, "patches": 64, "prefix": 0, "pixels": 16, "classes": 100}
SIZES = {  # the feed-forward part has three matrices when it is gated, two when it is not
    **dict.fromkeys([name for name in VARIANTS if "224" not in name], CIFAR_SIZE),
    "bvit_small_patch16_224": {
        "width": 384, "gate": 1536, "matrices": 2, "patches": 196, "prefix": 1, "pixels": 256, "classes": 1000
    },
    "bvit_base_patch16_224": {
        "width": 768, "gate": 3072, "matrices": 2, "patches": 196, "prefix": 1, "pixels": 256, "classes": 1000
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_and_macs_by_hand(name):
    width, gate, matrices, patches, prefix, pixels, classes = SIZES[name].values()
    row, tokens = zoo.describe(name), patches + prefix
    weights = 4 * width**2 + matrices * width * gate
    biases_and_norms = 4 * width + (matrices - 1) * gate + width + 4 * width
    stem = 3 * pixels * width + width + tokens * width + prefix * width  # patches, positions, class token
    head = width * classes + classes
    assert row["parameters"] == stem + row["depth"] * (weights + biases_and_norms) + 2 * width + head
    attention = 2 * tokens**2 * width
    assert row["MACs"] == patches * 3 * pixels * width + 12 * (tokens * weights + attention) + width * classes


def test_the_readme_shows_the_table_of_the_command_line(capsys):
    from recurrent_vit.__main__ import main

    assert main(["list", "--markdown"]) == 0
    text = README.read_text(encoding="utf-8")
    block = text.split("<!-- zoo: recurrent-vit list --markdown -->")[1].split("<!-- /zoo -->")[0]
    assert block.strip() == capsys.readouterr().out.strip()


def test_the_blocks_of_the_rows_are_those_of_the_text():
    import timm
    from torch import nn

    for name in VARIANTS:
        block = timm.create_model(name, device="meta").blocks[0]
        cifar_row = "224" not in name
        assert block.attn.num_heads == (8 if cifar_row else 6 if "small" in name else 12)
        assert type(block.mlp.act) is (nn.SiLU if cifar_row else nn.GELU)
