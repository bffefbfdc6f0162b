"""The measuring programs: what they time in which order, what they write, and what the tables make of it."""

import gc
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import Block

from benchmarks import markdown, measure, processes, rows, speed, tables
from recurrent_vit import RecurrentVisionTransformer, weights

TINY = replace(measure.QUICK, seconds=0.01, threads=1, model={"embed_dim": 16, "num_heads": 2, "mlp_ratio": 2.0})
IN_EVERY_ROW = {
    *("benchmark", "subject", "reference", "batch", "unit", "median", "min", "max", "images_per_s"),
    *("ratio", "ratio_min", "ratio_max", "rounds", "inner", "note"),
    *("date", "device", "hardware", "versions", "commit", "dirty", "command"),
}


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    """A small matrix product, and one thread: on a busy machine, two with tiny work wait for each other for minutes."""
    monkeypatch.setattr(speed, "GEMM_SIZE", 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_this_process(monkeypatch):
    """No new processes, which import torch for seconds, and no peaks, which a tiny model does not raise in this one."""
    for name in ("peak_memory", "backward_peak"):
        monkeypatch.setattr(processes, name, lambda subject, settings: 2.0)
    monkeypatch.setattr(
        processes, "in_new_process", lambda function, subject, settings, _=None: function(subject, settings)
    )


@pytest.fixture
def no_checkpoints(monkeypatch):
    """No tables of accuracy."""
    monkeypatch.setattr(weights, "checkpoints", lambda name=None: [])


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_ratio_is_the_median_over_rounds_of_the_ratio_within_a_round():
    row = rows.cell("b", "ours", [10, 20, 40], reference="theirs", reference_values=[40, 22, 42], batch=16)
    # 40/10 = 4, 22/20 = 1.1, 42/40 = 1.05; the ratio of the medians would be 40/20 = 2
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (1.1, 1.05, 4)
    assert (row["median"], row["min"], row["max"], row["rounds"]) == (20, 10, 40, 3)
    assert row["images_per_s"] == 800  # 16 images in 20 ms


def test_rounds_must_pair():
    with pytest.raises(ValueError, match="zip"):
        rows.cell("b", "ours", [1.0], reference="theirs", reference_values=[1.0, 2.0])


def test_a_cell_without_reference_has_no_ratio():
    row = rows.cell("b", "ours", [3.0, 1.0], unit="MiB", batch=2)
    assert (row["median"], row["ratio"], row["ratio_min"], row["images_per_s"]) == (2, None, None, None)


def test_subjects_take_turns_and_every_second_round_runs_backwards():
    taken = []
    values = {"a": iter([1, 9, 2, 4, 5, 6]), "b": iter([7, 7, 8, 10, 10, 10]), "c": iter([0, 0, 0, 3, 3, 3])}

    def take(name):
        taken.append(name)
        return next(values[name])

    result = measure.alternate({name: lambda name=name: take(name) for name in values}, rounds=2, inner=3)
    assert "".join(taken) == "abcabcabc" + "cbacbacba"
    assert result == {"a": [2, 5], "b": [7, 10], "c": [0, 3]}  # medians of three


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for `clock.now += seconds`."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(measure, "perf_counter", clock)
    return clock


def test_times_and_repetitions_come_from_the_clock(clock):
    taken = []

    def lasting(name, seconds):
        def call():
            taken.append(name)
            clock.now += seconds

        return call

    calls = {"slow": lasting("s", 0.75), "fast": lasting("f", 0.25)}
    times, inner = measure.time_in_turn(calls, replace(TINY, rounds=2, seconds=2.0))
    assert inner == 2  # two turns of 0.75 + 0.25 seconds fill a round of 2
    assert times == {"slow": [750, 750], "fast": [250, 250]}
    assert "".join(taken) == "sfsf" + "sf" + "sfsf" + "fsfs"  # warm-up, estimate, two rounds


def test_the_reference_is_timms_model_at_equal_arithmetic():
    vit, bvit, ours = (measure.build(name, TINY) for name in (measure.TIMM_VIT, "bvit", "vit_cifar"))
    assert not isinstance(vit, RecurrentVisionTransformer)
    assert {type(block) for block in vit.blocks} == {Block}
    assert {k: v.shape for k, v in vit.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert bvit.macs == ours.macs
    assert len(vit.blocks) == bvit.nfe == 12


@pytest.mark.parametrize(("name", "method"), speed.ODE.items())
def test_torchdiffeq_gives_the_same_state(name, method):
    pytest.importorskip("torchdiffeq")
    assert speed.check_against_torchdiffeq(name, method, measure.QUICK) == 12


@pytest.mark.parametrize(
    ("name", "method", "solver"),
    [("bvit_ode_rk4", "rk4", "rk4"), ("bvit_ode_heun", "heun2", "midpoint"), ("bvit_ode_heun", "heun2", "heun3")],
)
def test_another_method_than_torchdiffeqs_is_noticed(name, method, solver, monkeypatch):
    pytest.importorskip("torchdiffeq")
    monkeypatch.setitem(speed.TORCHDIFFEQ_TABLEAUS, method, solver)
    with pytest.raises(AssertionError, match=r"not close|evaluations"):
        speed.check_against_torchdiffeq(name, method, measure.QUICK)


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", speed.PARTS)
@pytest.mark.usefixtures("in_this_process")
def test_every_part_yields_whole_rows(part):
    if part == "ode":
        pytest.importorskip("torchdiffeq")
    measured = speed.run([part], TINY, command="test")
    for row in measured:
        assert set(row) >= IN_EVERY_ROW, row
        assert 0 <= row["min"] <= row["median"] <= row["max"], row
        assert (row["ratio"] is None) == (row["reference"] is None), row
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured


def test_training_rates_follow_from_the_times():
    gemm, *steps = speed.training(TINY)
    assert gemm["subject"] == speed.GEMM
    assert gemm["gemm_fraction"] == 1
    flop = 6 * measure.build("bvit", TINY).macs * TINY.train_batch
    for row in steps:
        # two rounds: the mean of the rates at least and most
        assert row["gflops"] == pytest.approx((flop / row["min"] + flop / row["max"]) / 2e6, rel=0.05, abs=0.1)


@pytest.mark.usefixtures("in_this_process", "no_checkpoints")
def test_a_full_run_measures_the_cells_of_the_tables(monkeypatch):
    pytest.importorskip("torchdiffeq")
    for module in (measure, processes):
        monkeypatch.setattr(module, "milliseconds", lambda call, settings: 1.0)
    settings = measure.Settings(seconds=0.001, threads=1, model=TINY.model)
    parts = [part for part in speed.PARTS if part != "zoo"]  # whose table is benchmarks.zoo
    measured = speed.run(parts, settings, command="test")
    cells = {(row["benchmark"], row["subject"], row["reference"], row["batch"]) for row in measured}
    assert cells == {cell for table in tables.TABLES for cell in table.cells}
    assert tables.NOT_RUN not in tables.tables(measured)


def test_a_new_process_measures_its_own_peak_only():
    ballast = torch.ones(2**26)  # 256 MiB, which a new process must not inherit as its peak
    added = processes.in_new_process(processes.peak_memory, "bvit training", TINY)
    assert 0 < added < 128, ballast.numel()


def test_the_peak_sees_what_was_freed_again():
    gc.collect()  # what other tests have left is not to be freed in between
    processes._reset_peak(TINY)
    before = processes._peak(TINY)
    torch.ones(2**24)
    assert processes._peak(TINY) - before > 60 * 2**20


def test_rows_of_stages_are_compared_with_the_first_of_them(monkeypatch):
    peaks = {"bvit_ds K=1": 100.0, "bvit_ds K=4": 104.0, "bvit_ds K=4, one backward": 400.0}
    asked = []

    def answer(function, subject, settings, environment):
        asked.append((function, environment))
        return peaks[subject]

    monkeypatch.setattr(processes, "in_new_process", answer)
    first, *others = processes.stages(replace(TINY, stages=(1, 4), process_rounds=2))
    assert asked == [(processes.backward_peak, processes.FREED_AT_ONCE)] * 2 * len(peaks)
    assert (first["subject"], first["reference"], first["median"], first["unit"]) == ("bvit_ds K=1", None, 100, "MiB")
    assert {row["subject"]: row["median"] for row in (first, *others)} == peaks
    assert [(row["reference"], row["ratio"]) for row in others] == [("bvit_ds K=1", 0.9615), ("bvit_ds K=1", 0.25)]


@pytest.mark.skipif(sys.platform != "linux", reason="a process's own peak of memory needs Linux")
def test_memory_is_flat_in_the_stages_that_are_taken_one_at_a_time():
    # wide enough for its activations, some 200 MiB a stage, to drown what Python and the libraries allocate
    wider = {"embed_dim": 64, "num_heads": 2, "mlp_ratio": 2.0}
    _, one_at_a_time, at_once = processes.stages(replace(TINY, model=wider, stages=(1, 4), stage_batch=64))
    assert one_at_a_time["subject"] == "bvit_ds K=4"
    assert one_at_a_time["ratio"] == pytest.approx(1, abs=0.05)
    assert at_once["ratio"] == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(("subject", "count"), [("bvit_ds K=2", 2), ("bvit_ds K=3, one backward", 3)])
def test_the_subject_says_which_stages_are_measured(subject, count, monkeypatch):
    made, real = [], measure.build

    def build(name, settings, **arguments):
        made.append((name, arguments))
        return real(name, settings, **arguments)

    monkeypatch.setattr(processes, "build", build)
    calls = {name: [] for name in ("backward_stages", "stage_loss")}
    for name, seen in calls.items():
        function = getattr(processes, name)
        monkeypatch.setattr(processes, name, lambda *a, f=function, seen=seen: seen.append(a) or f(*a))
    peaks = iter((10 * 2**20, 12 * 2**20))  # a process's own counter wavers by more than this model takes
    monkeypatch.setattr(processes, "_peak", lambda settings: next(peaks))
    assert processes.backward_peak(subject, TINY) == 2
    assert made == [("bvit_ds", {"steps": 12, "stages": count})]
    used = "stage_loss" if "one" in subject else "backward_stages"
    assert {name: len(seen) for name, seen in calls.items()} == dict.fromkeys(calls, 0) | {used: 2}


# ---- the file --------------------------------------------------------------------------------------------------------


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, [{"a": 1}, {"a": "é"}])
    rows.append(path, [{"a": None}])
    assert [row["a"] for row in rows.read(path)] == [1, "é", None]
    assert path.read_bytes().endswith(b"\n")


def test_a_row_that_cannot_be_written_leaves_the_file_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, [{"a": 1}])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.append(path, [{"a": 2}, {"a": float("nan")}])
    assert path.read_bytes() == before


