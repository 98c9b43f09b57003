"""A Hub on this machine that has kernel repositories, for `kernels` and huggingface_hub to read."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


def commit_of(repo):
    """The one commit that a repository of this Hub has."""
    return hashlib.sha1(repo.encode()).hexdigest()


@contextmanager
def kernel_hub(root):
    """Serve each `<root>/<org>/<name>` as a kernel repository; give the address, and the paths that were asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.root, server.asked = root, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.asked.append(path)
        match path.split("/"):
            case ["api", "kernels", org, name, "tree", _commit, *below]:
                self.send_tree(self.server.root / org / name, "/".join(below))
            case ["api", "kernels", org, name, *_]:
                self.send_info(self.server.root / org / name, f"{org}/{name}")
            case ["kernels", org, name, "resolve", _commit, *file]:
                self.send_file(self.server.root.joinpath(org, name, *file), f"{org}/{name}")
            case _:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send_tree(self, folder, below):
        items = folder.rglob("*") if "recursive=true" in self.path.lower() else (folder / below).iterdir()
        entries = [
            {
                "type": "directory" if item.is_dir() else "file",
                "path": item.relative_to(folder).as_posix(),
                "oid": hashlib.sha1(str(item).encode()).hexdigest(),
                "size": item.stat().st_size,
            }
            for item in sorted(items)
        ]
        self.send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def send_info(self, folder, repo):
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
        info = {"id": repo, "sha": commit_of(repo), "siblings": siblings, "private": False}
        self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def send_file(self, file, repo):
        if not file.is_file():
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit_of(repo)})
            return
        content = file.read_bytes()
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self.send(200, content, {"ETag": etag, "X-Repo-Commit": commit_of(repo)})

    def send(self, status, content, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_args):
        """Keep quiet."""
