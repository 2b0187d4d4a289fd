"""Several servers behind a real nginx: one that is loading or gone is passed over, one that broke off is not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse

from glint.server.process.lifecycle import Lifecycle, ReadinessGate
from tests.deploy.proxied import CONFIGURATION, NGINX, Proxied, proxied
from tests.e2e.served import free_port

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian: apt install nginx-light)")

NUM_REQUESTS = 6
SHIPPED_SERVER = "server 127.0.0.1:8000;"


class Listener:
    """A server that answers, or one that takes a request and breaks off; it keeps the bodies that reached it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bodies: list[bytes] = []


@contextmanager
def listening(*, breaks_off: bool = False) -> Iterator[Listener]:
    """A server of this kind for the time of a block."""

    class Connection(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            listener.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            if breaks_off:
                self.close_connection = True
            else:
                self._answer()

        def _answer(self) -> None:
            body = json.dumps({"answered_by": listener.port}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Connection) as server:
        listener = Listener(server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def loading() -> Iterator[tuple[int, Lifecycle]]:
    """The readiness gate of a real server whose model is being loaded: its port, and its life."""
    lifecycle, port = Lifecycle(60.0), free_port()
    config = uvicorn.Config(ReadinessGate(lifecycle), port=port, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield port, lifecycle
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def before_both(folder: Path, first: str, second: int) -> Iterator[Proxied]:
    """nginx with two servers, of which the first is asked first."""
    text = CONFIGURATION.read_text().replace(SHIPPED_SERVER, f"server 127.0.0.1:{first}; {SHIPPED_SERVER}")
    with proxied(folder, second, text) as proxy:
        yield proxy


def post_some(proxy: Proxied) -> list[httpx.Response]:
    """The answers to requests that follow each other, each with a body of its own."""
    with proxy.client() as client:
        return [client.post("/v1/completions", json={"prompt": str(number)}) for number in range(NUM_REQUESTS)]


def prompts(server: Listener) -> list[str]:
    """The prompts that reached a server."""
    return [json.loads(body)["prompt"] for body in server.bodies]


def test_the_share_of_a_loading_server_goes_to_one_that_is_ready(tmp_path: Path) -> None:
    with loading() as (port, _), listening() as ready:
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        with before_both(tmp_path / "proxy", f"{port}", ready.port) as proxy:
            answers = post_some(proxy)
        assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
        assert prompts(ready) == [str(number) for number in range(NUM_REQUESTS)]


def test_a_server_that_has_loaded_gets_its_share(tmp_path: Path) -> None:
    with (
        loading() as (port, lifecycle),
        listening() as ready,
        before_both(tmp_path / "proxy", f"{port} fail_timeout=1s", ready.port) as proxy,
    ):
        assert {answer.json()["answered_by"] for answer in post_some(proxy)} == {ready.port}
        lifecycle.app, lifecycle.phase = JSONResponse({"answered_by": port}), "ready"
        time.sleep(2.0)
        assert {answer.json()["answered_by"] for answer in post_some(proxy)} == {ready.port, port}


def test_the_share_of_a_server_that_is_gone_goes_to_one_that_is_ready(tmp_path: Path) -> None:
    with listening() as ready, before_both(tmp_path / "proxy", f"{free_port()}", ready.port) as proxy:
        assert [answer.status_code for answer in post_some(proxy)] == [200] * NUM_REQUESTS
        assert prompts(ready) == [str(number) for number in range(NUM_REQUESTS)]


def test_of_three_servers_the_one_that_is_ready_answers(tmp_path: Path) -> None:
    """One is gone and one is loading, in either order, and both are asked again and again."""
    with loading() as (busy, _), listening() as ready:
        for name, order in (("gone first", (free_port(), busy)), ("loading first", (busy, free_port()))):
            servers = "; server 127.0.0.1:".join(f"{port} max_fails=0" for port in order)
            with before_both(tmp_path / name.replace(" ", "-"), servers, ready.port) as proxy:
                assert [answer.status_code for answer in post_some(proxy)] == [200] * NUM_REQUESTS, name
        assert prompts(ready) == 2 * [str(number) for number in range(NUM_REQUESTS)]


def test_a_request_whose_server_broke_off_is_sent_to_no_other(tmp_path: Path) -> None:
    """A request may be what ended its server, so it must not reach the next one."""
    with listening(breaks_off=True) as broken, listening() as ready:
        with before_both(tmp_path / "proxy", f"{broken.port} max_fails=0", ready.port) as proxy:
            answers = post_some(proxy)
        assert broken.bodies and ready.bodies
        assert sorted(prompts(broken) + prompts(ready)) == [str(number) for number in range(NUM_REQUESTS)]
        lost = [answer for number, answer in enumerate(answers) if str(number) in prompts(broken)]
        assert {(one.status_code, one.headers["retry-after"], one.json()["error"]["code"]) for one in lost} == {
            (503, "5", "not_ready")
        }


def test_where_all_are_loading_clients_are_told_to_wait(tmp_path: Path) -> None:
    with (
        loading() as (first, _),
        loading() as (second, _),
        before_both(tmp_path / "proxy", f"{first}", second) as proxy,
    ):
        answers = post_some(proxy)
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"]["code"] for answer in answers} == {"not_ready"}
    assert {answer.headers["retry-after"] for answer in answers} <= {"1", "5"}
