"""A server that speaks TLS, through a restart of its engine, and one on a Unix socket: by httpx, openai and curl."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai

from tests.e2e.served import START_SECONDS, Served, start
from tests.servers.test_tls_files import make_certificate

BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def wait_for(server: Served, is_so: Callable[[], bool]) -> None:
    """Wait until something holds that the server must come to."""
    deadline = time.monotonic() + START_SECONDS
    while not is_so():
        assert server.process.poll() is None and time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)


def status(client: httpx.Client) -> int | None:
    """The status of /ready; None while nothing listens."""
    try:
        return client.get("/ready").status_code
    except httpx.ConnectError:
        return None


def test_tls_holds_through_a_restart(tmp_path: Path, sample_model: Path) -> None:
    files = make_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=str(files.certfile))
    flags = ("--ssl-certfile", str(files.certfile), "--ssl-keyfile", str(files.keyfile), "--model", str(sample_model))
    server = start(tmp_path / "log", *flags, wait=False)
    url = f"https://127.0.0.1:{server.port}"
    try:
        with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:
            wait_for(server, lambda: status(client) == 200)
            before = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
            too_large = client.post("/v1/completions", content=b" " * 5_000_000)
            assert too_large.status_code in (400, 413, 415)
            os.kill(server.engine_pid(), signal.SIGKILL)
            wait_for(server, lambda: status(client) == 503)
            wait_for(server, lambda: status(client) == 200)
            made = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=httpx.Client(verify=trusted))
            pieces = made.completions.create(model=sample_model.name, stream=True, **BODY)
            assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == before
        assert f"on https://127.0.0.1:{server.port}" in server.log.read_text()
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_a_unix_socket_serves_any_host_and_no_foreign_page(tmp_path: Path, sample_model: Path) -> None:
    path = tmp_path / "socket"
    server = start(tmp_path / "log", "--uds", str(path), "--model", str(sample_model), wait=False)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://model", timeout=60) as client:
            wait_for(server, lambda: path.exists() and status(client) == 200)
            assert client.post("/v1/completions", json=BODY).status_code == 200
            foreign = client.post("/v1/completions", json=BODY, headers={"Origin": "http://elsewhere"})
            assert foreign.status_code == 403
        curl = ["curl", "-sf", "--unix-socket", str(path), "http://localhost/v1/models"]
        assert sample_model.name in subprocess.run(curl, check=True, capture_output=True, text=True).stdout
        assert server.stop() == 0
        assert not path.exists()
    finally:
        server.process.kill()
