"""The Hub of these tests is one for the real client; and what that client notices of a fault, and what it does not."""

import json
import re
import textwrap

import pytest

from tests.local_hub import Fault, LocalHub, client, drop, flip, hang, sha256, status, truncate

CONFIG, WEIGHTS = b'{"a": 1}', bytes(range(256)) * 400
FILES = {"config.json": CONFIG, "sub/model.safetensors": WEIGHTS}


def run(hub, code, **kwargs):
    """What the code prints last, as JSON."""
    done = client(hub, code, **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def hub():
    with LocalHub() as hub:
        yield hub


def test_a_model_is_described_listed_and_downloaded_as_it_was_committed(hub):
    first = hub.add("someone/model", {"config.json": b"{}"})
    second = hub.add("someone/model", FILES)
    hub.page_size = 1
    found = run(
        hub,
        f"""
        import json, os, pathlib
        from huggingface_hub import hf_hub_download, model_info, snapshot_download
        info = model_info("someone/model", files_metadata=True)
        folder = pathlib.Path(snapshot_download("someone/model"))
        print(json.dumps({{
            "info": [info.id, info.sha, info.private, info.author, info.tags],
            "siblings": [[s.rfilename, s.size, s.lfs and s.lfs.sha256] for s in info.siblings],
            "old info": [s.rfilename for s in model_info("someone/model", revision="{first}").siblings],
            "snapshot": [folder.name, *sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))],
            "weights": (folder / "sub" / "model.safetensors").read_bytes().hex(),
            "blob": os.path.basename(os.path.realpath(folder / "config.json")),
            "old": open(hf_hub_download("someone/model", "config.json", revision="{first}")).read(),
        }}))
        """,
    )
    assert found["info"] == ["someone/model", second, False, "someone", []]
    assert found["siblings"] == [
        ["config.json", len(CONFIG), None],
        ["sub/model.safetensors", len(WEIGHTS), sha256(WEIGHTS)],
    ]
    assert found["old info"] == ["config.json"]
    assert found["snapshot"] == [second, "config.json", "sub/model.safetensors"]
    assert bytes.fromhex(found["weights"]) == WEIGHTS
    assert found["blob"] == "4a036f56bb619924ec4189bd84ed716c766971ae"  # by git hash-object
    assert found["old"] == "{}"
    assert len(hub.seen("GET", "/tree/")) == 2, "one request for each page"


def test_commits_depend_on_content_and_parent_alone():
    with LocalHub() as one, LocalHub() as other:
        commits = [hub.add("someone/model", FILES) for hub in (one, one, other)]
        assert commits[0] == commits[2] != commits[1]
        assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)


def test_a_warm_cache_at_a_pinned_commit_asks_nothing_and_an_unpinned_one_follows_main(hub, tmp_path):
    commit = hub.add("someone/model", FILES)
    download = """
        from huggingface_hub import hf_hub_download
        print(open(hf_hub_download("someone/model", "config.json", revision="{}")).read())
    """
    assert run(hub, download.format("main"), home=tmp_path) == {"a": 1}
    assert [request.method for request in hub.requests] == ["HEAD", "GET"]
    hub.add("someone/model", {"config.json": b'{"a": 2}'})
    hub.requests.clear()
    assert run(hub, download.format(commit), home=tmp_path) == {"a": 1}
    assert hub.requests == []
    assert run(hub, download.format("main"), home=tmp_path) == {"a": 2}


def test_an_uploaded_folder_comes_back_with_equal_bytes(hub, tmp_path):
    for name, content in {**FILES, "README.md": b"---\nlicense: mit\n---\n# A model\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = run(
        hub,
        f"""
        import json, pathlib
        from huggingface_hub import HfApi
        api = HfApi()
        url = api.create_repo("model", private=True)
        again = api.create_repo("model", exist_ok=True)
        commits = [api.upload_folder(repo_id=url.repo_id, folder_path={str(tmp_path)!r}) for _ in range(2)]
        folder = pathlib.Path(api.snapshot_download(url.repo_id, revision=commits[0].oid))
        equal = [p.read_bytes() == (folder / p.relative_to({str(tmp_path)!r})).read_bytes()
                 for p in pathlib.Path({str(tmp_path)!r}).rglob("*.*")]
        api.delete_file("config.json", url.repo_id)
        names = [api.whoami()["name"], url.repo_id, again.repo_id, commits[0].repo_url.repo_id]
        print(json.dumps([names, [c.oid for c in commits], equal]))
        """,
        HF_TOKEN=hub.token,
    )
    repo = hub.repos["someone/model"]
    created, uploaded, deleted = repo.commits
    assert found == [["someone", *3 * ["someone/model"]], [uploaded, uploaded], [True, True, True]]
    assert repo.private
    assert list(repo.commits[created]) == [".gitattributes"]
    assert repo.commits[uploaded]["sub/model.safetensors"] == WEIGHTS
    assert repo.commits[uploaded].keys() - repo.commits[deleted].keys() == {"config.json"}
    [put] = hub.seen("PUT")
    assert put.headers["host"] == hub.storage_url.removeprefix("http://")
    assert "authorization" not in put.headers


