"""What stands between a page of another site and the model: Content-Type, Host and Origin, over raw sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.raw_http import connect, outcomes_since, read_to_end
from tests.e2e.served import Served

BODY = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
JSON = "Content-Type: application/json"
BLOB_OF_A_PAGE = (
    'sec-ch-ua-platform: "Linux"',
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36",
    'sec-ch-ua: "Chromium";v="142", "Not_A Brand";v="99"',
    "sec-ch-ua-mobile: ?0",
    "Accept: */*",
    "Sec-Fetch-Site: cross-site",
    "Sec-Fetch-Mode: no-cors",
    "Sec-Fetch-Dest: empty",
    "Accept-Encoding: gzip, deflate, br, zstd",
    "Accept-Language: en-GB,en;q=0.9",
)


def ask(server: Served, start: str, *lines: str, body: bytes = b"") -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of one answer; `{port}` in a line is the server's."""
    length = [f"Content-Length: {len(body)}"] if body else []
    head = "".join(f"{line}\r\n" for line in (start, *lines, *length, "Connection: close"))
    with connect(server) as connection:
        connection.sendall(head.replace("{port}", str(server.port)).encode("latin-1") + b"\r\n" + body)
        answer = read_to_end(connection)
    first, _, rest = answer.partition(b"\r\n\r\n")
    status, *fields = first.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
    return int(status.split()[1]), headers, json.loads(rest) if rest.startswith(b"{") else rest


def post(server: Served, *lines: str, path: str = "/generate") -> tuple[int, dict[str, str], Any]:
    return ask(server, f"POST {path} HTTP/1.1", *lines, body=BODY)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 415),
        ("", 415),
        ("text/plain", 415),
        ("text/plain;charset=UTF-8", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
    ],
)
def test_a_body_says_that_it_is_json(server: Served, kind: str | None, status: int) -> None:
    lines = [] if kind is None else [f"Content-Type: {kind}"]
    got, _, answer = post(server, "Host: localhost:{port}", *lines)
    assert got == status
    if status == 415:
        assert answer["error"]["code"] == "unsupported_content_type"
        assert "-H 'Content-Type: application/json'" in answer["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:{port}", "localhost.", "a.localhost:1", "127.0.0.1:{port}", "127.9.8.7", "[::1]:80"],
)
def test_names_of_this_machine_are_served(server: Served, host: str) -> None:
    assert post(server, f"Host: {host}", JSON)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:{port}", "localhost.evil.test", "127.0.0.1.evil.test", "10.0.0.1"]
)
def test_a_name_that_was_led_here_is_refused(server: Served, host: str) -> None:
    before = server.count_outcomes()
    status, _, answer = post(server, f"Host: {host}", JSON)
    name = host.partition(":")[0]
    assert (status, answer["error"]["code"]) == (403, "host_not_allowed")
    assert f"--allowed-hosts {name}" in answer["error"]["message"]
    (line,) = outcomes_since(server, before, 1)
    assert (line["outcome"], line["reason"], line["status"]) == ("refused", "host_not_allowed", "403")
    for path in ("/v1/models", "/metrics", "/stats", "/", "/nothing"):
        assert ask(server, f"GET {path} HTTP/1.1", f"Host: {host}")[0] == 403
    for path in ("/health", "/ready"):
        assert ask(server, f"GET {path} HTTP/1.1", f"Host: {host}")[0] == 200


@pytest.mark.parametrize(
    ("start", "lines", "status"),
    [
        ("GET /v1/models HTTP/1.1", [], 400),
        ("GET /v1/models HTTP/1.1", ["Host:"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: localhost", "Host: localhost"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: localhost", "Host: evil.test"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: localhost, evil.test"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: user@localhost"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: localhost/x"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: localhost:http"], 400),
        ("GET /v1/models HTTP/1.1", ["Host: l\u00f6calhost"], 400),
        ("GET /v1/models HTTP/1.0", [], 200),
        ("GET /v1/models HTTP/1.0", ["Host: evil.test"], 403),
        ("GET http://localhost/v1/models HTTP/1.1", ["Host: localhost"], 200),
        ("GET http://localhost/v1/models HTTP/1.1", ["Host: evil.test"], 200),
        ("GET HTTP://evil.test/v1/models HTTP/1.1", ["Host: localhost"], 403),
        ("GET http://localhost@evil.test/v1/models HTTP/1.1", ["Host: localhost"], 400),
        ("GET http://localhost/v1/models HTTP/1.1", [], 400),
    ],
)
def test_exactly_one_proper_host(server: Served, start: str, lines: list[str], status: int) -> None:
    assert ask(server, start, *lines)[0] == status


@pytest.mark.parametrize(
    "origin", ["https://evil.test", "null", "http://localhost:1", "http://127.0.0.1:{port}", "file://"]
)
def test_a_page_of_another_site_is_refused_unread(server: Served, origin: str) -> None:
    before = server.count_outcomes()
    status, headers, answer = post(server, "Host: localhost:{port}", JSON, f"Origin: {origin}")
    assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")
    assert "--allowed-origins" in answer["error"]["message"]
    assert not [name for name in headers if name.startswith("access-control-")]
    (line,) = outcomes_since(server, before, 1)
    assert (line["outcome"], line["reason"], line["status"]) == ("refused", "origin_not_allowed", "403")
    status, _, _ = ask(
        server,
        "OPTIONS /generate HTTP/1.1",
        "Host: localhost:{port}",
        f"Origin: {origin}",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: content-type",
    )
    assert status == 403
    assert ask(server, "GET /health HTTP/1.1", "Host: localhost", f"Origin: {origin}")[0] == 200


def test_a_page_of_this_server_is_served(server: Served) -> None:
    assert post(server, "Host: localhost:{port}", JSON, "Origin: http://localhost:{port}")[0] == 200
    assert post(server, "Host: 127.0.0.1:{port}", JSON, "Origin: http://127.0.0.1:{port}")[0] == 200


def test_the_refusal_of_a_page_takes_the_form_of_the_route(server: Served) -> None:
    status, _, answer = post(server, "Host: localhost", JSON, "Origin: null", path="/v1/messages")
    assert (status, answer["type"], answer["error"]["type"]) == (403, "error", "permission_error")


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (("Host: localhost:{port}", "Origin: https://evil.test"), "origin_not_allowed"),
        (("Host: evil.test:{port}", "Origin: http://evil.test:{port}"), "host_not_allowed"),
        (("Host: localhost:{port}",), "unsupported_content_type"),
    ],
)
def test_the_blob_of_a_chromium_page(server: Served, lines: tuple[str, ...], code: str) -> None:
    """`fetch(url, {mode: "no-cors", method: "POST", body: new Blob([text])})`: no preflight and no Content-Type.

    Each of the three checks stands alone: of a page elsewhere, of a page whose name was led to this machine, and of a
    browser that leaves the Origin out.
    """
    before = server.count_outcomes()
    _, _, answer = post(server, *lines, *BLOB_OF_A_PAGE)
    assert answer["error"]["code"] == code
    (line,) = outcomes_since(server, before, 1)
    assert line["outcome"] == "refused"
