"""API keys guard every route but the open ones, through real ASGI calls."""

import asyncio
import hmac
import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glint.engine.share import Share
from glint.errors import RequestError
from glint.server import auth
from glint.server.auth import ApiKeys, Authentication, Tenant, allow_origins, tenant_of
from glint.server.http.problems import Problem
from tests.pure.asgi_client import call

KEYS = ("sk-first", "sk-second!")


async def echo(request: Request) -> JSONResponse:
    tenant = request.scope.get(auth.TENANT)
    return JSONResponse({"path": request.url.path, "salt": None if tenant is None else tenant.cache_salt})


PATHS = ["/health", "/ready", "/metrics", "/stats", "/v1/models", "/v1/chat/completions", "/v1/messages"]
APP = Starlette(routes=[Route(path, echo, methods=["GET", "POST"]) for path in PATHS])


@pytest.fixture(scope="module")
def guarded() -> Authentication:
    return Authentication(APP, ApiKeys(KEYS))


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ("/health", "/ready")] + ["/", "/nothing"])
def test_every_route_needs_a_key(guarded: Authentication, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
        assert call(guarded, path, method).status_code == 401
    for headers in (
        {"authorization": "Bearer sk-first"},
        {"x_api_key": "sk-second!"},
        {"authorization": "bEARER sk-first"},
    ):
        assert call(guarded, path, **headers).status_code in (200, 404)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_none(guarded: Authentication, path: str) -> None:
    assert call(guarded, path).json() == {"path": path, "salt": None}


@pytest.mark.parametrize(
    "path",
    [
        "//health",
        "/health/",
        "/HEALTH",
        "/health%2f..",
        "/health;x",
        "/health%00",
        "/health%20",
        "/ready/health",
        "/v1/models?x=/health",
        "/health/v1/models",
        "/health%2Fv1",
        "/h%25ealth",
        "/health.json",
    ],
)
def test_paths_that_only_look_open_are_guarded(guarded: Authentication, path: str) -> None:
    assert call(guarded, path).status_code == 401


@given(st.text(alphabet="/healtHRready.%;?2f\\ \x00", max_size=12))
def test_a_path_is_open_only_when_it_is_equal(path: str) -> None:
    scope: Scope = {"type": "http", "path": path, "raw_path": b"/health", "root_path": "", "headers": []}
    statuses = asyncio.run(statuses_of(Authentication(reached, ApiKeys(KEYS)), scope))
    assert statuses == ([200] if path in ("/health", "/ready") else [401])


async def reached(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def statuses_of(app: ASGIApp, scope: Scope) -> list[int]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return [message.get("status", message.get("code")) for message in sent if message["type"] != "http.response.body"]


@pytest.mark.parametrize("root", ["/health", "/x", "/v1"])
def test_a_root_path_opens_nothing(guarded: Authentication, root: str) -> None:
    scope = {"type": "http", "method": "GET", "path": "/health", "root_path": root, "headers": [], "query_string": b""}
    assert asyncio.run(statuses_of(guarded, scope)) == [401]


def test_a_host_header_opens_nothing(guarded: Authentication) -> None:
    assert call(guarded, "/v1/models", host="server/health?").status_code == 401
    assert call(guarded, "/v1/models", x_forwarded_prefix="/health", x_original_url="/health").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "sk-first"},
        {"authorization": "Basic sk-first"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearersk-first"},
        {"authorization": "Bearer sk-firs"},
        {"authorization": "Bearer sk-firstx"},
        {"authorization": "Bearer SK-FIRST"},
        {"authorization": "Bearer sk-first,sk-second!"},
        {"x_api_key": "Bearer sk-first"},
        {"x_api_key": ""},
        {"x_api_key": "x" * 5000},
        {"authorization": "Bearer wrong", "x_api_key": "wrong"},
    ],
)
def test_wrong_keys(guarded: Authentication, headers: dict[str, str]) -> None:
    assert call(guarded, "/v1/models", **headers).status_code == 401


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_a_header_given_twice_is_refused(guarded: Authentication, name: bytes) -> None:
    value = b"Bearer sk-first" if name == b"authorization" else b"sk-first"
    base = {"type": "http", "method": "GET", "path": "/v1/models", "root_path": "", "query_string": b""}
    assert asyncio.run(statuses_of(guarded, {**base, "headers": [(name, value)]})) == [200]
    assert asyncio.run(statuses_of(guarded, {**base, "headers": [(name, value), (name, value)]})) == [401]


