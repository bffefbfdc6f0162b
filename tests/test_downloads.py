"""Weights from a Hub: timm and huggingface_hub, in processes of their own, against a local one with faults."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import safetensors.torch

from recurrent_vit.weights import FILE, checkpoints
from tests.local_hub import Fault, LocalHub, client, drop, flip, hang, sha256, status, truncate

REPO = "someone/bvit"
ROW = checkpoints("bvit")[0]
FOLDER = {path.name: path.read_bytes() for path in ROW.path.parent.iterdir()}

# What every process begins with: the manifest has one row, published at a commit; `load` tells what came of it.
BEGIN = """
import hashlib, json, sys, time
import safetensors.torch, timm, torch, recurrent_vit
from recurrent_vit import weights

row = weights.Checkpoint(**json.loads({row!r}))
weights._manifest = lambda: (row,)

def load(name, **kwargs):
    start = time.perf_counter()
    try:
        model = timm.create_model(name, pretrained=True, **kwargs)
        state = safetensors.torch.save(model.state_dict(), metadata={{"format": "pt"}})
        found = "the weights" if hashlib.sha256(state).hexdigest() == row.sha256 else "other weights"
    except Exception as error:
        found = f"{{type(error).__name__}}: {{error}}"
    print(json.dumps([found, time.perf_counter() - start]))

def by_name(**kwargs):
    load("bvit", pretrained_cfg_overlay={{"hf_hub_id": f"{{row.repo}}@{{row.commit}}"}}, **kwargs)
"""


class Published:
    """A local Hub that has the folder of a checkpoint, and the row that pins it."""

    def __init__(self, hub):
        self.hub = hub
        self.row = replace(ROW, repo=REPO, commit=hub.add(REPO, FOLDER))

    def run(self, code, **kwargs):
        """[result, seconds] for every `load` of the code."""
        begin = BEGIN.format(row=json.dumps(asdict(self.row)))
        done = client(self.hub, begin + code, **kwargs)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def results(self, code, **kwargs):
        return [result for result, _ in self.run(code, **kwargs)]


@pytest.fixture
def published():
    with LocalHub() as hub:
        yield Published(hub)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def cached_files(home):
    return sorted(path for path in home.rglob(FILE) if path.is_file())


# ---- cold and warm ---------------------------------------------------------------------------------------------------


def test_every_name_loads_cold_and_a_pinned_one_needs_no_request_when_warm(published, home):
    commit = published.row.commit
    code = f"by_name(); load('hf-hub:{REPO}'); load('hf-hub:{REPO}@{commit}')"
    assert published.results(code, home=home) == ["the weights"] * 3
    assert {request.method for request in published.hub.requests} <= {"GET", "HEAD"}
    assert len(published.hub.seen("GET", FILE)) == 1, "one download serves all names"
    assert published.hub.seen(path="pytorch_model") == []

    before = len(published.hub.requests)
    assert published.results(f"by_name(); load('hf-hub:{REPO}@{commit}')", home=home) == ["the weights"] * 2
    assert published.results("by_name()", home=home, HF_HUB_OFFLINE="1") == ["the weights"]
    assert len(published.hub.requests) == before


def test_the_loaded_model_records_the_commit(published):
    code = f"""
model = timm.create_model("hf-hub:{REPO}", pretrained=True)
print(json.dumps([model.pretrained_cfg["hf_hub_id"], 0]))
"""
    assert published.results(code) == [f"{REPO}@{published.row.commit}"]


def test_a_cache_folder_of_the_users_own_is_used(published, home, tmp_path):
    assert published.results(f"by_name(cache_dir={str(tmp_path / 'mine')!r})", home=home) == ["the weights"]
    assert cached_files(tmp_path / "mine")
    assert not cached_files(home)


def test_four_processes_load_into_one_cold_cache(published, home):
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(published.results, "by_name()", home=home) for _ in range(4)]
    assert [run.result() for run in runs] == [["the weights"]] * 4


def without_privilege():
    """In a new process, before it runs: root obeys permissions too (prctl: PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="takes root's privilege away by a call of Linux")