def test_reading_what_is_private_and_writing_need_the_token(hub):
    hub.add("someone/private", FILES, private=True)
    hub.add("someone/public", FILES)
    found = run(
        hub,
        f"""
        import json
        from huggingface_hub import HfApi
        def outcome(action, *args, token, **kwargs):
            try:
                action(*args, token=token, **kwargs)
                return "done"
            except Exception as failure:
                return f"{{type(failure).__name__}} {{failure.response.status_code}}"
        api, file = HfApi(), dict(path_or_fileobj=b"", path_in_repo="empty", repo_id="someone/public")
        print(json.dumps([[
            outcome(api.hf_hub_download, "someone/private", "config.json", token=token),
            outcome(api.model_info, "someone/private", token=token),
            outcome(api.model_info, "someone/missing", token=token),
            outcome(api.model_info, "someone/public", token=token),
            outcome(api.upload_file, token=token, **file),
        ] for token in (False, "hf_other", "{hub.token}")]))
        """,
    )
    missing = "RepositoryNotFoundError"
    assert found == [
        [f"{missing} 401", f"{missing} 401", f"{missing} 401", "done", "HfHubHTTPError 401"],
        ["HfHubHTTPError 401"] * 5,
        ["done", "done", f"{missing} 404", "done", "done"],
    ]


# A repository for each fault: its name, the faults, and the class of the exception or of one of its bases.
REFUSALS = {
    "unauthorised": ([Fault(status(401, "RepoNotFound"))], "RepositoryNotFoundError"),
    "gated": ([Fault(status(403, "GatedRepo"))], "GatedRepoError"),
    "forbidden": ([Fault(status(403))], "LocalEntryNotFoundError"),
    "no-repository": ([Fault(status(404, "RepoNotFound"))], "RepositoryNotFoundError"),
    "no-revision": ([Fault(status(404, "RevisionNotFound"))], "RevisionNotFoundError"),
    "no-file": ([Fault(status(404, "EntryNotFound"))], "EntryNotFoundError"),
    "too-many": ([Fault(status(429, retry_after=7))], "LocalEntryNotFoundError"),
    "unavailable": ([Fault(status(503))], "LocalEntryNotFoundError"),
    "unavailable-get": ([Fault(status(503), "GET")], "HfHubHTTPError"),
    # The client passes these on as they come from its transport, whose classes change with its releases.
    "dropped-head": ([Fault(drop, "HEAD")], "Exception"),
    "dropped-get": ([Fault(drop, "GET")], "Exception"),
    "truncated": ([Fault(truncate, "GET")], "Exception"),
}
SURVIVED = {
    "sound": [],
    "truncated-once": [Fault(truncate, "GET", times=1)],
    "unavailable-once": [Fault(status(503, retry_after=3), "HEAD", times=1)],
    "flipped": [Fault(flip, "GET")],
    "redirected": [],
    "redirected-get": [],
}


@pytest.fixture(scope="module")
def outcomes():
    """The Hub, and for each repository what came of downloading its file, with a token, all in one process."""
    with LocalHub() as hub:
        faults = {name: row[0] for name, row in REFUSALS.items()} | SURVIVED
        faults["redirected"] = [Fault(hub.to_storage)]
        faults["redirected-get"] = [Fault(hub.to_storage, "GET")]
        for name in faults:
            hub.add(f"faults/{name}", {"model.safetensors": WEIGHTS})
            hub.faults += [Fault(f.act, f.method, f"/{name}/", f.times) for f in faults[name]]
        hub.add("faults/old", {"model.safetensors": WEIGHTS})
        hub.rename("faults/old", "faults/new")
        code = """
        import hashlib, json, pathlib
        from huggingface_hub import constants, hf_hub_download, model_info
        found = {}
        for name in NAMES:
            slept.clear()
            row = found[name] = {"raised": [], "sha256": None}
            try:
                path = hf_hub_download(f"faults/{name}", "model.safetensors")
                row["sha256"] = hashlib.sha256(open(path, "rb").read()).hexdigest()
            except Exception as failure:
                row["raised"] = [c.__name__ for c in type(failure).__mro__]
            cache = pathlib.Path(constants.HF_HUB_CACHE, f"models--faults--{name}")
            row["cached"] = [p.name for folder in ("blobs", "snapshots") for p in cache.glob(f"{folder}/**/*.*")]
            row["cached"] += [p.name for p in cache.glob("blobs/*")]
            row["slept"] = list(slept)
        found["old"]["id"] = model_info("faults/old").id
        print(json.dumps(found))
        """
        names = f"NAMES = {[*faults, 'old']}\n"
        yield hub, run(hub, names + textwrap.dedent(code), HF_TOKEN=hub.token)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_raises_and_leaves_nothing_in_the_cache(outcomes, name):
    hub, found = outcomes
    assert hub.seen(path=f"/{name}/"), "no request at all"
    assert REFUSALS[name][1] in found[name]["raised"], found[name]
    assert found[name]["cached"] == []