def test_one_right_key_of_two_headers_is_enough(guarded: Authentication) -> None:
    assert call(guarded, "/v1/models", authorization="Bearer wrong", x_api_key="sk-first").status_code == 200
    assert call(guarded, "/v1/models", authorization="Bearer sk-first", x_api_key="wrong").status_code == 200


def test_the_refusal_takes_the_form_of_the_route(guarded: Authentication) -> None:
    answer = call(guarded, "/v1/chat/completions", "POST")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    other = call(guarded, "/v1/messages", "POST").json()
    assert (other["type"], other["error"]["type"]) == ("error", "authentication_error")
    assert "sk-" not in json.dumps([answer.json(), other])


def test_metrics_can_be_opened() -> None:
    app = Authentication(APP, ApiKeys(KEYS), guards_metrics=False)
    assert call(app, "/metrics").status_code == 200
    assert call(app, "/metrics/").status_code == call(app, "/stats").status_code == 401


def test_refusals_are_told() -> None:
    refusals: list[tuple[str, int]] = []

    def on_refusal(scope: Scope, problem: Problem) -> None:
        refusals.append((scope["path"], problem.status))

    app = Authentication(APP, ApiKeys(KEYS), on_refusal=on_refusal)
    call(app, "/v1/models")
    call(app, "/v1/models", x_api_key="sk-first")
    assert refusals == [("/v1/models", 401)]


def test_tenants_have_salts_of_their_own() -> None:
    app = Authentication(APP, ApiKeys(KEYS))
    answers = [call(app, "/v1/models", x_api_key=key) for key in (*KEYS, "sk-first")]
    first, second, again = (answer.json()["salt"] for answer in answers)
    assert first == again != second
    assert all(0 < salt < 2**63 for salt in (first, second))
    other_process = call(Authentication(APP, ApiKeys(KEYS)), "/v1/models", x_api_key="sk-first").json()["salt"]
    assert other_process != first
    assert tenant_of({auth.TENANT: Tenant(5)}).cache_salt == 5
    with pytest.raises(KeyError):
        tenant_of({})


def test_an_admin_key_is_valid_and_known_as_such() -> None:
    keys = ApiKeys.load(["key"], None, {"GLINT_ADMIN_API_KEY": "from-variable"}, ["from-flag", "from-flag"])
    found = [keys.find(key) for key in (b"key", b"from-variable", b"from-flag")]
    assert [tenant is not None and tenant.is_admin for tenant in found] == [False, True, True]
    assert keys.has_admin and len(keys) == 1
    assert len(ApiKeys([], admin_keys=["admin"])) == 0 and not ApiKeys(["key"]).has_admin
    app = Authentication(APP, ApiKeys([], admin_keys=["admin"]))
    assert call(app, "/v1/models").json()["salt"] == 0
    assert call(app, "/v1/models", x_api_key="admin").json()["salt"] > 0
    for flags, variable in (([""], "x"), (["good"], "x,"), (["same"], "x")):
        with pytest.raises(RequestError, match="--admin-api-key"):
            ApiKeys.load(["same"], None, {"GLINT_ADMIN_API_KEY": variable}, flags)


def test_without_keys_everybody_is_one_tenant() -> None:
    app = Authentication(APP, ApiKeys([]))
    assert call(app, "/v1/models").json()["salt"] == 0
    assert call(app, "/v1/models", authorization="Bearer whatever").json()["salt"] == 0


