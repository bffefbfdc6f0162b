"""The table of variants: what the rows promise, and that README and registry say the same."""

from pathlib import Path

import pytest
import timm

from recurrent_vit import VARIANTS, zoo

README = Path(__file__).parents[1] / "README.md"


def test_every_row_is_registered_under_its_name():
    assert timm.list_models(module="zoo") == sorted(VARIANTS)
    assert set(VARIANTS) < set(zoo.__all__)


def test_the_cifar_rows_cost_the_same():
    rows = {name: zoo.describe(name) for name in VARIANTS if "224" not in name}
    assert {row["MACs"] for row in rows.values()} == {633_103_360}
    assert {row["NFE"] * row["depth"] for row in rows.values()} == {12}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_and_macs_by_hand(name):
    # C width, M gate width, N tokens, P patch pixels; a gated block has three C x M matrices, a GELU block two
    small = "small" in name
    c, m, n, p, classes, matrices = {
        True: (256, 688, 64, 4 * 4, 100, 3),
        False: ((384, 1536) if small else (768, 3072)) + (197, 16 * 16, 1000, 2),
    }["224" not in name]
    applications = 12
    blocks = 12 if name == "vit_cifar" else 1
    per_block = 4 * c * c + 4 * c + matrices * c * m + (matrices - 1) * m + c + 4 * c  # weights, biases, norms
    stem = 3 * p * c + c + n * c + (c if n == 197 else 0)  # patches, positions, class token
    row = zoo.describe(name)
    assert row["parameters"] == stem + blocks * per_block + 2 * c + c * classes + classes
    attention = 2 * n * n * c
    patches = n - n % 2  # 197 tokens are 196 patches and the class token
    assert (
        row["MACs"]
        == patches * 3 * p * c + applications * (n * (4 * c * c + matrices * c * m) + attention) + c * classes
    )


def test_the_readme_shows_the_table_of_the_command_line(capsys):
    from recurrent_vit.__main__ import main

    assert main(["list", "--markdown"]) == 0
    text = README.read_text(encoding="utf-8")
    block = text.split("<!-- zoo: recurrent-vit list --markdown -->")[1].split("<!-- /zoo -->")[0]
    assert block.strip() == capsys.readouterr().out.strip()