def test_a_cache_that_cannot_be_written_serves_what_it_has(published, home):
    published.results("by_name()", home=home)
    requests = len(published.hub.requests)
    folders = [path for path in [home, *home.rglob("*")] if path.is_dir() and not path.is_symlink()]
    for path in folders:
        path.chmod(0o555)
    code = BEGIN.format(row=json.dumps(asdict(published.row)))
    code += f"by_name()\nopen({str(home / 'new')!r}, 'w')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "HF_ENDPOINT": published.hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",  # the client would ask the Hub for a list that it cannot keep here
        },
        capture_output=True, text=True, preexec_fn=without_privilege,
    )  # fmt: skip
    for path in folders:
        path.chmod(0o755)
    assert "PermissionError" in done.stderr.splitlines()[-1], "the folder could be written"
    assert [json.loads(line)[0] for line in done.stdout.splitlines()] == ["the weights"]
    assert published.hub.requests[requests:] == []


# ---- content that is not what was published --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["by_name()", f"load('hf-hub:{REPO}')"])
def test_a_flipped_bit_on_the_way_is_healed_by_a_second_download(published, name):
    published.hub.faults.append(Fault(flip, "GET", FILE, times=1))
    assert published.results(name) == ["the weights"]
    assert len(published.hub.seen("GET", FILE)) == 2


def test_a_flipped_bit_of_an_unpinned_repository_is_healed_too(published):
    published.hub.add("someone/other", FOLDER)
    published.hub.faults.append(Fault(flip, "GET", FILE, times=1))
    assert published.results("load('hf-hub:someone/other')") == ["the weights"]
    assert len(published.hub.seen("GET", FILE)) == 2


def test_a_corrupted_cache_is_healed_by_one_download(published, home):
    published.results("by_name()", home=home)
    (path,) = cached_files(home)
    content = bytearray(path.read_bytes())
    content[-100] ^= 8
    path.resolve().write_bytes(content)
    assert published.results("by_name()", home=home) == ["the weights"]
    assert len(published.hub.seen("GET", FILE)) == 2
    assert sha256(path.read_bytes()) == ROW.sha256


def test_a_corrupted_cache_without_a_hub_says_both(published, home):
    published.results("by_name()", home=home)
    (path,) = cached_files(home)
    path.resolve().write_bytes(b"damaged")
    (error,) = published.results("by_name()", home=home, HF_HUB_OFFLINE="1")
    assert error.startswith(f"OSError: {REPO}: ")
    assert f"has 7 bytes, the checkpoint {ROW.id} has {ROW.bytes:,}; " in error
    assert "HF_HUB_OFFLINE is set" in error


def test_a_cache_below_a_folder_called_snapshots(published, tmp_path):
    folder = tmp_path / "snapshots" / "of" / "mine"
    assert published.results(f"by_name(cache_dir={str(folder)!r})") == ["the weights"]


def test_content_that_stays_wrong_is_refused_with_both_sums(published):
    published.hub.faults.append(Fault(flip, "GET", FILE))
    (error,) = published.results("by_name()")
    wrong = bytearray(FOLDER[FILE])
    wrong[len(wrong) // 2] ^= 1
    assert error.startswith(f"ValueError: {REPO} on the Hub, downloaded twice: ")
    assert sha256(bytes(wrong)) in error
    assert ROW.sha256 in error
    assert len(published.hub.seen("GET", FILE)) == 2


def test_a_main_that_has_moved_is_refused_and_its_pinned_commit_still_loads(published):
    state = safetensors.torch.load(FOLDER[FILE])
    state["norm.bias"] += 1
    moved = published.hub.add(REPO, {FILE: safetensors.torch.save(state, metadata={"format": "pt"})})
    code = f"load('hf-hub:{REPO}'); load('hf-hub:{REPO}@main'); by_name(); load('hf-hub:{REPO}@{moved}')"
    *refused, pinned, asked_for = published.results(code)
    for error in refused:
        assert error.startswith(f"ValueError: {REPO} on the Hub, downloaded twice: ")
        assert f"{ROW.sha256}; ask for the weights that are pinned, hf-hub:{REPO}@{published.row.commit}" in error
    assert (pinned, asked_for) == ("the weights", "other weights")


def test_half_a_backbone_for_another_head_is_refused(published):
    state = safetensors.torch.load(FOLDER[FILE])
    half = safetensors.torch.save(dict(list(state.items())[::2]), metadata={"format": "pt"})
    published.hub.add("someone/half", {**FOLDER, FILE: half})
    (error,) = published.results("load('hf-hub:someone/half', num_classes=7)")
    assert error.startswith("ValueError: ")
    assert " missing; bvit loads whole checkpoints" in error


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"custom_load": "hf", "hf_hub_filename": FILE}, "the weights"),
        ({"url": "http://127.0.0.1:9/x.pth"}, "the weights"),
        ({"file": "/etc/passwd"}, "the weights"),
        (
            {"hf_hub_filename": "../../../etc/passwd"},
            "ValueError: pretrained_cfg has hf_hub_filename='../../../etc/passwd'",
        ),
        (
            {"hf_hub_filename": "pytorch_model.bin"},
            "ValueError: pretrained_cfg has hf_hub_filename='pytorch_model.bin'",
        ),
        ({"hf_hub_filename": "../x.safetensors"}, "ValueError: pretrained_cfg has hf_hub_filename='../x.safetensors'"),
    ],
)
def test_a_configuration_that_points_elsewhere(published, changes, found):
    config = json.loads(FOLDER["config.json"])
    config["pretrained_cfg"].update(changes)
    published.hub.add("someone/hostile", {**FOLDER, "config.json": json.dumps(config).encode()})
    (result,) = published.results("load('hf-hub:someone/hostile')")
    assert result.startswith(found)
    assert published.hub.seen(path="pytorch_model") == published.hub.seen(path="passwd") == []


