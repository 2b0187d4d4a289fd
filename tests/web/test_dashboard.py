"""The dashboard in a real browser, before a real server that works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.raw_http import outcome_of, wait_for
from tests.e2e.served import Served, served

SECRET = "a prompt that the dashboard never shows"
ADMIN_KEY, KEY = "key-of-the-administrator", "key-of-a-client"
CHARTS = ("output", "prompt", "requests", "pages", "first", "between", "hits", "errors")


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key and an admin key that runs two requests at a time."""
    flags = ("--no-restart", "--max-num-seqs", "2", "--api-key", KEY)
    environment = {"GLINT_ADMIN_API_KEY": ADMIN_KEY}
    with served(tmp_path_factory.mktemp("busy") / "server.log", *flags, environment=environment) as running:
        yield running


@contextmanager
def load(server: Served, count: int, **changes: Any) -> Iterator[list[Future[httpx.Response]]]:
    """So many long requests at once. Whatever still runs at the end is cancelled."""
    body = {"prompt": SECRET, "max_tokens": 4000, "ignore_eos": True} | changes
    client = httpx.Client(base_url=server.url, headers={"x-api-key": ADMIN_KEY}, timeout=120)
    with client, ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(client.post, "/generate", json=body) for _ in range(count)]
        try:
            yield answers
        finally:
            while not all(answer.done() for answer in answers):
                for entry in client.get("/requests").json()["data"]:
                    client.delete(f"/requests/{entry['id']}")


def give_key(page: Page, key: str) -> None:
    """Type a key into the dialog that asks for one."""
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use it").click()


def test_figures_move_and_a_request_is_cancelled_from_the_page(page: Page, busy: Served) -> None:
    page.goto(f"{busy.url}/dashboard")
    give_key(page, ADMIN_KEY)
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#requests-note")).to_have_text("None.")
    for name in CHARTS:
        expect(page.locator(f"[data-chart={name}]")).to_be_visible()
    expect(page.locator("[data-chart=accepted]")).to_be_visible()
    with load(busy, 3) as answers:
        rows = page.locator("#requests tr")
        expect(rows).to_have_count(3)
        expect(rows.filter(has_text="running")).to_have_count(2)
        expect(rows.filter(has_text="waiting")).to_have_count(1)
        page.wait_for_function(
            "() => { const now = /now ([\\d.]+)/.exec("
            "document.querySelector('[data-chart=output] svg').getAttribute('aria-label'));"
            "return now && Number(now[1]) > 0 }"
        )
        drawn = page.locator("[data-chart=requests] svg")
        expect(drawn).to_have_attribute("aria-label", re.compile("running: now 2.*waiting: now 1", re.DOTALL))
        expect(page.locator("[data-chart=output] path.line")).to_have_attribute("d", re.compile("L"))
        waiting = rows.filter(has_text="waiting")
        request_id = str(waiting.get_attribute("data-request"))
        waiting.get_by_role("button").click()
        expect(page.get_by_role("dialog")).to_contain_text(request_id)
        page.get_by_role("button", name="Back").click()
        expect(rows).to_have_count(3)
        waiting.get_by_role("button").click()
        page.get_by_role("button", name="Cancel the request").click()
        expect(page.locator(f"[data-request={request_id}]")).to_have_count(0)
        expect(page.locator("#announcement")).to_contain_text("is cancelled")
        wait_for(lambda: any(answer.done() for answer in answers), "the client has its error")
        assert [answer.result().status_code for answer in answers if answer.done()] == [410]
        assert outcome_of(busy, request_id)["reason"] == "cancelled_by_admin"
        expect(rows).to_have_count(2)
        assert SECRET not in page.content()
    expect(page.locator("#requests-note")).to_have_text("None.")
    expect(page.locator("#engine")).to_contain_text("cpu")
    expect(page.locator("#memory tr").filter(has_text="page cache")).to_contain_text("GiB")