@pytest.mark.parametrize("keys", [(), KEYS])
def test_websockets_and_unknown_connections_are_refused(keys: tuple[str, ...]) -> None:
    app = Authentication(reached, ApiKeys(keys))
    headers = [(b"x-api-key", b"sk-first")]
    assert asyncio.run(statuses_of(app, {"type": "websocket", "path": "/health", "headers": headers})) == [1008]
    with pytest.raises(RequestError, match="'telnet'"):
        asyncio.run(statuses_of(app, {"type": "telnet", "path": "/health", "headers": headers}))
    assert asyncio.run(statuses_of(app, {"type": "lifespan"})) == [200]


def test_every_key_is_compared_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(["a", "b", "c"])
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(left: Any, right: Any) -> bool:
        compared.append((len(left), len(right)))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token in (b"a", b"b", b"c", b"x", b"y" * 4000):
        compared.clear()
        assert (keys.find(token) is None) == (token[:1] in (b"x", b"y"))
        assert compared == [(32, 32)] * 3


def test_keys_come_from_flags_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("file-one\n\n  file,two \r\n\n")
    file.chmod(0o600)
    keys = ApiKeys.load(["flag", "flag"], file, {"GLINT_API_KEY": "env-one, env-two", "OTHER": "x"})
    assert len(keys) == 5 and keys.warnings == ()
    for key in (b"flag", b"file-one", b"file,two", b"env-one", b"env-two"):
        assert keys.find(key) is not None
    assert keys.find(b"") is None and keys.find(b"file") is None
    assert len(ApiKeys.load([], None, {})) == 0


def test_a_weight_may_stand_behind_a_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("plain\nheavy   weight=3 \r\nweight=7\na=b=weight=2\tweight=100\n")
    keys = ApiKeys.load(["plain", "flag"], file, {"GLINT_API_KEY": "heavy"})
    tenants = [keys.find(key) for key in (b"plain", b"heavy", b"weight=7", b"a=b=weight=2", b"flag")]
    assert [tenant.weight for tenant in tenants if tenant is not None] == [1, 3, 1, 100, 1]
    assert len({tenant.share().key for tenant in tenants if tenant is not None}) == 5
    assert tenants[1] is not None and tenants[1].share(-2) == Share(tenants[1].cache_salt, 3, -2)


@pytest.mark.parametrize("behind", ["weight=0", "weight=101", "weight=", "weight=-1", "weight=1 weight=1", "word", "3"])
def test_what_is_no_weight_is_refused_without_showing_the_key(tmp_path: Path, behind: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\n\nsecret {behind}\n")
    with pytest.raises(RequestError) as caught:
        ApiKeys.load([], file, {})
    message = str(caught.value)
    assert f"line 3 of the key file {file}" in message and "KEY weight=N with N from 1 to 100" in message
    assert "secret" not in message and "word" not in message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    file.chmod(mode)
    [warning] = ApiKeys.load([], file, {}).warnings
    assert "chmod 600" in warning and str(file) in warning and "secret" not in warning


@pytest.mark.parametrize("key", ["", "q w", "q\tw", "q\x00", "q\x7f", "\u00e9", "q\n", " q", "x" * 4097])
def test_bad_keys_are_refused_without_showing_them(key: str) -> None:
    with pytest.raises(RequestError) as caught:
        ApiKeys(["good", key])
    assert not key or key not in str(caught.value)


def test_a_key_may_have_4096_characters_and_no_more() -> None:
    longest = "x" * 4096
    app = Authentication(APP, ApiKeys([longest]))
    for headers in ({"x_api_key": longest}, {"authorization": f"Bearer {longest}"}):
        assert call(app, "/v1/models", **headers).status_code == 200
        assert call(app, "/v1/models", **{name: value + "x" for name, value in headers.items()}).status_code == 401
    with pytest.raises(RequestError, match="4097 characters; use at most 4096"):
        ApiKeys([longest + "x"])


def test_a_token_longer_than_any_key_is_never_hashed() -> None:
    hashed: list[int] = []

    class CountedKeys(ApiKeys):
        def find(self, token: bytes) -> Tenant | None:
            hashed.append(len(token))
            return super().find(token)

    app = Authentication(APP, CountedKeys(KEYS))
    for length in (0, 1, 4096, 4097, 100_000):
        assert call(app, "/v1/models", x_api_key="x" * length).status_code == 401
    assert hashed == [1, 4096]


@pytest.mark.parametrize(("digest", "salt"), [(0, 1), (1, 2), (2**63 - 2, 2**63 - 1), (2**63 - 1, 1), (2**128 - 1, 4)])
def test_salts_go_from_1_to_below_their_limit(monkeypatch: pytest.MonkeyPatch, digest: int, salt: int) -> None:
    monkeypatch.setattr(hmac, "digest", lambda *arguments: digest.to_bytes(16) + b"\xff" * 16)
    tenant = ApiKeys(["key"]).find(b"key")
    assert tenant is not None and tenant.cache_salt == salt


@pytest.mark.parametrize("value", ["", ",", "a,", "a,,b", " "])
def test_an_empty_key_in_the_environment_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="empty"):
        ApiKeys.load([], None, {"GLINT_API_KEY": value})


