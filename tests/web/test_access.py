"""The page on a phone, for a screen reader and by keyboard, light and dark."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.web.scripted_server import ScriptedServer, says
from tests.web.test_chat import ANSWER, ask

WIDE = "```\n" + "x" * 500 + "\n```\n\n|" + "column with words|" * 12 + "\n" + "|-" * 12 + "|\n\n" + "y" * 400
CONTROLS = "button, input, textarea, select, a[href], summary, [tabindex='0']"
NAMELESS = """nodes => nodes.filter(node => {
  const labels = Array.from(node.labels ?? []).map(label => label.textContent.trim()).join("");
  const own = ["INPUT", "TEXTAREA", "SELECT"].includes(node.tagName) ? "" : node.textContent.trim();
  return !(labels || own || node.getAttribute("aria-label") || node.getAttribute("title"));
}).map(node => node.outerHTML.slice(0, 200))"""
CONTRASTS = """nodes => nodes.filter(node => node.checkVisibility() && node.textContent.trim()).map(node => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  let behind = node;
  while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const pair = [light(parse(getComputedStyle(node).color)), light(parse(getComputedStyle(behind).backgroundColor))];
  return [node.outerHTML.slice(0, 80), (Math.max.apply(null, pair) + 0.05) / (Math.min.apply(null, pair) + 0.05)];
}).filter(([, contrast]) => contrast < 4.5)"""


def fill(page: Page, scripted: ScriptedServer) -> None:
    """A conversation with everything that the page can show."""
    page.goto(scripted.url)
    scripted.replies = [says(WIDE, "thought", (("f", '{"x": "' + "z" * 300 + '"}'),)), says("Two", breaks=True)]
    for text in ("w" * 300, "Second"):
        page.get_by_label("Message", exact=True).fill(text)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_visible()


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, scripted: ScriptedServer, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 700}, has_touch=True, is_mobile=True)
    page = context.new_page()
    fill(page, scripted)
    for selector in ("html", "#log"):
        sizes = page.locator(selector).evaluate("node => [node.scrollWidth, node.clientWidth]")
        assert sizes[0] <= sizes[1] <= width, (selector, sizes)
    expect(page.locator("#side")).to_be_hidden()
    page.get_by_role("button", name="Chats").tap()
    expect(page.locator("#side")).to_be_visible()
    page.get_by_role("button", name="New chat").tap()
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator(ANSWER)).to_have_count(0)
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_control_has_a_name_and_every_text_enough_contrast(
    browser: Browser, scripted: ScriptedServer, theme: str
) -> None:
    context = browser.new_context(color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    fill(page, scripted)
    assert page.locator(CONTROLS).evaluate_all(NAMELESS) == []
    assert (
        page.locator(
            "body :is(p, span, button:not(:disabled), a, code, th, td, summary, h1, li, kbd, label)"
        ).evaluate_all(CONTRASTS)
        == []
    )
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("main, nav, header").count() == 3
    ids = page.locator("[id]").evaluate_all("nodes => nodes.map(node => node.id)")
    assert len(ids) == len(set(ids))
    for name in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
        named = page.locator(f"[{name}]").evaluate_all(f"nodes => nodes.map(node => node.getAttribute('{name}'))")
        assert set(named) <= set(ids)
    context.close()


def test_light_and_dark_follow_the_system_until_they_are_switched(browser: Browser, scripted: ScriptedServer) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(scripted.url)
    html = page.locator("html")
    expect(html).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(html).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Dark").click()
    page.reload()
    expect(html).to_have_attribute("data-theme", "dark")
    context.close()


def test_the_keyboard_reaches_everything(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    prompt = page.get_by_label("Message", exact=True)
    expect(prompt).to_be_focused()
    prompt.press("Shift+Enter")
    expect(prompt).to_have_value("\n")
    scripted.replies = [says("Yes.", hangs=True), says("No.")]
    ask(page, "Hello")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Yes.")
    page.keyboard.press("Escape")
    expect(prompt).to_be_focused()
    page.keyboard.press("Alt+r")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("No.")
    page.keyboard.press("F1")
    expect(page.get_by_role("dialog")).to_contain_text("stop the answer")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    wanted = {
        "new",
        "search",
        "export-all",
        "import",
        "open-settings",
        "open-help",
        "theme",
        "prompt",
        "thinking",
        "send",
    }
    assert wanted | {"Copy", "Again", "Rename", "Delete"} <= reached