def test_a_pickle_is_never_asked_for(published):
    published.hub.add("someone/pickle", {"config.json": FOLDER["config.json"], "pytorch_model.bin": b"cos\nsystem\n."})
    (error,) = published.results("load('hf-hub:someone/pickle')")
    assert "could not be downloaded" in error
    assert published.hub.seen(path="pytorch_model") == []


# ---- a Hub that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        status(401, "RepoNotFound"),
        status(403, "GatedRepo"),
        status(404, "EntryNotFound"),
        status(429),
        status(503),
        drop,
    ],
    ids=["401", "403", "404", "429", "503", "drop"],
)
def test_a_refusal_is_one_error_that_names_what_and_the_ways_out(published, fault):
    published.hub.faults.append(Fault(fault, path=FILE))
    (error,) = published.results("by_name()")
    assert error.startswith(f"OSError: {REPO}: {published.hub.url}/{REPO}/resolve/")
    for part in (f"{ROW.bytes:,} bytes", ROW.id, "local-dir:FOLDER"):
        assert part in error
    assert published.hub.seen(path="pytorch_model") == []


@pytest.mark.parametrize("fault", [truncate, drop], ids=["truncate", "drop"])
def test_a_broken_download_leaves_nothing_and_the_next_one_works(published, home, fault):
    published.hub.faults.append(Fault(fault, "GET", FILE))
    (error,) = published.results("by_name()", home=home)
    assert error.startswith(f"OSError: {REPO}: ")
    assert cached_files(home) == []
    published.hub.faults.clear()
    assert published.results("by_name()", home=home) == ["the weights"]


@pytest.mark.parametrize("place", ["closed", "hangs"])
def test_a_hub_that_cannot_be_reached_is_an_error_within_15_seconds(published, place):
    published.hub.faults.append(Fault(hang(60), path=FILE))
    endpoint = {"HF_ENDPOINT": "http://127.0.0.1:9"} if place == "closed" else {}
    ((error, seconds),) = published.run("by_name()", sleep=True, **endpoint)
    assert error.startswith(f"OSError: {REPO}: ")
    assert "local-dir:FOLDER" in error
    assert seconds < 15


def test_a_name_that_has_no_answer_is_given_up_at_the_deadline(published):
    code = """
import huggingface_hub
huggingface_hub.get_hf_file_metadata = lambda url, timeout: time.sleep(3600)
by_name()
"""
    ((error, seconds),) = published.run(code, sleep=True)
    assert "TimeoutError: no answer within 12 seconds" in error
    assert seconds < 15