def test_the_key_is_asked_for_and_kept_for_the_session_alone(page: Page, busy: Served) -> None:
    page.goto(f"{busy.url}/dashboard")
    give_key(page, "wrong")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("button", name="Back").click()
    expect(page.locator("#banner")).to_contain_text("API key")
    page.get_by_role("button", name="API key").click()
    give_key(page, KEY)
    expect(page.locator("#requests-note")).to_contain_text("Requests of this key")
    page.reload()
    expect(page.locator("#state")).to_have_text("live")
    assert KEY not in str(page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href"))


def test_a_key_sees_its_own_requests_alone(page: Page, busy: Served) -> None:
    page.goto(f"{busy.url}/dashboard")
    give_key(page, KEY)
    with load(busy, 1):
        page.wait_for_function("() => document.querySelector('[data-chart=requests] dd').textContent === '1'")
        expect(page.locator("#requests tr")).to_have_count(0)


def test_values_under_the_pointer_and_by_keyboard(page: Page, busy: Served) -> None:
    page.goto(f"{busy.url}/dashboard")
    give_key(page, ADMIN_KEY)
    drawing = page.locator("[data-chart=requests] svg")
    page.wait_for_function(
        "() => document.querySelector('[data-chart=requests] path.line')?.getAttribute('d').includes('L')"
    )
    drawing.hover(position={"x": 60, "y": 40})
    expect(page.locator("[data-chart=requests] .chart-time")).to_contain_text("ago")
    expect(page.locator("[data-chart=pages] .cursor")).to_have_count(1)
    page.mouse.move(0, 0)
    expect(page.locator("[data-chart=requests] .chart-time")).to_be_empty()
    drawing.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("[data-chart=requests] .chart-time")).to_contain_text("ago")
    page.keyboard.press("Escape")
    expect(page.locator("[data-chart=requests] .cursor")).to_have_count(0)


def test_polling_pauses_while_the_page_is_hidden(page: Page, busy: Served) -> None:
    page.goto(f"{busy.url}/dashboard")
    give_key(page, ADMIN_KEY)
    expect(page.locator("#state")).to_have_text("live")
    hide = "value => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
    hide += "document.dispatchEvent(new Event('visibilitychange')) }"
    page.evaluate(hide, True)
    expect(page.locator("#state")).to_have_text("paused")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert asked == []
    page.evaluate(hide, False)
    expect(page.locator("#state")).to_have_text("live")
    assert len(asked) >= 2


def test_a_lost_server_is_told_and_found_again(page: Page, busy: Served) -> None:
    page.goto(f"{busy.url}/dashboard")
    give_key(page, ADMIN_KEY)
    expect(page.locator("#state")).to_have_text("live")
    refusal = {"error": {"message": "the server is loading its model; try again in a moment", "code": "not_ready"}}

    def refuse(route: Route) -> None:
        route.fulfill(status=503, headers={"Retry-After": "1"}, body=json.dumps(refusal))

    page.route("**/stats", refuse)
    expect(page.locator("#banner")).to_contain_text("loading its model")
    expect(page.locator("#state")).to_have_text("no connection")
    page.unroute("**/stats")
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#banner")).to_be_hidden()


@pytest.mark.parametrize("num_drafts", [200, 0])
def test_accepted_drafts_are_drawn_where_there_are_any(page: Page, busy: Served, num_drafts: int) -> None:
    def with_drafts(route: Route) -> None:
        answer = route.fetch()
        drafts = {"draft_tokens": num_drafts, "accepted_draft_tokens": num_drafts * 3 // 4}
        route.fulfill(response=answer, json=answer.json() | (drafts if answer.ok else {}))

    page.route("**/stats", with_drafts)
    page.goto(f"{busy.url}/dashboard")
    give_key(page, ADMIN_KEY)
    expect(page.locator("#state")).to_have_text("live")
    if num_drafts:
        expect(page.locator("[data-chart=accepted] dd")).to_have_text("75 %")
    else:
        expect(page.locator("[data-chart=accepted]")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(browser: Browser, busy: Served, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    page = context.new_page()
    page.goto(f"{busy.url}/dashboard")
    give_key(page, ADMIN_KEY)
    with load(busy, 2):
        expect(page.locator("#requests tr")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    context.close()


def test_a_server_that_lists_nothing_says_why(page: Page, busy: Served) -> None:
    message = "this server has no keys and others may reach it; start it with --admin-api-key"
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(status=403, json={"error": {"message": message, "code": "admin_key_required"}})

    page.route("**/requests", refuse)
    page.goto(f"{busy.url}/dashboard")
    give_key(page, KEY)
    expect(page.locator("#requests-note")).to_contain_text(message)
    expect(page.locator("#state")).to_have_text("live")
    page.wait_for_timeout(1500)
    assert len(asked) == 1
