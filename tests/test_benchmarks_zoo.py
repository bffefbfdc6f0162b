"""The table of the zoo: a line for every name, from the manifest and from rows of speed; the anchors below it."""

import re
from dataclasses import replace

import pytest

from benchmarks import measure, rows, speed, zoo
from recurrent_vit import weights
from recurrent_vit.zoo import describe

TINY = replace(measure.QUICK, threads=1, model={"embed_dim": 16, "num_heads": 2, "mlp_ratio": 2.0})
NAMES = ["vit_cifar", "bvit", "bvit_ode_euler", "bvit_ode_heun", "bvit_ode_rk4", "bvit_ds"]
ORIGIN = {
    "date": "2030-01-02T03:04:05+00:00",
    "device": "cpu",
    "hardware": {"cpu": "A processor", "cores": 2, "threads": 1, "gpu": None},
    "versions": {"python": "3.11.2"},
    "commit": None,
    "dirty": None,
    "command": "python -m benchmarks.speed --only zoo",
}


@pytest.fixture
def checkpoints(monkeypatch):
    """Two checkpoints of one name and one of another in place of the package's."""
    (row, *_) = weights.checkpoints()
    metrics = {"horizon": 12, "top1": 0.5, "top1_stderr": 0.005, "top5": 0.75, "loss": 1.5, "count": 10_000}
    changes = [
        {"name": "bvit", "tag": "one_c100", "bytes": 1_234_567, "metrics": metrics, "recipe": "short", "pflop": 1.5},
        {"name": "bvit", "tag": "two_c100", "metrics": {**metrics, "top1": 0.625}, "recipe": "paper", "pflop": 38.0},
        {"name": "vit_cifar", "tag": "one_c100", "metrics": metrics},
    ]
    found = [replace(row, **change) for change in changes]
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: [row for row in found if name in (None, row.name)])
    return found


def timed(name, batch, milliseconds, **changes):
    """A row of images per second."""
    return rows.cell("zoo", name, [milliseconds], batch=batch) | ORIGIN | changes


def read(text):
    """The tables of a page, each a list of lines by the words of the head."""
    blocks = [block.splitlines() for block in re.findall(r"(?m)(?:^\|.*\n)+", text)]
    cells = [[line.strip("|").split("|") for line in block] for block in blocks]
    return [[dict(zip(map(str.strip, head), map(str.strip, line))) for line in lines] for head, _, *lines in cells]


def test_every_cifar_name_has_a_line_and_says_what_was_not_run(monkeypatch):
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: [])
    ours, _ = read(zoo.page([]))
    assert [line["model"] for line in ours] == NAMES
    for line in ours:
        about = describe(line["model"])
        for key in ("parameters", "MACs", "NFE"):
            assert line.pop(key) == f"{about[key]:,}", line
        assert {line.pop("model")} <= set(NAMES)
        assert set(line.values()) == {"not run"}
        assert len(line) == len(zoo.COLUMNS) - 4


def test_every_checkpoint_has_a_line(checkpoints):
    ours, _ = read(zoo.page([]))
    models = ["vit_cifar.one_c100", "bvit.one_c100", "bvit.two_c100", *NAMES[2:]]
    assert [line["model"] for line in ours] == models
    assert ours[1] == {
        "model": "bvit.one_c100",
        "parameters": "849,348",
        "file, bytes": "1,234,567",
        "MACs": "633,103,360",
        "NFE": "12",
        "top-1 %": "50.00 ± 0.50",
        "top-5 %": "75.00",
        "images/s, batch 1": "not run",
        "images/s, batch 128": "not run",
        "recipe": "short",
        "PFLOP": "1.5",
    }
    assert [ours[2][key] for key in ("top-1 %", "recipe", "PFLOP")] == ["62.50 ± 0.50", "paper", "38"]


def test_the_table_agrees_with_the_manifest():
    ours, _ = read(zoo.page([]))
    lines = {line["model"]: line for line in ours}
    for row in weights.checkpoints():
        assert lines[row.id]["parameters"] == f"{row.parameters:,}"
        assert lines[row.id]["file, bytes"] == f"{row.path.stat().st_size:,}"
        assert lines[row.id]["top-1 %"].startswith(f"{100 * row.metrics['top1']:.2f} ± ")


def test_images_per_second_are_the_latest_and_of_the_cpu(checkpoints):
    measured = [
        timed("bvit", 1, 20.0),
        timed("bvit", 1, 10.0),
        timed("bvit", 1, 0.1, device="cuda"),
        timed("bvit", 1, 0.1, benchmark="inference"),
        timed("bvit", 128, 100.0, command="python -m benchmarks.speed"),
        timed("bvit_ds", 128, 64.0),
        {"benchmark": "accuracy", "subject": "bvit"},
    ]
    text = zoo.page(measured)
    ours, _ = read(text)
    rates = {line["model"]: [line[f"images/s, batch {batch}"] for batch in (1, 128)] for line in ours}
    none = ["not run", "not run"]
    assert rates == {
        "vit_cifar.one_c100": none,
        "bvit.one_c100": ["100", "1,280"],
        "bvit.two_c100": ["100", "1,280"],
        **dict.fromkeys(NAMES[2:5], none),
        "bvit_ds": ["not run", "2,000"],
    }
    where = "- 2030-01-02; A processor, 2 cores, 1 threads; python 3.11.2; no commit; `python -m benchmarks.speed"
    assert text.count(f"{where} --only zoo`") == 1
    assert text.count(f"{where}`") == 1


def test_no_machine_is_named_where_nothing_was_measured(checkpoints):
    assert "\n- " not in zoo.page([])
    assert "on this machine" not in zoo.page([])


def test_the_part_of_the_speed_measures_what_the_table_shows(monkeypatch):
    monkeypatch.setattr(measure, "milliseconds", lambda call, settings: 1.0)
    measured = speed.run(["zoo"], replace(TINY, zoo_batches=zoo.BATCHES), command="test")
    assert {(row["subject"], row["batch"]) for row in measured} == {(name, n) for name in NAMES for n in (1, 128)}
    assert {row["reference"] for row in measured if row["subject"] != "bvit"} == {"bvit"}
    ours, _ = read(zoo.page(measured))
    for line in ours:
        assert [line[f"images/s, batch {batch}"] for batch in (1, 128)] == ["1,000", "128,000"], line


def test_every_anchor_says_what_is_known_of_it():
    _, others = read(zoo.page([]))
    assert len(others) == len(zoo.ANCHORS) == len(set(zoo.ANCHORS))
    for line, anchor in zip(others, zoo.ANCHORS, strict=True):
        assert list(line.values()) == list(anchor)
        assert all(line.values()), line
        assert re.match(r"\d\d(\.\d)?( claimed, about \d\d reproduced)?$", anchor.top1), anchor
        assert anchor.parameters == "not stated" or 0 < float(anchor.parameters) < 10, anchor


def test_the_readme_and_the_results_have_the_page():
    page = zoo.page(rows.read(*sorted(rows.RESULTS.glob("*.jsonl"))))
    readme = (rows.ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.split("<!-- cost: python -m benchmarks.zoo -->\n")[1].split("<!-- /cost -->")[0] == page
    assert (rows.RESULTS / "zoo.md").read_text(encoding="utf-8") == page