def test_offline_and_cold_says_so_without_a_request(published):
    (error,) = published.results("by_name()", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in error
    assert published.hub.requests == []


def test_when_the_hub_is_down_a_branch_is_served_from_the_cache(published, home):
    published.hub.add("someone/other", FOLDER)
    code = "load('bvit', pretrained_cfg_overlay={'hf_hub_id': 'someone/other'})"
    assert published.results(code, home=home) == ["the weights"]
    published.hub.faults.append(Fault(status(503)))
    assert published.results(code, home=home) == ["the weights"]


# ---- where requests go -----------------------------------------------------------------------------------------------


def test_a_token_opens_a_private_repository_and_stays_at_its_origin(published):
    hub = published.hub
    hub.add("someone/private", FOLDER, private=True)
    code = "load('bvit', pretrained_cfg_overlay={'hf_hub_id': 'someone/private'})"
    assert published.results(code)[0].startswith("OSError: someone/private: ")
    hub.faults.append(Fault(hub.to_storage, "GET", FILE))
    hub.requests.clear()
    assert published.results(code, HF_TOKEN=hub.token) == ["the weights"]
    origins = {request.headers["host"]: "authorization" in request.headers for request in hub.requests}
    assert origins == {hub.url.partition("//")[2]: True, hub.storage_url.partition("//")[2]: False}


def test_a_renamed_repository_is_found(published):
    published.hub.rename(REPO, "another/name")
    assert published.results(f"by_name(); load('hf-hub:{REPO}')") == ["the weights"] * 2


# ---- pushing ---------------------------------------------------------------------------------------------------------

PUSH = """
from recurrent_vit.__main__ import main
sys.exit(main(["push", {folder!r}, "--repo-id", {repo!r}, *{options!r}]))
"""


def push(hub, folder, *options, repo="someone/new", **environment):
    return client(hub, "import sys\n" + PUSH.format(folder=str(folder), repo=repo, options=options), **environment)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ROW.path.parent, tmp_path / ROW.id))


def test_a_pushed_folder_loads_and_its_commit_is_printed(published, folder):
    hub = published.hub
    (folder / "notes.txt").write_text("not for publication")
    done = push(hub, folder, HF_TOKEN=hub.token)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["someone/new"]
    assert done.stdout.strip() == repo.main
    assert repo.commits[repo.main].items() >= FOLDER.items()
    assert "notes.txt" not in repo.commits[repo.main]
    assert published.results(f"load('hf-hub:someone/new@{repo.main}')") == ["the weights"]
    again = push(hub, folder, HF_TOKEN=hub.token)
    assert (again.returncode, again.stdout.strip()) == (0, repo.main), "nothing new, no new commit"


def test_a_pushed_tag_never_changes_its_weights(published, folder):
    hub = published.hub
    state = safetensors.torch.load_file(folder / FILE)
    state["norm.bias"] += 1
    safetensors.torch.save_file(state, folder / FILE, metadata={"format": "pt"})
    done = push(hub, folder, repo=REPO, HF_TOKEN=hub.token)
    assert done.returncode == 1
    assert f"{REPO} has other weights (sha256 {ROW.sha256}" in done.stderr
    assert hub.repos[REPO].main == published.row.commit


def test_a_card_of_another_repository_is_not_pushed(published, folder):
    staged = folder.rename(folder.with_name("bvit.mine"))
    done = push(published.hub, staged, HF_TOKEN=published.hub.token)
    assert done.returncode == 1
    assert "does not load someone/new: stage the run again with --repo-id someone/new" in done.stderr
    card = (staged / "README.md").read_text()
    (staged / "README.md").write_text(card.replace(f'"{ROW.id}", pretrained', '"hf-hub:someone/new", pretrained'))
    assert push(published.hub, staged, HF_TOKEN=published.hub.token).returncode == 0


def test_a_dry_run_asks_nothing_and_uploads_nothing(published, folder):
    done = push(published.hub, folder, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"someone/new/{FILE}: {ROW.bytes:,} bytes" in done.stdout
    assert published.hub.requests == []


def test_private_is_private(published, folder):
    push(published.hub, folder, "--private", HF_TOKEN=published.hub.token)
    assert published.hub.repos["someone/new"].private


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: {"HF_TOKEN": "hf_wrong"}, "is there a token"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{}"), "is not fit to be published"),
        (lambda folder: (folder / FILE).write_bytes(b"x"), "is not fit to be published"),
    ],
    ids=["token", "no config", "other config", "other weights"],
)
def test_what_cannot_be_pushed_is_one_line(published, folder, change, message):
    environment = change(folder)
    done = push(published.hub, folder, **(environment if isinstance(environment, dict) else {}))
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "someone/new" not in published.hub.repos