def test_a_run_is_one_write_and_a_short_one_is_undone(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    rows.append(path, [{"a": 1}])
    before = path.read_bytes()
    writes = []

    class FullDisk(io.FileIO):
        def write(self, data):
            writes.append(data)
            return super().write(data[: len(data) // 2])

    monkeypatch.setattr(rows, "open", lambda path, mode, buffering: FullDisk(path, mode), raising=False)
    with pytest.raises(OSError, match=r"rows\.jsonl: could not write"):
        rows.append(path, [{"a": 2}, {"a": 3}])
    assert writes == [b'{"a": 2}\n{"a": 3}\n']
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ['{"a": 1', "[1]"])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: "):
        list(rows.read(path))


# ---- provenance ------------------------------------------------------------------------------------------------------


def test_provenance_names_machine_and_versions():
    origin = rows.provenance("cpu", "python -m benchmarks.speed")
    assert origin["date"].endswith("+00:00")
    assert origin["hardware"]["cpu"]
    assert origin["hardware"]["threads"] == torch.get_num_threads()
    assert origin["hardware"]["gpu"] is None
    assert origin["versions"]["torch"] == torch.__version__
    assert set(origin["versions"]) == {"python", "torch", "timm", "torchdiffeq", "onnxruntime", "recurrent_vit"}


def test_there_is_no_commit_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    origin = rows.provenance("cpu", "")
    assert (origin["commit"], origin["dirty"]) == (None, None)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_changes_to_it(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    def commit_and_dirty():
        origin = rows.provenance("cpu", "")
        return origin["commit"], origin["dirty"]

    monkeypatch.setattr(rows, "ROOT", tmp_path)
    git("init")
    assert commit_and_dirty() == (None, None)
    (tmp_path / "code.py").write_text("")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert commit_and_dirty() == (commit, False)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "speed.jsonl").write_text("")
    assert commit_and_dirty() == (commit, False)
    (tmp_path / "code.py").write_text("pass")
    assert commit_and_dirty() == (commit, True)


# ---- the programs ----------------------------------------------------------------------------------------------------


def test_the_program_appends_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "QUICK", TINY)
    out = tmp_path / "speed.jsonl"
    speed.main(["--quick", "--rounds", "3", "--only", "inference,training", "--out", str(out)])
    measured = list(rows.read(out))
    assert [row["subject"] for row in measured if row["batch"] == 1] == ["timm_vit", "vit_cifar", "bvit"]
    assert {row["benchmark"] for row in measured} == {"inference", "training"}
    assert {row["rounds"] for row in measured} == {3}
    command = f"python -m benchmarks.speed --quick --rounds 3 --only inference,training --out {out}"
    assert {row["command"] for row in measured} == {command}


def test_a_quick_run_is_printed_not_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "QUICK", TINY)
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    speed.main(["--quick", "--only", "inference"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 3 * len(TINY.batches)
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_records_nothing(tmp_path, monkeypatch):
    def failing(settings):
        yield rows.cell("training", "bvit", [1.0])
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speed, "QUICK", TINY)
    monkeypatch.setitem(speed.PARTS, "training", failing)
    out = tmp_path / "speed.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        speed.main(["--quick", "--only", "inference,training", "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "inference,sleep"], "unknown sleep; known: inference, training, ode, compile, memory, stages, zoo"),
        (["--rounds", "0"], "--rounds and --threads must be at least 1"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device"),
    ],
)
def test_wrong_usage(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        speed.main(argv)
    assert message in capsys.readouterr().err


def test_a_missing_torchdiffeq_is_told_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(SystemExit, match="2"):
        speed.main(["--quick", "--only", "inference,ode"])
    assert 'pip install "recurrent-vit[ode]"' in capsys.readouterr().err


# ---- tables ----------------------------------------------------------------------------------------------------------

ORIGIN = {
    "date": "2030-01-02T03:04:05+00:00",
    "device": "cpu",
    "hardware": {"cpu": "A processor", "cores": 2, "threads": 1, "gpu": None},
    "versions": {"python": "3.11.2", "torch": "2.14.1", "torchdiffeq": None},
    "commit": "0123456789abcdef",
    "dirty": True,
    "command": "python -m benchmarks.speed",
}
TABLE = markdown.Table(
    "A title",
    "A caption.",
    [
        ("inference", "timm_vit", None, 16),
        ("inference", "bvit", "timm_vit", 16),
        ("inference", "bvit", "timm_vit", 128),
    ],
    {**tables.MEDIAN, **tables.IMAGES, **tables.RATIO},
)
MEASURED = [
    rows.cell("inference", "timm_vit", [2000, 1500.0, 4000], batch=16, inner=5) | ORIGIN,
    rows.cell("inference", "bvit", [1.0], reference="timm_vit", reference_values=[1.0], batch=16) | ORIGIN,
    rows.cell("inference", "bvit", [10.5], reference="timm_vit", reference_values=[21.0], batch=16) | ORIGIN,
    rows.cell("inference", "bvit", [9.9], reference="timm_vit", reference_values=[9.9], batch=128)
    | ORIGIN
    | {"device": "cuda"},
]


def test_a_table_shows_the_latest_rows_and_what_was_not_run():
    assert (
        markdown.render(TABLE, markdown.latest(MEASURED, "cpu"), "cpu")
        == """\
### A title, cpu

A caption.

| batch | subject | median (min to max) | images/s | ratio (min to max) | rounds x inner |
| --- | --- | --- | --- | --- | --- |
| 16 | timm_vit | 2,000 ms (1,500 to 4,000) | 8 |  | 3 x 5 |
| 16 | bvit | 10.5 ms (10.5 to 10.5) | 1,524 | 2.000 x timm_vit (2.000 to 2.000) | 1 x 1 |
| 128 | bvit | not run | not run | not run | not run |

- 2030-01-02; A processor, 2 cores, 1 threads; python 3.11.2, torch 2.14.1; commit 0123456789ab with changes; \
`python -m benchmarks.speed`
"""
    )


@pytest.mark.usefixtures("no_checkpoints")
def test_tables_without_rows_say_so():
    text = tables.tables([])
    assert text.count("### ") == len(tables.TABLES)
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line and "median" not in line]
    assert len(lines) == sum(len(table.cells) for table in tables.TABLES)
    assert all(line.endswith("| not run |") for line in lines)


@pytest.mark.usefixtures("no_checkpoints")
def test_every_device_has_its_tables():
    text = tables.tables([*MEASURED, {"accuracy": 0.5}])
    assert text.count("9.9 ms") == 1
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    # what was measured on no device is said of the CPU alone
    assert titles == [*(f"{table.title}, cpu" for table in tables.TABLES), "Inference, cuda"]


def test_the_readme_shows_the_tables_of_the_rows():
    text = (rows.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    block = text.split("<!-- tables: python -m benchmarks.tables -->")[1].split("<!-- /tables -->")[0]
    assert block.strip() == tables.tables(rows.read(*sorted(rows.RESULTS.glob("*.jsonl")))).strip()