@pytest.mark.parametrize("name", ["sound", "truncated-once", "unavailable-once", "redirected", "redirected-get", "old"])
def test_a_file_comes_whole_through_what_the_client_can_repair(outcomes, name):
    found = outcomes[1][name]
    assert (found["raised"], found["sha256"]) == ([], sha256(WEIGHTS))


def test_the_client_waits_as_long_as_it_is_told(outcomes):
    hub, found = outcomes
    assert set(found["too-many"]["slept"]) == {8.0}  # Retry-After, and a second against rounding
    assert found["sound"]["slept"] == []
    assert len(hub.seen("HEAD", "/too-many/")) == 2 + len(found["too-many"]["slept"])


def test_a_flipped_bit_goes_unnoticed_so_whoever_minds_must_compare_the_sha256(outcomes):
    found = outcomes[1]["flipped"]
    assert found["raised"] == []
    assert found["cached"] == ["model.safetensors", sha256(WEIGHTS)], "cached under the name of the true content"
    assert found["sha256"] != sha256(WEIGHTS)


def test_the_token_stays_with_the_hub(outcomes):
    hub, _ = outcomes
    by_origin = {
        url: [r for r in hub.requests if url.endswith(r.headers["host"])] for url in (hub.url, hub.storage_url)
    }
    assert all(request.headers["authorization"] == f"Bearer {hub.token}" for request in by_origin[hub.url])
    assert [request.path for request in by_origin[hub.storage_url]] == 2 * [f"/lfs/{sha256(WEIGHTS)}"]
    assert all("authorization" not in request.headers for request in by_origin[hub.storage_url])


def test_a_renamed_repository_answers_to_its_old_name(outcomes):
    hub, found = outcomes
    assert found["old"]["id"] == "faults/new"
    assert [request.method for request in hub.seen(path="/new/resolve/")] == ["HEAD", "GET"]


def test_a_hanging_hub_is_asked_again_and_a_broken_download_goes_on_where_it_stopped(hub):
    hub.add("someone/model", FILES)
    hub.faults += [Fault(hang(30), "HEAD", times=1), Fault(hang(30), "GET", times=1), Fault(truncate, "GET", times=1)]
    found = run(
        hub,
        """
        import hashlib, json
        from huggingface_hub import constants, hf_hub_download
        constants.DOWNLOAD_CHUNK_SIZE = 1000  # what is kept of a broken download is a multiple of this
        path = hf_hub_download("someone/model", "sub/model.safetensors")
        print(json.dumps(hashlib.sha256(open(path, "rb").read()).hexdigest()))
        """,
        HF_HUB_ETAG_TIMEOUT="1",
        HF_HUB_DOWNLOAD_TIMEOUT="1",
    )
    assert found == sha256(WEIGHTS)
    assert len(hub.seen("HEAD")) >= 2
    ranges = [request.headers.get("range") for request in hub.seen("GET")]
    assert ranges[0] is None
    assert ranges[-1] == f"bytes={len(WEIGHTS) // 2 // 1000 * 1000}-"


def test_what_is_refused_has_no_effect_and_what_is_cut_off_has(hub):
    code = """
        import json
        from huggingface_hub import create_repo
        try:
            create_repo("someone/model")
        except Exception as failure:
            print(json.dumps(type(failure).__name__))
    """
    for act, exists in ((status(503), False), (drop, True)):
        hub.faults[:] = [Fault(act, "POST")]
        assert run(hub, code, HF_TOKEN=hub.token)
        assert ("someone/model" in hub.repos) is exists
