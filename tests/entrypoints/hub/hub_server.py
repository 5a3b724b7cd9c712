"""A hub on this machine: the part of the protocol of huggingface.co that downloads use. Model info,
`resolve` with ETag, X-Repo-Commit and a redirect of large files to a second address, and ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

INFO = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^?]+))?(?:\?.*)?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")
LARGE = 1 << 16  # bytes from which a file is in the large file storage


@dataclass
class Repository:
    """files: by path. revisions: name -> commit. damaged: paths whose content is sent wrong."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False
    damaged: set[str] = field(default_factory=set)


@dataclass
class Hub:
    """stall_after: bytes of a large file after which the server sends nothing until `resume` is
    set. requests: (method, path, Range) of all requests so far. status: of all replies, if not 0.
    """

    repositories: dict[str, Repository]
    stall_after: int | None = None
    ignores_ranges: bool = False
    status: int = 0
    resume: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    wrong_commit: str | None = None
    tokens_of_storage: set[str | None] = field(default_factory=set)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges_of(self, part: str) -> list[str | None]:
        """The Range headers of the downloads of paths with `part` in them."""
        return [header for method, path, header in self.requests if method == "GET" and part in path]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was ended has reset its connection."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._reply()

    def do_GET(self) -> None:
        self._reply()

    def _reply(self) -> None:
        self.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        if self.hub.status:
            return self._send(self.hub.status, {})
        if match := INFO.fullmatch(self.path):
            return self._info(match[1], match[2] or "main")
        if self.path.startswith("/storage/"):
            self.hub.tokens_of_storage.add(self.headers.get("Authorization"))
            name, _, file = self.path.removeprefix("/storage/").partition("//")
            return self._content(self.hub.repositories[name], file, {})
        if match := RESOLVE.fullmatch(self.path):
            return self._resolve(match[1], match[2], match[3])
        return self._send(404, {"X-Error-Code": "EntryNotFound"})

    def _info(self, name: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        commit = repository.revisions.get(revision) or next((each for each in repository.revisions.values() if each == revision), None)
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for file, data in repository.files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": _git_hash(data)}
            if len(data) >= LARGE:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return self._send(200, {}, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode())

    def _resolve(self, name: str, commit: str, file: str) -> None:
        repository = self.hub.repositories[name]
        if repository.gated:
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        data = repository.files.get(file)
        if data is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": self.hub.wrong_commit or commit, "ETag": f'"{_git_hash(data)}"', "Accept-Ranges": "bytes"}
        if len(data) < LARGE:
            return self._content(repository, file, headers)
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        storage = self.hub.url.replace("127.0.0.1", "localhost")  # another host, which gets no token
        return self._send(302, {**headers, "Location": f"{storage}/storage/{name}//{file}"})

    def _content(self, repository: Repository, file: str, headers: dict[str, str]) -> None:
        data, status, start = repository.files[file], 200, 0
        if file in repository.damaged:
            data = bytes(len(data))
        asked = self.headers.get("Range")
        if asked is not None and not self.hub.ignores_ranges:
            start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self._send(status, headers, data[start:], stall_after=self.hub.stall_after if len(data) >= LARGE else None)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", stall_after: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if stall_after is not None:
                self.wfile.write(body[:stall_after])
                self.wfile.flush()
                self.hub.resume.wait()
                body = body[stall_after:]
            self.wfile.write(body)
        except OSError:  # the client has gone
            self.close_connection = True


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
