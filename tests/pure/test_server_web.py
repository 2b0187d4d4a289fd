"""The static files of the pages: types, headers, no key, and nothing but the known files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from glint.server.web import FOLDER, TYPES, WebFiles, page_addresses, read_files
from tests.pure.asgi_client import call

FILES = read_files()
APP = WebFiles(PlainTextResponse("passed on", 404), FILES)
MAX_BYTES = 300_000


def test_every_file_of_the_folder_is_served_with_its_type() -> None:
    assert len(FILES) == len(list(FOLDER.iterdir())) > 3
    for file in FOLDER.iterdir():
        path = {"index.html": "/"}.get(file.name, f"/{file.stem}" if file.suffix == ".html" else f"/web/{file.name}")
        answer = call(APP, path, accept="text/html, */*")
        assert answer.status_code == 200 and answer.content == file.read_bytes()
        assert answer.headers["content-type"] == TYPES[file.suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-length"] == str(file.stat().st_size)


def test_the_policy_allows_this_server_alone_and_no_inline_script_or_style() -> None:
    policy = call(APP, "/", accept="text/html").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    fetched = [rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")]
    assert set(fetched) == {"'self'"}
    assert rules["require-trusted-types-for"] == "'script'"


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    first = call(APP, "/web/base.css")
    assert first.headers["cache-control"] == "no-cache"
    again = call(APP, "/web/base.css", if_none_match=f'W/"x", {first.headers["etag"]}')
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert call(APP, "/web/base.css", if_none_match='"other"').status_code == 200


def test_the_root_is_the_page_for_a_browser_alone() -> None:
    page = call(APP, "/", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert page.text.startswith("<!doctype html>") and page.headers["vary"] == "Accept"
    assert call(APP, "/", accept="application/json").text == call(APP, "/").text == "passed on"


@pytest.mark.parametrize(
    "path",
    ["/web", "/web/", "/web/none.js", "/web/index.html", "/index.html", "/web//base.css"]
    + ["/web/%2e%2e/server/app.py", "/web/..%2fcli.py", "/web/base.css/", "/WEB/base.css", "/web/base.css%00"],
)
def test_any_other_path_is_passed_on(path: str) -> None:
    assert call(APP, path, accept="text/html").text == "passed on"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_any_other_method_is_passed_on(method: str) -> None:
    assert call(APP, "/web/base.css", method).text == "passed on"


def test_files_of_an_unknown_kind_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert list(read_files(tmp_path)) == ["/web/a.css"]


def test_the_files_are_small() -> None:
    assert sum(len(file.body) for file in FILES.values()) < MAX_BYTES
    assert sum(len(gzip.compress(file.body)) for file in FILES.values()) < MAX_BYTES / 3


def test_no_page_has_inline_script_style_or_an_address_elsewhere() -> None:
    for file in FOLDER.glob("*.html"):
        text = file.read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", text), file.name
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text), file.name


@pytest.mark.parametrize(
    "sink", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
)
def test_no_script_makes_nodes_from_text(sink: str) -> None:
    assert [file.name for file in FOLDER.glob("*.js") if sink in file.read_text()] == []


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
        ("gpu.internal", "http://gpu.internal:80/"),
    ],
)
def test_addresses_of_the_pages(host: str, address: str) -> None:
    files = ["/dashboard", "/", "/web/base.css"]
    assert page_addresses("http", host, 80, files) == [address, f"{address}dashboard"]
    assert page_addresses("http", host, 80, []) == []
