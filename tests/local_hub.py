"""A small real HTTP server that speaks enough of the Hugging Face hub's API to push and pull a model folder.

The real huggingface_hub client runs against it. Every file is answered "regular" (no LFS, no Xet), every
commit is a snapshot of all files, and the only branch is main.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
from huggingface_hub import constants

Files = dict[str, bytes]


class LocalHub:
    """Repositories in memory: name -> commits, each a sha and all files.

    Attributes:
        endpoint: the server's address.
        repos: repository -> [(sha, files), ...], the newest last.
        requests: "METHOD path" of everything asked.
    """

    def __init__(self) -> None:
        self.repos: dict[str, list[tuple[str, Files]]] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def files(self, repo: str) -> Files:
        """The files on main."""
        return self.repos[repo][-1][1]

    def commit(self, repo: str, files: Files) -> str:
        """Puts a new snapshot on main, and gives its sha."""
        history = self.repos[repo]
        sha = hashlib.sha1(f"{repo} {len(history)} {sorted(files)}".encode()).hexdigest()
        history.append((sha, dict(files)))
        return sha

    def at(self, repo: str, revision: str) -> tuple[str, Files] | None:
        """The snapshot that a branch or a sha names."""
        history = self.repos[repo]
        return history[-1] if revision == "main" else next((c for c in history if c[0] == revision), None)


@contextmanager
def local_hub(monkeypatch: Any) -> Iterator[LocalHub]:
    """A running hub that huggingface_hub takes for the real one."""
    hub = LocalHub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    try:
        yield hub
    finally:
        huggingface_hub.close_session()
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._route()

    def do_HEAD(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def log_message(self, *args: Any) -> None:
        pass

    def _route(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        name = r"(?P<repo>[^/]+/[^/]+)"
        for method, pattern, answer in (
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate),
            ("POST", rf"/api/models/{name}/preupload/(?P<revision>[^/]+)", self._preupload),
            ("POST", rf"/api/models/{name}/commit/(?P<revision>[^/]+)", self._commit),
            ("GET", rf"/api/models/{name}(/revision/(?P<revision>[^/]+))?", self._info),
            ("GET", rf"/api/models/{name}/tree/(?P<revision>[^/]+)", self._tree),
            ("GET HEAD", rf"/{name}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", self._resolve),
        ):
            found = re.fullmatch(pattern, path)
            if self.command in method.split() and found:
                parts = {key: unquote(value or "main") for key, value in found.groupdict().items()}
                if "repo" in parts and parts["repo"] not in self.hub.repos:
                    return self._refuse("RepoNotFound")
                if "revision" in parts and self.hub.at(parts["repo"], parts["revision"]) is None:
                    return self._refuse("RevisionNotFound")
                return answer(**parts)
        self._refuse("EntryNotFound")

    def _create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or 'user'}/{asked['name']}"
        status = 409 if repo in self.hub.repos else 200
        if status == 200:
            self.hub.repos[repo] = []
            self.hub.commit(repo, {})
        self._json({"url": f"{self.hub.endpoint}/{repo}"}, status)

    def _validate(self) -> None:
        content = json.loads(self.body)["content"]
        ok = re.match(r"---\n.*?\n---\n", content, re.DOTALL)
        errors = [] if ok else [{"message": "no YAML header"}]
        self._json({"errors": errors, "warnings": []}, 200 if ok else 400)

    def _preupload(self, repo: str, revision: str) -> None:
        files = self.hub.files(repo)
        self._json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "regular",
                        "shouldIgnore": False,
                        "oid": _git_oid(files[file["path"]]) if file["path"] in files else None,
                    }
                    for file in json.loads(self.body)["files"]
                ]
            }
        )

    def _commit(self, repo: str, revision: str) -> None:
        files = dict(self.hub.files(repo))
        for line in self.body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "deletedFile":
                del files[item["value"]["path"]]
        sha = self.hub.commit(repo, files)
        self._json({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha})

    def _info(self, repo: str, revision: str) -> None:
        sha, files = self.hub.at(repo, revision) or ("", {})
        siblings = [{"rfilename": path} for path in files]
        self._json(
            {"id": repo, "modelId": repo, "sha": sha, "private": False, "tags": [], "siblings": siblings}
        )

    def _tree(self, repo: str, revision: str) -> None:
        _, files = self.hub.at(repo, revision) or ("", {})
        self._json(
            [
                {"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
                for path, data in files.items()
            ]
        )

    def _resolve(self, repo: str, revision: str, file: str) -> None:
        sha, files = self.hub.at(repo, revision) or ("", {})
        if file not in files:
            return self._refuse("EntryNotFound", {"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_git_oid(files[file])}"'}
        self._send(200, files[file], {"Content-Type": "application/octet-stream", **headers})

    def _json(self, obj: Any, status: int = 200) -> None:
        self._send(status, json.dumps(obj).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str, headers: dict[str, str] | None = None) -> None:
        body = {"Content-Type": "application/json", "X-Error-Code": code, "X-Error-Message": code}
        self._send(404, b"{}", {**body, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
