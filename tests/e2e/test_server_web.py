"""The static files of a running server, over the wire."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.raw_http import connect, read_to_end
from tests.e2e.served import Served

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def raw(server: Served, method: str, path: str) -> bytes:
    """The whole response to a request whose path no client has tidied."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head.encode())
        return read_to_end(connection)


def test_the_page_and_what_it_loads(server: Served) -> None:
    page = httpx.get(server.url, headers=HTML)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    script = httpx.get(f"{server.url}/web/main.js")
    assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    for answer in (page, script):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(server.url).json()["name"] == "glint"


def test_head_has_the_headers_and_no_body(server: Served) -> None:
    head, _, body = raw(server, "HEAD", "/").partition(b"\r\n\r\n")
    whole, _, page = raw(server, "GET", "/").partition(b"\r\n\r\n")
    assert body == b"" and len(page) > 1000
    length = f"content-length: {len(page)}".encode()
    assert length in head.lower() and length in whole.lower()


def test_a_known_file_is_not_sent_again(server: Served) -> None:
    with httpx.Client(base_url=server.url) as client:
        etag = client.get("/web/base.css").headers["etag"]
        for _ in range(2):
            again = client.get("/web/base.css", headers={"If-None-Match": etag})
            assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/web/../server/app.py", "/web/../../pyproject.toml", "/web/%2e%2e/cli.py", "/web/..%2fcli.py", "/web/none.js"]
    + ["/web//base.css", "/web/", "/web/index.html", "//etc/passwd", "/web/base.css%00.js", "/web/\\..\\cli.py"],
)
def test_nothing_else_is_served(server: Served, path: str) -> None:
    response = raw(server, "GET", path)
    assert response.startswith(b"HTTP/1.1 404 ") and b'"code":"not_found"' in response


def test_the_log_names_the_page(server: Served) -> None:
    assert f"page: {server.url}/\n" in server.log.read_text()
