"""A small Hugging Face Hub on this machine, for tests: the real client talks to it through HF_ENDPOINT.

    with LocalHub() as hub:
        hub.add("someone/model", {"config.json": b"{}"})
        hub.faults.append(Fault(status(503), "HEAD", "config.json", times=1))
        done = client(hub, "import huggingface_hub as h; print(h.hf_hub_download('someone/model', 'config.json'))")
        assert done.returncode == 0 and len(hub.seen("HEAD")) == 2

It holds model repositories with one branch, main. What goes over the wire follows huggingface_hub 2.4.0; each answer
below names the function of the client that reads it. A file *.safetensors is an LFS file, every other one a git blob.
Two servers share the state: `url` is the Hub, `storage_url` another origin, where LFS files are uploaded and where
`to_storage` redirects downloads, as the real Hub does with signed addresses.

Transfers are plain HTTP. Where hf_xet is installed the client would upload by the Xet protocol, which is not spoken
here: set HF_HUB_DISABLE_XET=1, as `client` does. HF_ENDPOINT is read when huggingface_hub is imported, which is why
`client` starts a process.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True)
class Request:
    """A request as it came: `path` with its query, names of `headers` in lower case ("host" tells the origin)."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)

    def matches(self, method: str = "", path: str = "") -> bool:
        """Whether it has this method and this text in its path; an empty text matches every request."""
        return method in ("", self.method) and path in self.path


@dataclass(frozen=True)
class Answer:
    """An answer, and what befalls it on the way: `delay` in seconds, `cut` in half the "body" or the "message"."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0
    cut: str = ""


def json_answer(content, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Answer:
    """A refusal; `code` chooses the client's exception (utils/_http.py, hf_raise_for_status)."""
    codes = {"X-Error-Code": code} if code else {}
    return json_answer({"error": message}, status, {**codes, "X-Error-Message": message, **(headers or {})})


# Faults: refusals given in place of the true answer, whose request then has no effect, or changes to the true answer.


@dataclass
class Fault:
    """Befalls the next `times` requests with this method and this text in their path."""

    act: Answer | Callable[[Answer], Answer]
    method: str = ""
    path: str = ""
    times: float = math.inf


def status(number: int, code: str = "", retry_after: int | None = None) -> Answer:
    """Refuse with this status and X-Error-Code, such as "RepoNotFound", "EntryNotFound" or "GatedRepo"."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return error(number, code, HTTPStatus(number).phrase, headers)


def truncate(answer: Answer) -> Answer:
    """Announce the whole body, send half of it and close."""
    return replace(answer, cut="body")


def drop(answer: Answer) -> Answer:
    """Reset the connection when half of the message, headers included, has been sent."""
    return replace(answer, cut="message")


def flip(answer: Answer) -> Answer:
    """Change one bit in the middle of the body."""
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 1
    return replace(answer, body=bytes(body))


def hang(seconds: float) -> Callable[[Answer], Answer]:
    """Answer only after this time."""
    return lambda answer: replace(answer, delay=seconds)


# What is stored.


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_oid(content: bytes) -> str:
    """The sha1 by which git names a blob."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


def describe(path: str, content: bytes) -> dict:
    """A file as /tree lists it (hf_api.py, RepoFile). In git an LFS file is a small text that points to its content."""
    file = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
    if is_lfs(path):
        oid = sha256(content)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n".encode()
        file["oid"] = git_oid(pointer)
        file["lfs"] = {"oid": oid, "size": len(content), "pointerSize": len(pointer)}
    return file


@dataclass
class Repo:
    """A repository: its commits, oldest first, each the whole tree of that moment."""

    id: str
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def main(self) -> str:
        return next(reversed(self.commits), "")

    def commit(self, files: dict[str, bytes]) -> str:
        """Make this tree the new main; the 40 digits depend on it and on the parent alone."""
        tree = [f"{path} {sha256(content)}" for path, content in sorted(files.items())]
        oid = hashlib.sha1("\n".join([self.main, *tree]).encode()).hexdigest()
        self.commits[oid] = files
        return oid


# What is answered, in the order of ROUTES.


