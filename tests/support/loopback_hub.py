"""A Hub on this machine, with repositories in memory, for the clients of huggingface_hub, transformers and kernels."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_tests"  # needed to write, and to read private repositories


@dataclass
class Repo:
    """One repository: files by path for each commit, and the commits of branches and pull requests."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def files(self, revision="main"):
        return self.commits[self.refs.get(revision, revision)]

    def commit(self, files, ref="main", message="a commit", deleted=()):
        """Commit `files` on top of the files at `ref`, but for those `deleted`; return the commit."""
        before = self.commits.get(self.refs.get(ref, self.refs.get("main")), {})
        files = {**{path: content for path, content in before.items() if path not in deleted}, **files}
        self.messages.append(message)
        oid = hashlib.sha1(repr((len(self.messages), sorted(files.items()))).encode()).hexdigest()
        self.commits[oid], self.refs[ref] = files, oid
        return oid


class LoopbackHub:
    """A Hub: `repos["models", "org/name"]` is a repository, and `asked` has the paths of all requests in order.

    `metadata_answer` is the response, and its HTTP status, to requests to validate the metadata of a card.
    """

    def __init__(self):
        self.metadata_answer = {"errors": [], "warnings": []}, 200
        self.repos, self.asked, self.address = {}, [], None

    def add(self, repo_id, folder, kind="models", **options):
        """Commit a folder's files to a repository, created if needed; return the commit."""
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
        repo = self.repos.setdefault((kind, repo_id), Repo(**options))
        return repo.commit({file.relative_to(folder).as_posix(): file.read_bytes() for file in files})


@contextmanager
def loopback_hub():
    """Serve a Hub that is empty at first."""
    hub = LoopbackHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub, hub.address = hub, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        match self.parts():
            case ["api", kind, org, name, *rest]:
                self.answer(kind, f"{org}/{name}", rest, self.get_api)
            case ["kernels", org, name, "resolve", revision, *file]:
                self.answer("kernels", f"{org}/{name}", [revision, *file], self.get_file)
            case [org, name, "resolve", revision, *file]:
                self.answer("models", f"{org}/{name}", [revision, *file], self.get_file)
            case _:
                self.fail(404, "EntryNotFound")

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match self.parts():
            case ["api", "validate-yaml"]:
                self.send(*self.server.hub.metadata_answer)
            case _ if not self.has_token():
                self.fail(401, "Unauthorized")
            case ["api", "repos", "create"]:
                self.create()
            case ["api", kind, org, name, *rest]:
                self.answer(kind, f"{org}/{name}", rest, self.post_api)

    def parts(self):
        # A client's "a%2Fb" is one part, as in the revision refs/pr/1.
        raw = urlsplit(self.path).path.strip("/")
        self.server.hub.asked.append(unquote(raw))
        return [unquote(part) for part in raw.split("/")]

    def has_token(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def answer(self, kind, repo_id, rest, method):
        repo = self.server.hub.repos.get((kind, repo_id))
        if repo is None or (repo.private and not self.has_token()):
            self.fail(404, "RepoNotFound")
        else:
            method(repo, repo_id, rest)

    def get_api(self, repo, repo_id, rest):
        revision = rest[1] if len(rest) > 1 else "main"
        oid = repo.refs.get(revision, revision)
        if oid not in repo.commits:
            self.fail(404, "RevisionNotFound")
        elif rest[:1] == ["tree"]:
            self.send(_tree(repo.commits[oid], "/".join(rest[2:]), "recursive=true" in self.path.lower()))
        else:
            siblings = [{"rfilename": path} for path in repo.commits[oid]]
            self.send({"id": repo_id, "sha": oid, "siblings": siblings, "private": repo.private})

    def get_file(self, repo, _repo_id, rest):
        oid = repo.refs.get(rest[0], rest[0])
        content = repo.commits.get(oid, {}).get("/".join(rest[1:]))
        if oid not in repo.commits:
            self.fail(404, "RevisionNotFound")
        elif content is None:
            self.fail(404, "EntryNotFound", {"X-Repo-Commit": oid})
        else:
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.send(content, headers={"ETag": etag, "X-Repo-Commit": oid})

    def create(self):
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or 'user'}/{asked['name']}"
        new = ("models", repo_id) not in self.server.hub.repos
        if new:
            repo = Repo(private=asked.get("private", asked.get("visibility") == "private"))
            repo.commit({".gitattributes": b""})
            self.server.hub.repos["models", repo_id] = repo
        self.send({"url": f"{self.server.hub.address}/{repo_id}", "id": repo_id}, 200 if new else 409)

    def post_api(self, repo, repo_id, rest):
        match rest:
            case ["branch", branch]:
                repo.refs.setdefault(branch, repo.refs["main"])
                self.send({})
            case ["preupload", _revision]:
                files = json.loads(self.body)["files"]
                sizes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                self.send({"files": sizes})
            case ["commit", revision]:
                lines = [json.loads(line) for line in self.body.splitlines()]
                added = [line["value"] for line in lines if line["key"] == "file"]
                pull = "create_pr" in parse_qs(urlsplit(self.path).query)
                ref = f"refs/pr/{len(repo.messages)}" if pull else revision
                files = {file["path"]: base64.b64decode(file["content"]) for file in added}
                deleted = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
                oid = repo.commit(files, ref, lines[0]["value"]["summary"], deleted)
                url = f"{self.server.hub.address}/{repo_id}"
                number = ref.rpartition("/")[2]
                pull_url = {"pullRequestUrl": f"{url}/discussions/{number}"} if pull else {}
                self.send({"commitUrl": f"{url}/commit/{oid}", "commitOid": oid, **pull_url})

    def fail(self, status, code, headers=None):
        self.send({"error": code}, status, {"X-Error-Code": code, **(headers or {})})

    def send(self, content, status=200, headers=None):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        defaults = {"Content-Length": str(len(content)), "Content-Type": "application/json"}
        for name, value in {**defaults, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_args):
        """Log nothing."""


def _tree(files, below, recursive):
    """The files and folders below a folder, on all levels or on the first."""
    entries = {}
    for path, content in files.items():
        inside = path[len(below) :].strip("/") if path.startswith(below) else ""
        names = inside.split("/")
        for depth in range(1, (len(names) if recursive else 1) + 1):
            kind = "file" if depth == len(names) else "directory"
            name = "/".join(filter(None, [below, *names[:depth]]))
            size = len(content) if kind == "file" else 0
            oid = hashlib.sha1(repr((name, content)).encode()).hexdigest()
            entries[name] = {"type": kind, "path": name, "oid": oid, "size": size}
    return [entries[name] for name in sorted(entries)]
