"""A real Chromium, a page that may talk to its own server alone, and the servers behind it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.served import Served, served
from tests.web.scripted_server import ScriptedServer, scripted_server

KEY = "key-of-the-browser-tests"
TIMEOUT_MILLISECONDS = 30_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("no chromium found; install it (Debian: sudo apt install chromium)")
    expect.set_options(timeout=TIMEOUT_MILLISECONDS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def script() -> Iterator[ScriptedServer]:
    """A server for all tests that write its answers."""
    with scripted_server() as running:
        yield running


@pytest.fixture
def scripted(script: ScriptedServer) -> ScriptedServer:
    """A server whose answers the test writes."""
    script.reset()
    return script


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`glint serve` on the sample model, with a key."""
    with served(tmp_path_factory.mktemp("server") / "server.log", "--no-restart", "--api-key", KEY) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own session. It fails the test on any error of the console and any request to elsewhere."""
    context = browser.new_context(viewport={"width": 1180, "height": 800}, accept_downloads=True)
    context.set_default_timeout(TIMEOUT_MILLISECONDS)
    opened = context.new_page()
    addresses: list[str] = []
    faults: list[str] = []
    context.on("request", lambda request: addresses.append(request.url))
    context.on("weberror", lambda error: faults.append(str(error.error)))
    opened.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    yield opened
    expected = "Failed to load resource: the server responded with a status of"
    assert [fault for fault in faults if not fault.startswith(expected)] == []
    hosts = {urlsplit(address).netloc for address in addresses if not address.startswith(("data:", "blob:"))}
    assert len(hosts) == 1, hosts
    context.close()
