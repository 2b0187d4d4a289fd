"""A model hub on loopback: the calls of the hub's protocol that fetching a model needs, over the files of a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = {"main": COMMIT, "v2": "fedcba9876543210fedcba9876543210fedcba98"}
LARGE_BYTES = 10_000_000
CHUNK_BYTES = 1 << 20


class Hub:
    """One model: its files, and the first byte of every file that was asked for.

    Files of `large_bytes` and more are known by their sha256, as files in LFS are. One of them can be cut off
    (`cut_after_bytes`, once) or held back (`hold_after_bytes`) on its way. Each of the `refusals` is the status of one
    answer to a question about the model, with `refusal_code` as its reason; `num_questions` counts these questions.
    Each of `file_refusals` is the status of one answer to a question for a file. `served` replaces the content of a
    file that is sent, `claimed` the size that the list of files gives. With a `token` others are refused.
    """

    def __init__(self, model_id: str, folder: Path, large_bytes: int = LARGE_BYTES) -> None:
        self.model_id = model_id
        self.large_bytes = large_bytes
        self._fingerprints: dict[str, str] = {}
        self.files = {path.name: path for path in sorted(folder.iterdir())}
        self.revisions = dict(REVISIONS)
        self.cut_after_bytes: int | None = None
        self.hold_after_bytes: int | None = None
        self.is_held = threading.Event()
        self.is_closed = threading.Event()
        self.fetched: list[tuple[str, int]] = []
        self.sent_bytes = 0
        self.refusals: list[int] = []
        self.refusal_code = ""
        self.file_refusals: list[int] = []
        self.served: dict[str, bytes] = {}
        self.claimed: dict[str, int] = {}
        self.token: str | None = None
        self.num_questions = 0
        self.url = ""

    def is_large(self, name: str) -> bool:
        """Whether a file is kept in LFS."""
        return self.files[name].stat().st_size >= self.large_bytes

    def fingerprint(self, name: str) -> str:
        """What the hub knows a file by: sha256 for a large one, git's own hash otherwise."""
        if name not in self._fingerprints:
            content = self.files[name].read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
            self._fingerprints[name] = (hashlib.sha256(content) if self.is_large(name) else blob).hexdigest()
        return self._fingerprints[name]

    def tree(self) -> list[dict[str, Any]]:
        """The list of files, and a folder, which has further formats on the real hub."""
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "original", "oid": "0" * 40, "size": 0}]
        for name, path in self.files.items():
            size, oid = self.claimed.get(name, path.stat().st_size), self.fingerprint(name)
            entry = {"type": "file", "path": name, "size": size, "oid": oid}
            if self.is_large(name):
                entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 134}
            entries.append(entry)
        return entries


class HubConnection(BaseHTTPRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the test's output clean."""

    def handle(self) -> None:
        """Answer until the client leaves, politely or not."""
        with suppress(ConnectionError):
            super().handle()

    def do_HEAD(self) -> None:
        """Say what a file is."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer the three kinds of questions."""
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        commits = "|".join(hub.revisions.values())
        if path.startswith("/api/models/"):
            hub.num_questions += 1
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, hub.refusal_code)
        elif path.startswith("/api/models/") and hub.refusals:
            self._refuse(hub.refusals.pop(0), hub.refusal_code)
        elif re.fullmatch(rf"/api/models/{hub.model_id}/tree/({commits})", path):
            self._send_json(hub.tree())
        elif match := re.fullmatch(rf"/api/models/{hub.model_id}/revision/([\w./-]+)", path):
            self._describe(hub.revisions.get(match[1]))
        elif match := re.fullmatch(rf"/{hub.model_id}/resolve/({commits})/([\w.-]+)", path):
            if self.command == "GET" and hub.file_refusals:
                self._refuse(hub.file_refusals.pop(0))
            else:
                self._send_file(match[1], match[2])
        else:
            self._refuse(404, "RepoNotFound" if f"/{hub.model_id}/" not in path else "RevisionNotFound")

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
        hub = self.hub
        content = hub.served.get(name) or hub.files[name].read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = min(int(asked[2] or len(content)), len(content) - 1) if asked else len(content) - 1
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hub.fingerprint(name)}"')
        self.send_header("X-Repo-Commit", commit)
        if hub.is_large(name):
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-ETag", f'"{hub.fingerprint(name)}"')
        self.send_header("Content-Length", str(last + 1 - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            hub.fetched.append((name, first))
            self._send_content(content[first : last + 1], hub.is_large(name))

    def _send_content(self, content: bytes, is_large: bool) -> None:
        hub = self.hub
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
            hub.sent_bytes += len(content[begin : begin + CHUNK_BYTES])


@contextmanager
def serving_hub(model_id: str, folder: Path, large_bytes: int = LARGE_BYTES) -> Iterator[Hub]:
    """A hub with one model for the time of a block."""
    hub = Hub(model_id, folder, large_bytes)
    connection = type("Connection", (HubConnection,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), connection) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            hub.is_closed.set()
            server.shutdown()
