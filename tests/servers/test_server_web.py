"""The pages of servers of their own: while the model loads, with keys, and turned off."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from tests.e2e.served import START_SECONDS, served, start
from tests.e2e.test_server_web import HTML


def first_page(url: str) -> httpx.Response:
    """The page as soon as anything listens."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return httpx.get(url, headers=HTML, timeout=30)
        except httpx.TransportError:
            assert time.monotonic() < deadline, "nothing listens"
            time.sleep(0.01)


def test_the_page_needs_no_key_and_is_there_while_the_model_loads(tmp_path: Path) -> None:
    server = start(tmp_path / "server.log", "--api-key", "secret", wait=False)
    try:
        page = first_page(server.url)
        assert httpx.get(server.url, timeout=30).status_code == 503
        assert httpx.get(f"{server.url}/v1/models", timeout=30).json()["error"]["code"] == "not_ready"
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        head = httpx.head(f"{server.url}/web/main.js", timeout=30)
        assert (head.status_code, head.content, int(head.headers["content-length"]) > 1000) == (200, b"", True)
        server.wait_ready()
        assert httpx.get(server.url, headers=HTML, timeout=30).content == page.content
        assert httpx.get(server.url, timeout=30).status_code == 401
        assert httpx.get(f"{server.url}/web/none.js", timeout=30).status_code == 401
    finally:
        server.stop()


def test_without_the_web_the_routes_are_alone(tmp_path: Path) -> None:
    with served(tmp_path / "server.log", "--no-web", "--no-restart") as server:
        about = httpx.get(server.url, headers=HTML, timeout=30)
        assert about.headers["content-type"] == "application/json" and "routes" in about.json()
        missing = httpx.get(f"{server.url}/web/base.css", timeout=30)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert "page: " not in server.log.read_text()
