"""Host and Origin: what browsers send of pages elsewhere is refused, what clients and proxies send is served."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Scope

from glint.errors import RequestError
from glint.server.auth import ApiKeys, allow_origins
from glint.server.http.connection import BoundedConnection
from glint.server.http.origin import (
    AllowedHosts,
    Host,
    SiteGuard,
    is_loopback,
    is_same_origin,
    parse_host,
    use_target_host,
)
from glint.server.http.problems import Problem
from glint.server.settings import ServerSettings
from tests.pure.asgi_client import call


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost", Host("localhost", None)),
        ("LocalHost:8000", Host("localhost", 8000)),
        ("localhost.", Host("localhost", None)),
        ("localhost.:80", Host("localhost", 80)),
        ("chat.internal:", Host("chat.internal", None)),
        ("chat_1.internal:65535", Host("chat_1.internal", 65535)),
        ("127.0.0.1:0", Host("127.0.0.1", 0)),
        ("[::1]", Host("::1", None)),
        ("[0:0:0:0:0:0:0:1]:8000", Host("::1", 8000)),
        ("[FD00::1]:80", Host("fd00::1", 80)),
        ("x" * 255, Host("x" * 255, None)),
        ("", None),
        (" localhost", None),
        ("localhost ", None),
        (".", None),
        (".localhost", None),
        ("localhost..", None),
        ("a..b", None),
        (":80", None),
        ("localhost:65536", None),
        ("localhost:-1", None),
        ("localhost:+80", None),
        ("localhost:8\u0663", None),
        ("localhost:80:80", None),
        ("::1", None),
        ("[::1", None),
        ("[::1]x", None),
        ("[::1%25eth0]", None),
        ("[localhost]", None),
        ("[1.2.3.4]", None),
        ("user@localhost", None),
        ("localhost/", None),
        ("localhost#", None),
        ("localhost,evil.test", None),
        ("localhost\tx", None),
        ("localhost\n", None),
        ("local%68ost", None),
        ("l\u00f6calhost", None),
        ("\u2100.internal", None),
        ("x" * 256, None),
    ],
)
def test_hosts_are_read_strictly(text: str, host: Host | None) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("localhost", True),
        ("a.b.localhost", True),
        ("127.0.0.1", True),
        ("127.255.255.254", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("xlocalhost", False),
        ("localhost.evil.test", False),
        ("127.0.0.1.evil.test", False),
        ("128.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("::2", False),
        ("127.1", False),
        ("2130706433", False),
        ("", False),
    ],
)
def test_names_of_the_machine_itself(name: str, is_own: bool) -> None:
    assert is_loopback(name) == is_own


@pytest.mark.parametrize(
    "bind", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST", "0.0.0.0", "::", "10.0.0.7"]
)
@pytest.mark.parametrize("given", [(), ("chat.internal",), ("*.internal", "[fd00::1]"), ("*",), ("chat.internal", "*")])
def test_which_names_are_answered(bind: str, given: tuple[str, ...]) -> None:
    hosts = AllowedHosts(bind, given)
    takes_all = "*" in given or (not given and bind in ("0.0.0.0", "::", "10.0.0.7"))
    expected = {
        "localhost": True,
        "127.0.0.1": True,
        "::1": True,
        "chat.internal": takes_all or bool(given),
        "a.chat.internal": takes_all or "*.internal" in given,
        "internal": takes_all,
        "evilinternal": takes_all,
        "chat.internal.evil.test": takes_all,
        "fd00::1": takes_all or "[fd00::1]" in given,
        "10.0.0.7": takes_all,
    }
    assert {name: hosts.allows(name) for name in expected} == expected


@pytest.mark.parametrize("pattern", ["*", "chat.internal", "*.internal", "*.a.internal"])
@given(labels=st.lists(st.sampled_from(["chat", "a", "internal", "evil", "x-internal"]), min_size=1, max_size=4))
def test_patterns_are_those_of_starlette(pattern: str, labels: list[str]) -> None:
    name = ".".join(labels)
    peer = Starlette(routes=[Route("/", lambda request: JSONResponse({}))])
    answer = call(TrustedHostMiddleware(peer, [pattern], www_redirect=False), host=name)
    assert AllowedHosts("127.0.0.1", (pattern,)).allows(name) == (answer.status_code == 200)


@pytest.mark.parametrize(
    "name",
    ["", "http://chat.internal", "chat.internal:443", "chat.internal/", "*internal", "a.*.b", "**", "fd00::1", "a b"],
)
def test_names_that_can_never_match_are_refused_at_start(name: str) -> None:
    with pytest.raises(RequestError, match="--allowed-hosts"):
        settings(hosts=("good.internal", name))


def settings(**named: Any) -> ServerSettings:
    return ServerSettings(Path("folder"), ("model",), named.pop("keys", ApiKeys([])), **named)


def test_origins_that_can_never_match_are_refused_at_start() -> None:
    with pytest.raises(RequestError, match=r"origin 'a\.test'"):
        settings(origins=("a.test",))


@pytest.mark.parametrize(
    ("named", "count", "names_hosts"),
    [
        ({}, 0, False),
        ({"host": "127.3.2.1"}, 0, False),
        ({"host": "0.0.0.0"}, 1, True),
        ({"host": "0.0.0.0", "hosts": ("chat.internal",)}, 1, False),
        ({"host": "0.0.0.0", "keys": ApiKeys(["key"])}, 0, False),
    ],
)
def test_an_open_server_is_warned_of_once(named: dict[str, Any], count: int, names_hosts: bool) -> None:
    warnings = settings(**named).warnings
    assert len(warnings) == count
    assert ("--allowed-hosts" in "".join(warnings)) == names_hosts
    assert all("0.0.0.0 without an API key" in text and "--api-key-file" in text for text in warnings)


@pytest.mark.parametrize(
    ("named", "access"),
    [
        ({}, "local"),
        ({"host": "localhost"}, "local"),
        ({"hosts": ("chat.internal",)}, "closed"),
        ({"host": "0.0.0.0"}, "closed"),
        ({"uds": Path("glint.sock")}, "closed"),
        ({"keys": ApiKeys([], admin_keys=["admin"])}, "admin"),
        ({"host": "0.0.0.0", "keys": ApiKeys([], admin_keys=["admin"])}, "admin"),
        ({"keys": ApiKeys(["key"])}, "keys"),
        ({"host": "0.0.0.0", "keys": ApiKeys(["key"], admin_keys=["admin"])}, "keys"),
    ],
)
def test_requests_are_open_only_where_nobody_else_reaches_them(named: dict[str, Any], access: str) -> None:
    assert settings(**named).admin_access == access


def test_an_admin_key_does_not_close_a_server() -> None:
    assert len(settings(host="0.0.0.0", keys=ApiKeys([], admin_keys=["admin"])).warnings) == 1


@pytest.mark.parametrize(
    ("origin", "host", "is_same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("https://chat.internal", "chat.internal", True),
        ("https://chat.internal", "chat.internal:443", True),
        ("https://chat.internal:443", "chat.internal", True),
        ("http://chat.internal", "chat.internal:80", True),
        ("HTTPS://CHAT.internal", "chat.INTERNAL", True),
        ("http://[::1]:8000", "[0::1]:8000", True),
        ("https://chat.internal:8443", "chat.internal:8443", True),
        ("https://chat.internal", "chat.internal:80", False),
        ("http://chat.internal", "chat.internal:443", False),
        ("http://localhost", "localhost:8000", False),
        ("http://localhost:8000", "localhost", False),
        ("http://localhost:8000", "127.0.0.1:8000", False),
        ("http://evil.test", "chat.internal", False),
        ("http://chat.internal.evil.test", "chat.internal", False),
        ("http://chat.internal@evil.test", "chat.internal", False),
        ("http://chat.internal/", "chat.internal", False),
        ("null", "null", False),
        ("", "chat.internal", False),
        ("chat.internal", "chat.internal", False),
        ("file://chat.internal", "chat.internal", False),
        ("chrome-extension://chat.internal", "chat.internal", False),
        ("http://chat.internal http://evil.test", "chat.internal", False),
    ],
)
def test_same_origin(origin: str, host: str, is_same: bool) -> None:
    named = parse_host(host)
    assert named is not None and is_same_origin(origin, named) == is_same


async def reached(request: Request) -> JSONResponse:
    return JSONResponse({"reached": True})


APP = Starlette(routes=[Route("/v1/models", reached, methods=["GET", "POST"])])


def guard(*origins: str, bind: str = "127.0.0.1", hosts: tuple[str, ...] = ("chat.internal",)) -> SiteGuard:
    return SiteGuard(allow_origins(APP, origins), AllowedHosts(bind, hosts), origins)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [
        ((), None, 200),
        ((), "https://chat.internal", 200),
        ((), "https://page.test", 403),
        ((), "null", 403),
        ((), "", 403),
        (("https://page.test",), "https://page.test", 200),
        (("https://page.test",), "https://page.test:8443", 403),
        (("https://page.test",), "http://page.test", 403),
        (("https://page.test",), "https://chat.internal", 200),
        (("https://page.test",), "null", 403),
        (("*",), "https://page.test", 200),
        (("*",), "null", 200),
    ],
)
def test_which_pages_may_call(method: str, allowed: tuple[str, ...], origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    answer = call(guard(*allowed), "/v1/models", method, host="chat.internal", **headers)
    assert answer.status_code == (405 if method == "OPTIONS" and status == 200 else status)
    if status == 403 and method != "HEAD":
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "origin_not_allowed")
        named = origin if origin and "://" in origin else "'*'"
        assert f"--allowed-origins {named}" in error["message"]


def test_a_preflight_of_an_allowed_page_is_answered() -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    app = guard("https://page.test")
    answer = call(app, "/v1/models", "OPTIONS", host="chat.internal", origin="https://page.test", **asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.test")
    assert call(app, "/v1/models", "OPTIONS", host="evil.test", origin="https://page.test", **asked).status_code == 403
    assert call(app, "/v1/models", "OPTIONS", host="chat.internal", origin="https://b.test", **asked).status_code == 403


def status_of(headers: list[tuple[bytes, bytes]], version: str = "1.1") -> tuple[int, str | None, list[str]]:
    """Status, error code and the codes that were told of a request with these headers; its body is never asked for."""
    told: list[str] = []
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body is read")

    async def send(message: Message) -> None:
        sent.append(message)

    def on_refusal(scope: Scope, problem: Problem) -> None:
        told.append(problem.code)

    app = SiteGuard(APP, AllowedHosts("127.0.0.1"), (), on_refusal)
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "root_path": ""}
    asyncio.run(app(scope | {"headers": headers, "http_version": version}, receive, send))
    body = json.loads(sent[1]["body"])
    return sent[0]["status"], body.get("error", {}).get("code"), told


HOST, ORIGIN = (b"host", b"localhost"), (b"origin", b"http://localhost")


@pytest.mark.parametrize(
    ("headers", "version", "status", "code"),
    [
        ([HOST], "1.1", 200, None),
        ([HOST, ORIGIN], "1.1", 200, None),
        ([], "1.1", 400, "invalid_host"),
        ([], "2", 400, "invalid_host"),
        ([], "1.0", 200, None),
        ([ORIGIN], "1.0", 403, "origin_not_allowed"),
        ([HOST, HOST], "1.1", 400, "invalid_host"),
        ([HOST, HOST], "1.0", 400, "invalid_host"),
        ([(b"host", b"")], "1.1", 400, "invalid_host"),
        ([(b"host", b"")], "1.0", 400, "invalid_host"),
        ([(b"host", b"\xff")], "1.1", 400, "invalid_host"),
        ([(b"host", b"evil.test")], "1.0", 403, "host_not_allowed"),
        ([HOST, ORIGIN, ORIGIN], "1.1", 403, "origin_not_allowed"),
        ([HOST, (b"origin", b"\xff")], "1.1", 403, "origin_not_allowed"),
    ],
)
def test_odd_headers(headers: list[tuple[bytes, bytes]], version: str, status: int, code: str | None) -> None:
    assert status_of(headers, version) == (status, code, [] if code is None else [code])


@pytest.mark.parametrize(
    ("target", "authority"),
    [
        (b"http://evil.test/v1/models", b"evil.test"),
        (b"HTTPS://evil.test:8000?x=/", b"evil.test:8000"),
        (b"http://user@evil.test/", b"user@evil.test"),
        (b"http:///v1/models", b""),
        (b"/v1/models", b"localhost"),
        (b"/http://evil.test/", b"localhost"),
        (b"//evil.test/v1/models", b"localhost"),
        (b"*", b"localhost"),
        (b"evil.test:443", b"localhost"),
    ],
)
def test_a_whole_address_in_the_request_line_is_the_host(target: bytes, authority: bytes) -> None:
    headers = [(b"accept", b"*/*"), (b"host", b"localhost")]
    use_target_host(target, headers)
    assert headers == [(b"accept", b"*/*"), (b"host", authority)]


def test_over_a_socket_the_host_of_a_whole_address_is_judged() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    app = SiteGuard(APP, AllowedHosts("127.0.0.1"))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, ws="none", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        for target, host, status in [
            ("/v1/models", "localhost", b"200"),
            ("/v1/models", "evil.test", b"403"),
            ("http://localhost/v1/models", "evil.test", b"200"),
            ("http://evil.test/v1/models", "localhost", b"403"),
        ]:
            with socket.create_connection(listener.getsockname(), timeout=10) as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                assert connection.recv(1000).split()[1] == status, target
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_other_connections_pass() -> None:
    passed: list[str] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def nothing(*arguments: Any) -> Any:
        return None

    for kind in ("lifespan", "websocket"):
        asyncio.run(SiteGuard(app, AllowedHosts("127.0.0.1"))({"type": kind}, nothing, nothing))
    assert passed == ["lifespan", "websocket"]
