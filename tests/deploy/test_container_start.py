"""What a container runs, run here as a process: its command, its health check, its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.deploy.command_lines import DEPLOY
from tests.deploy.dockerfile import Instruction, read_stages
from tests.e2e.served import free_port, start

CPU = read_stages((DEPLOY / "Dockerfile").read_text())["cpu"]


def check(path: str, port: int) -> subprocess.CompletedProcess[str]:
    """Run the health check of the images against a port of this machine, with a proxy in the environment."""
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), path, str(port)]
    environment = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that gives every GET the same status; gives its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1), (204, 1)])
def test_the_health_check_is_good_for_200_alone(status: int, code: int) -> None:
    with answering(status) as port:
        ended = check("/health", port)
    assert ended.returncode == code, ended.stderr
    assert str(status) in ended.stdout


def test_the_health_check_fails_where_nobody_listens() -> None:
    ended = check("/health", free_port())
    assert ended.returncode == 1 and "no answer" in ended.stderr and "Traceback" not in ended.stderr


def test_the_command_of_the_image_serves_is_healthy_and_ends(tmp_path: Path) -> None:
    words = list(CPU.last("CMD").words)
    assert words.pop(0) == "serve"
    port_at = words.index("--port")
    del words[port_at : port_at + 2]
    words[words.index("--host") + 1] = "127.0.0.1"
    asked = Instruction("CMD", CPU.last("HEALTHCHECK").text.partition("CMD ")[2]).words[-1]
    server = start(tmp_path / "server.log", *words)
    try:
        for path in (asked, "/ready"):
            assert check(path, server.port).returncode == 0
        assert check("/nothing-here", server.port).returncode == 1
        assert server.stop() == 0
        assert check(asked, server.port).returncode == 1
    finally:
        server.process.kill()
        server.process.wait()