def test_key_files_that_hold_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(RequestError, match=name):
            ApiKeys.load([], tmp_path / name, {})


def preflight(app: ASGIApp, origin: str, path: str = "/v1/models") -> httpx.Response:
    return call(
        app,
        path,
        "OPTIONS",
        origin=origin,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )


def test_other_origins_are_off_unless_asked(guarded: Authentication) -> None:
    assert allow_origins(guarded, []) is guarded
    assert preflight(guarded, "https://a.test").status_code == 401
    answer = call(guarded, "/v1/models", origin="https://a.test", x_api_key="sk-first")
    assert "access-control-allow-origin" not in answer.headers


def test_origins_that_were_asked_for(guarded: Authentication) -> None:
    app = allow_origins(guarded, ["https://a.test"])
    answer = preflight(app, "https://a.test")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.test"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert preflight(app, "https://b.test").status_code == 400
    assert call(app, "/v1/models", origin="https://a.test").status_code == 401
    answer = call(app, "/v1/models", origin="https://a.test", x_api_key="sk-first")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.test"
    answer = call(app, "/v1/models", origin="https://b.test", x_api_key="sk-first")
    assert "access-control-allow-origin" not in answer.headers
    assert call(app, "/v1/models", "OPTIONS", origin="https://a.test").status_code == 401


@pytest.mark.parametrize(
    "origin", ["a.test", "https://a.test/", "https://a.test/x", "null", "", "ftp://a", "https://*.test"]
)
def test_origins_that_can_never_match_are_refused(guarded: Authentication, origin: str) -> None:
    with pytest.raises(RequestError, match="origin"):
        allow_origins(guarded, [origin])


def test_over_a_socket_encoded_paths_open_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    listener = socket.create_server(("127.0.0.1", 0))
    app = Authentication(APP, ApiKeys(KEYS))
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        for target, status in [
            ("/health", b"200"),
            ("/%68ealth", b"200"),
            ("//health", b"401"),
            ("/./health", b"401"),
            ("/x/../health", b"401"),
            ("/health%2f", b"401"),
            ("/health%2f..%2fv1/models", b"401"),
            ("/health/../v1/models", b"401"),
            ("http://x/health/../v1/models", b"401"),
            ("/v1/models?/health", b"401"),
        ]:
            with socket.create_connection(listener.getsockname(), timeout=10) as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\nHost: /health\r\nConnection: close\r\n\r\n".encode())
                assert connection.recv(1000).split()[1] == status, target
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_salts_of_requests_differ_between_tenants_and_from_theirs() -> None:
    tenants = [Tenant(0), Tenant(1), Tenant(11)]
    salts = [tenant.salt_of(salt) for tenant in tenants for salt in (None, "", "1 1", "1", "\ud800")]
    assert len(set(salts)) == len(salts) and all(0 <= salt < 2**63 for salt in salts)
    assert [tenant.salt_of(None) for tenant in tenants] == [0, 1, 11]
    assert tenants[1].salt_of("x") == tenants[1].salt_of("x")
    assert tenants[0].share() == Tenant(0).share()