def whoami(hub, request):
    return json_answer({"type": "user", "name": hub.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


def validate_yaml(hub, request):
    """hf_api.py, _validate_yaml: asked before a README.md is committed."""
    return json_answer({"errors": [], "warnings": []})


def create(hub, request):
    """hf_api.py, create_repo: a name that is taken is a 409, and also then the url is read."""
    asked = json.loads(request.body)
    name = f"{asked.get('organization') or hub.user}/{asked['name']}"
    answer = {"name": name, "url": f"{hub.url}/{name}"}
    if name in hub.repos:
        return json_answer({"error": "You already created this model repo", **answer}, 409)
    # "visibility" since 1.0, "private" before.
    hub.repos[name] = Repo(name, private=asked.get("visibility") == "private" or asked.get("private") is True)
    hub.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
    return json_answer(answer)


def model_info(hub, request, repo, commit):
    """hf_api.py, ModelInfo; sizes and hashes of the files only where ?blobs= asks for them."""
    siblings = [{"rfilename": path} for path in sorted(repo.commits[commit])]
    for sibling in siblings if "blobs=" in request.path else ():
        file = describe(sibling["rfilename"], repo.commits[commit][sibling["rfilename"]])
        sibling |= {"size": file["size"], "blobId": file["oid"]}
        if "lfs" in file:
            sibling["lfs"] = {**file["lfs"], "sha256": file["lfs"]["oid"]}
    facts = {"author": repo.id.split("/")[0], "sha": commit, "private": repo.private, "gated": False, "tags": []}
    return json_answer({"id": repo.id, "modelId": repo.id, **facts, "siblings": siblings})


def tree(hub, request, repo, commit, folder):
    """hf_api.py, list_repo_tree, always recursive; utils/_pagination.py follows the Link to the next page."""
    files = sorted(item for item in repo.commits[commit].items() if item[0].startswith(folder))
    if not files:
        return error(404, "EntryNotFound", f"{folder} does not exist on main")
    url = urlsplit(request.path)
    start = int(parse_qs(url.query).get("cursor", ["0"])[0])
    end = start + hub.page_size
    link = {"Link": f'<{hub.url}{url.path}?recursive=True&cursor={end}>; rel="next"'} if end < len(files) else {}
    return json_answer([describe(*file) for file in files[start:end]], headers=link)


def resolve(hub, request, repo, commit, file):
    """file_download.py, get_hf_file_metadata; the commit on a 404 lets the client remember that there is no file."""
    headers = {"X-Repo-Commit": commit}
    if file not in repo.commits[commit]:
        return error(404, "EntryNotFound", "Entry not found", headers)
    content = repo.commits[commit][file]
    headers["ETag"] = f'"{sha256(content) if is_lfs(file) else git_oid(content)}"'
    if is_lfs(file):
        headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
    return Answer(200, content, {**headers, "Accept-Ranges": "bytes"})


def preupload(hub, request, repo, commit):
    """_commit_api.py, _fetch_upload_modes: how to send each file; by `oid` the client skips an unchanged one."""
    files = []
    for path in (file["path"] for file in json.loads(request.body)["files"]):
        content = repo.commits[commit].get(path)
        oid = None if content is None else sha256(content) if is_lfs(path) else git_oid(content)
        mode = "lfs" if is_lfs(path) else "regular"
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return json_answer({"files": files})


def batch(hub, request, repo):
    """lfs.py, post_lfs_batch_info and lfs_upload: where to put each object; no actions for one that is here."""
    objects = []
    for wanted in json.loads(request.body)["objects"]:
        upload = {"href": f"{hub.storage_url}/lfs/{wanted['oid']}"}
        verify = {"href": f"{hub.url}/{repo.id}.git/info/lfs/objects/verify"}
        actions = {} if wanted["oid"] in hub.objects else {"actions": {"upload": upload, "verify": verify}}
        objects.append({"oid": wanted["oid"], "size": wanted["size"], **actions})
    return json_answer({"transfer": "basic", "objects": objects})


def verify(hub, request, repo):
    wanted = json.loads(request.body)
    if len(hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
        return error(404, "", "No such object")
    return json_answer({})


def commit(hub, request, repo, commit):
    """_commit_api.py, _prepare_commit_payload: one operation a line."""
    files = dict(repo.commits[commit])
    for operation in map(json.loads, request.body.splitlines()):
        value = operation["value"]
        match operation["key"]:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile" if value["oid"] in hub.objects:
                files[value["path"]] = hub.objects[value["oid"]]
            case "lfsFile":
                return error(400, "", f"{value['path']}: its content was not uploaded")
            case "deletedFile":
                files.pop(value["path"], None)
    hub.keep(files)
    oid = repo.commit(files)
    return json_answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{repo.id}/commit/{oid}"})


def store(hub, request, oid):
    """lfs.py, _upload_single_part."""
    if sha256(request.body) != oid:
        return error(400, "", "The content is not what its name says")
    hub.objects[oid] = request.body
    return Answer()


def fetch(hub, request, oid):
    if oid not in hub.objects:
        return error(404, "", "No such object")
    return Answer(200, hub.objects[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})


REPO, REVISION = r"(?P<repo>[\w.-]+/[\w.-]+)", r"(?P<revision>[^/]+)"

# Method (HEAD is routed as GET), path, whether a token is needed even if the repository is public, answer.
ROUTES = [
    ("GET", r"/api/whoami-v2", True, whoami),
    ("POST", r"/api/validate-yaml", False, validate_yaml),
    ("POST", r"/api/repos/create", True, create),
    ("GET", rf"/api/models/{REPO}(?:/revision/{REVISION})?", False, model_info),
    ("GET", rf"/api/models/{REPO}/tree/{REVISION}/?(?P<folder>.*)", False, tree),
    ("GET", rf"/{REPO}/resolve/{REVISION}/(?P<file>.+)", False, resolve),
    ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", True, preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", True, batch),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/verify", True, verify),
    ("POST", rf"/api/models/{REPO}/commit/{REVISION}", True, commit),
    ("PUT", r"/lfs/(?P<oid>\w+)", False, store),
    ("GET", r"/lfs/(?P<oid>\w+)", False, fetch),
]


def route(hub, request: Request) -> Answer:
    """Find the answer's function; refuse strangers, and what is not there, on the way."""
    path, method = urlsplit(request.path).path, request.method.replace("HEAD", "GET")
    found = ((re.fullmatch(pattern, path), *rest) for verb, pattern, *rest in ROUTES if verb == method)
    match, needs_token, handle = next((row for row in found if row[0]), (None, False, None))
    if match is None:
        return error(404, "", f"No route for {request.method} {path}")
    names = {name: unquote(value or "") for name, value in match.groupdict().items()}

    credentials = request.headers.get("authorization")
    known = credentials == f"Bearer {hub.token}"
    if credentials and not known:
        return error(401, "", "Invalid credentials in Authorization header")
    if "repo" in names:
        repo = hub.repos.get(names["repo"])
        if new := hub.moved.get(names["repo"]):
            return Answer(307, headers={"Location": request.path.replace(names["repo"], new, 1)})
        if repo is None or (repo.private and not known):
            # The real Hub may leave out the code: the client concludes it from a 401, but under https only.
            return error(404 if known else 401, "RepoNotFound", "Repository not found")
        names["repo"] = repo
    if needs_token and not known:
        return error(401, "", "Invalid username or password.")
    if "revision" in names:
        revision = names.pop("revision")
        names["commit"] = repo.main if revision in ("", "main") else revision
        if names["commit"] not in repo.commits:
            return error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    return handle(hub, request, **names)


def select_range(request: Request, answer: Answer) -> Answer:
    """The part that a Range header asks for; an interrupted download resumes so (file_download.py, http_get)."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if not asked or answer.status != 200 or "Accept-Ranges" not in answer.headers:
        return answer
    size, start = len(answer.body), int(asked[1])
    body = answer.body[start : int(asked[2] or size) + 1]
    headers = {**answer.headers, "Content-Range": f"bytes {start}-{start + len(body) - 1}/{size}"}
    return replace(answer, status=206, body=body, headers=headers)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def respond(self):
        hub = self.server.hub
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = hub.answer(Request(self.command, self.path, headers, body))
        hub.closing.wait(answer.delay)

        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        message = "\r\n".join([*lines, f"Content-Length: {len(answer.body)}", "", ""]).encode()
        half_body = len(message) + len(answer.body) // 2
        if self.command != "HEAD":
            message += answer.body
        end = {"": len(message), "body": half_body, "message": len(message) // 2}[answer.cut]
        with contextlib.suppress(ConnectionError):  # the client has left
            self.wfile.write(message[:end])
        self.close_connection = self.close_connection or answer.cut != ""
        if answer.cut == "message":
            # Lingering for no time makes closing a reset; the server's own way out would first say goodbye.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = respond

    def log_message(self, *args):
        """Nothing: what was asked is in hub.requests."""


class LocalHub:
    """The Hub; both servers run while its context lasts.

    Attributes:
        url: what HF_ENDPOINT should be.
        storage_url: the other origin.
        requests: every `Request` to either origin, in the order of arrival.
        faults: the `Fault`s; of those that match a request and have times left, the first acts.
        repos: the `Repo`s by name.
        objects: contents by sha256, as the storage holds them.
        moved: new names of renamed repositories.
        user, token: the account that may read private repositories and write.
        page_size: files in one page of a listing.
    """

    def __init__(self):
        self.requests, self.faults = [], []
        self.repos, self.objects, self.moved = {}, {}, {}
        self.user, self.token, self.page_size = "someone", "hf_local", 1000
        self.closing = threading.Event()
        self._lock = threading.RLock()
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in self._servers:
            server.hub = self
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self):
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo_id: str, files: dict[str, bytes], private: bool = False) -> str:
        """Commit these files over those of main and return the commit; `private` is for a repository not there yet."""
        with self._lock:
            repo = self.repos.setdefault(repo_id, Repo(repo_id, private))
            self.keep(files)
            return repo.commit({**repo.commits.get(repo.main, {}), **files})

    def keep(self, files: dict[str, bytes]) -> None:
        """Put the contents also into the storage, so that a redirect finds them."""
        self.objects.update({sha256(content): content for content in files.values()})

    def rename(self, old: str, new: str) -> None:
        """Move a repository; requests for the old name are redirected."""
        with self._lock:
            self.repos[new] = replace(self.repos.pop(old), id=new)
            self.moved[old] = new

    def seen(self, method: str = "", path: str = "") -> list[Request]:
        """The requests so far with this method and this text in their path."""
        return [request for request in list(self.requests) if request.matches(method, path)]

    def to_storage(self, answer: Answer) -> Answer:
        """A fault: the file is at the other origin; what is known of it stays in the headers."""
        location = f"{self.storage_url}/lfs/{sha256(answer.body)}"
        return replace(answer, status=302, body=b"", headers={**answer.headers, "Location": location})

    def answer(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            fault = next((f for f in self.faults if f.times > 0 and request.matches(f.method, f.path)), None)
            if fault:
                fault.times -= 1
            if fault and isinstance(fault.act, Answer):
                answer = fault.act
            else:
                answer = route(self, request)
                answer = fault.act(answer) if fault else answer
        return select_range(request, answer)


# The client waits between its tries; `slept` records for how long it would have.
NO_SLEEP = """\
import time, types
from huggingface_hub import file_download
from huggingface_hub.utils import _http
slept = []
for module in (file_download, _http):
    module.time = types.SimpleNamespace(**{**vars(time), "sleep": slept.append})
"""


def client(hub: LocalHub, code: str, *, home=None, sleep=False, timeout=60, **environment):
    """Run Python code in a new process whose Hub is this one, without token, proxies or anything cached.

    Args:
        hub: the Hub to talk to.
        code: what to run; indented as a block if that suits.
        home: the folder for HF_HOME, to share a cache between calls; a fresh one if None.
        sleep: whether the client really waits between its tries. If not, the code finds in `slept` how long it would.
        timeout: seconds, after which subprocess.TimeoutExpired is raised.
        **environment: further variables, such as HF_TOKEN=hub.token or HF_HUB_ETAG_TIMEOUT="1".

    Returns:
        The subprocess.CompletedProcess, with text in stdout and stderr; the return code is the caller's to check.
    """
    foreign = re.compile("(HF|HUGGING_?FACE|TRANSFORMERS)_.*|.*_PROXY", re.IGNORECASE)
    inherited = {name: value for name, value in os.environ.items() if not foreign.fullmatch(name)}
    with tempfile.TemporaryDirectory() as temporary:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home or temporary), "HF_HUB_DISABLE_XET": "1"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.run(
            [sys.executable, "-c", ("" if sleep else NO_SLEEP) + textwrap.dedent(code)],
            env={**inherited, **settings, **quiet, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
