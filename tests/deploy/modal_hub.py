"""A model hub on loopback: the calls of the hub's protocol that fetching a model needs, over the files of a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = {"main": COMMIT, "v2": "fedcba9876543210fedcba9876543210fedcba98"}
LARGE_BYTES = 10_000_000
CHUNK_BYTES = 1 << 20


class Hub:
    """One model: its files, and the first byte of every file that was asked for.

    The large file can be cut off (`cut_after_bytes`, once) or held back (`hold_after_bytes`) on its way. Each of the
    `refusals` is the status of one answer to a question about the model; `num_questions` counts these questions.
    Each of `file_refusals` is the status of one answer to a question for a file.
    """

    def __init__(self, model_id: str, folder: Path) -> None:
        self.model_id = model_id
        self._fingerprints: dict[str, str] = {}
        self.files = {path.name: path for path in sorted(folder.iterdir())}
        self.cut_after_bytes: int | None = None
        self.hold_after_bytes: int | None = None
        self.is_held = threading.Event()
        self.is_closed = threading.Event()
        self.fetched: list[tuple[str, int]] = []
        self.refusals: list[int] = []
        self.file_refusals: list[int] = []
        self.num_questions = 0
        self.url = ""

    def fingerprint(self, name: str) -> str:
        """What the hub knows a file by: sha256 for a large one, git's own hash otherwise."""
        if name not in self._fingerprints:
            content = self.files[name].read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
            self._fingerprints[name] = (hashlib.sha256(content) if len(content) >= LARGE_BYTES else blob).hexdigest()
        return self._fingerprints[name]

    def tree(self) -> list[dict[str, Any]]:
        """The list of files."""
        entries = []
        for name, path in self.files.items():
            size, oid = path.stat().st_size, self.fingerprint(name)
            entry = {"type": "file", "path": name, "size": size, "oid": oid}
            if size >= LARGE_BYTES:
                entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 134}
            entries.append(entry)
        return entries


class HubConnection(BaseHTTPRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        """Say what a file is."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer the three kinds of questions."""
        hub, path = self.hub, self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            hub.num_questions += 1
        if path.startswith("/api/models/") and hub.refusals:
            self._refuse(hub.refusals.pop(0))
        elif path.startswith(f"/api/models/{hub.model_id}/tree/"):
            self._send_json(hub.tree())
        elif match := re.fullmatch(rf"/api/models/{hub.model_id}/revision/(\w+)", path):
            self._describe(REVISIONS.get(match[1]))
        elif match := re.fullmatch(rf"/{hub.model_id}/resolve/({'|'.join(REVISIONS.values())})/([\w.]+)", path):
            if self.command == "GET" and hub.file_refusals:
                self._refuse(hub.file_refusals.pop(0))
            else:
                self._send_file(match[1], match[2])
        else:
            self._refuse(404)

    def _describe(self, commit: str | None) -> None:
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        names = [{"rfilename": name} for name in self.hub.files]
        self._send_json({"id": self.hub.model_id, "sha": commit, "siblings": names})

    def _refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, commit: str, name: str) -> None:
        hub, size = self.hub, self.hub.files[name].stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hub.fingerprint(name)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(size - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            hub.fetched.append((name, first))
            self._send_content(hub.files[name].read_bytes()[first:])

    def _send_content(self, content: bytes) -> None:
        hub, is_large = self.hub, len(content) >= LARGE_BYTES
        for begin in range(0, len(content), CHUNK_BYTES):
            if is_large and hub.cut_after_bytes is not None and begin >= hub.cut_after_bytes:
                hub.cut_after_bytes = None
                self.close_connection = True
                return
            if is_large and hub.hold_after_bytes is not None and begin >= hub.hold_after_bytes:
                hub.is_held.set()
                hub.is_closed.wait(60)
                self.close_connection = True
                return
            self.wfile.write(content[begin : begin + CHUNK_BYTES])


@contextmanager
def serving_hub(model_id: str, folder: Path) -> Iterator[Hub]:
    """A hub with one model for the time of a block."""
    hub = Hub(model_id, folder)
    connection = type("Connection", (HubConnection,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), connection) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.is_closed.set()
            server.shutdown()
