"""A server with keys: every route but health and readiness asks for one, and nothing of one key reaches another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from glint.server.app import GENERATING
from tests.e2e.raw_http import (
    connect,
    read_to_end,
    wait_for,
)
from tests.e2e.served import Served, served

FLAG_KEY, FILE_KEY, FIRST_KEY, SECOND_KEY = "flag-key", "file-key", "first-key", "second-key"
KEYS = (FLAG_KEY, FILE_KEY, FIRST_KEY, SECOND_KEY)
WATCHING = ("/v1/models", "/v1/models/any", "/metrics", "/stats", "/version", "/tokenizer_info", "/requests")


class Guarded:
    """A server whose every route needs a key, and a client without one."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def as_owner(self, key: str) -> dict[str, str]:
        """The header that carries a key."""
        return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with keys from a flag, a file and the environment."""
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "keys"
    file.write_text(f"{FILE_KEY}\n\n")
    file.chmod(0o600)
    flags = ("--api-key", FLAG_KEY, "--api-key-file", str(file))
    environment = {"GLINT_API_KEY": f"{FIRST_KEY}, {SECOND_KEY}"}
    with served(folder / "server.log", *flags, environment=environment) as running:
        made = Guarded(running)
        with made.client:
            yield made


def test_the_routes_are_those_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from glint.server import app as module
    from glint.server.auth import ApiKeys
    from glint.server.settings import ServerSettings

    made: list[Starlette] = []

    class Remembered(Starlette):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            made.append(self)

    monkeypatch.setattr(module, "Starlette", Remembered)
    state = SimpleNamespace(in_flight=None, responses=None)
    module.make_app(state, ServerSettings(Path("folder"), ("model",), ApiKeys([])))
    paths = {route.path for route in made[0].routes if isinstance(route, Route)}
    assert paths == {path for path, *_ in GENERATING} | {
        "/",
        "/v1/models",
        "/v1/models/{name:path}",
        "/metrics",
        "/stats",
        "/version",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/tokenizer_info",
        "/requests",
        "/requests/{request_id}",
    }


@pytest.mark.parametrize("path", [path for path, *_ in GENERATING])
def test_every_generating_route_needs_a_key(guarded: Guarded, path: str) -> None:
    for headers in ({}, guarded.as_owner("wrong"), {"x-api-key": "wrong"}, {"Authorization": f"Basic {FLAG_KEY}"}):
        answer = guarded.client.post(path, json={}, headers=headers)
        assert answer.status_code == 401 and "www-authenticate" in answer.headers
        assert answer.json()["error"]["type"] == "authentication_error"
    for key in KEYS:
        assert guarded.client.post(path, json={}, headers=guarded.as_owner(key)).status_code == 400
    assert guarded.client.post(path, json={}, headers={"x-api-key": FLAG_KEY}).status_code == 400


@pytest.mark.parametrize("path", [*WATCHING, "/", "/docs", "/openapi.json", "/health/", "//health", "/ready/x"])
def test_every_other_path_needs_a_key(guarded: Guarded, path: str) -> None:
    with connect(guarded.server) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert read_to_end(connection).startswith(b"HTTP/1.1 401 ")
    with connect(guarded.server) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-api-key: {FILE_KEY}\r\n\r\n"
        connection.sendall(head.encode())
        expected = b"200" if path in ("/", *WATCHING) and path != "/v1/models/any" else b"404"
        assert read_to_end(connection).split(b" ")[1] == expected


def test_health_and_readiness_are_open(guarded: Guarded) -> None:
    for path in ("/health", "/ready"):
        answer = guarded.client.get(path)
        shown = {"status", "phase", "seconds_since_last_step", "restarts"}
        assert answer.status_code == 200 and set(answer.json()) == shown


def test_a_request_without_a_key_has_its_line(guarded: Guarded) -> None:
    before = len(guarded.server.outcome_lines())
    guarded.client.post("/generate", json={"prompt": "x"})
    wait_for(lambda: len(guarded.server.outcome_lines()) > before, "the line of the refusal")
    (line,) = guarded.server.outcome_lines()[before:]
    assert (line["outcome"], line["reason"], line["status"]) == ("refused", "invalid_api_key", "401")


def test_keys_are_in_no_log(guarded: Guarded) -> None:
    guarded.client.post("/generate", json={"prompt": "x"}, headers=guarded.as_owner("guessed-key"))
    text = guarded.server.log.read_text()
    assert not any(key in text for key in (*KEYS, "guessed-key"))


def test_pages_are_not_shared_between_keys(guarded: Guarded) -> None:
    body = {"prompt": list(range(1000, 1100)), "max_tokens": 1, "temperature": 0}

    def cached(key: str) -> int:
        answer = guarded.client.post("/generate", json=body, headers=guarded.as_owner(key)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(FIRST_KEY) == 0
    assert cached(FIRST_KEY) > 64
    assert cached(SECOND_KEY) == 0
    assert cached(SECOND_KEY) == cached(FIRST_KEY) > 64


def test_metrics_can_be_opened(tmp_path: Path) -> None:
    flags = ("--api-key", FLAG_KEY, "--open-metrics", "--allowed-origins", "https://chat.internal")
    with served(tmp_path / "server.log", *flags) as server:
        assert httpx.get(f"{server.url}/metrics", timeout=30).text.count("glint:") > 20
        assert httpx.get(f"{server.url}/stats", timeout=30).status_code == 401
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, expected in (("https://chat.internal", "https://chat.internal"), ("https://other", None)):
            asked = httpx.options(
                f"{server.url}/v1/chat/completions", headers=preflight | {"Origin": origin}, timeout=30
            )
            assert asked.headers.get("access-control-allow-origin") == expected
            answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin}, timeout=30)
            assert answer.status_code == (403 if expected is None else 401)
            assert answer.headers.get("access-control-allow-origin") == expected
