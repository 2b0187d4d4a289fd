"""What an answer, a title, a tool or an imported file may try against the page: all of it stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.web.scripted_server import ScriptedServer, says
from tests.web.test_chat import ANSWER, ask, stored

ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<a href='javascript:window.hit=1'>x</a>",
    '"><script>window.hit = 1</script>',
    "`<script>window.hit = 1</script>`",
    "| a |\n|---|\n| <img src=x onerror=window.hit=1> |",
    "> <script>window.hit = 1</script>",
    "```<script>window.hit = 1</script>\n</code></pre><script>window.hit = 1</script>\n```",
]
LINKS = [
    "[x](javascript:window.hit=1)",
    "[x](JaVaScRiPt:window.hit=1)",
    "[x](java\tscript:window.hit=1)",
    "[x](&#106;avascript:window.hit=1)",
    "[x](data:text/html,<script>opener.hit=1</script>)",
    "[x](vbscript:x)",
    "[x](file:///etc/passwd)",
    "[x](/v1/models)",
    "[x](//elsewhere.test/)",
    "<javascript:window.hit=1>",
    "![x](javascript:window.hit=1)",
]
HOSTILE = ["**a ", "[", "`a ``b ", "> ", "* ", "_a __b ", "|a", "![[", "<h", "- \n ", "((](", "~~", "> - "]
FORBIDDEN_NODES = "script, iframe, img, object, embed, svg, style, link, form, base, meta"


def expect_no_hit(page: Page) -> None:
    """Nothing ran, and the messages have no node that could run or load anything."""
    assert page.evaluate("window.hit") is None
    assert page.locator(f"#messages :is({FORBIDDEN_NODES})").count() == 0
    nodes = page.locator("#messages *, #list *, #title")
    attributes = nodes.evaluate_all("nodes => nodes.flatMap(node => node.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcdoc")]


def test_script_in_answers_thinking_questions_titles_and_tools_stays_text(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    text = "\n\n".join(ATTACKS)
    call = (ATTACKS[0], json.dumps({"x": ATTACKS[1]})), (ATTACKS[2], ATTACKS[3])
    scripted.replies = [says(text, text, call)]
    ask(page, ATTACKS[1])
    expect(page.locator(f"{ANSWER} .figures")).to_contain_text("tokens")
    expect(page.locator(f"{ANSWER} .markdown")).to_contain_text(ATTACKS[0])
    expect(page.locator("#title")).to_have_text(ATTACKS[1])
    expect(page.locator("#list")).to_contain_text(ATTACKS[1])
    page.wait_for_timeout(200)
    expect_no_hit(page)
    page.reload()
    expect(page.locator(f"{ANSWER} .markdown")).to_contain_text(ATTACKS[0])
    expect_no_hit(page)


def test_links_lead_to_the_web_or_to_mail_alone(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    good = ["[a](https://a.test/x_(y))", "https://b.test/?q=1.", "[c](mailto:c@d.test)", "[*e*](http://e.test 'title')"]
    scripted.replies = [says("\n\n".join([*LINKS, *good]))]
    ask(page, "Links")
    expect(page.locator(f"{ANSWER} .figures")).to_contain_text("tokens")
    links = page.locator(f"{ANSWER} .markdown a")
    found = links.evaluate_all("nodes => nodes.map(n => [n.getAttribute('href'), n.rel, n.target])")
    wanted = ["https://a.test/x_(y)", "https://b.test/?q=1", "mailto:c@d.test", "http://e.test/"]
    assert found == [[address, "noopener noreferrer nofollow", "_blank"] for address in wanted]
    expect_no_hit(page)


def import_file(page: Page, folder: Path, content: Any) -> None:
    """Import a file with this content: text as it is, anything else as JSON."""
    file = folder / "import.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    page.locator("#import-file").set_input_files(file)


def conversation(**changes: Any) -> dict[str, Any]:
    """A conversation with one message, as the page exports it, with changes to the message."""
    message = {"id": "a", "parent": "root", "role": "user", "content": "x"} | changes
    return {"id": "c", "title": "t", "messages": {"a": message}, "selected": {"root": "a"}}


def exported(*conversations: Any) -> dict[str, Any]:
    """A file of conversations."""
    return {"format": "glint-conversations", "version": 1, "conversations": list(conversations)}


CIRCLE = {name: {"id": name, "parent": other, "role": "user", "content": ""} for name, other in ("ab", "ba")}


BAD_FILES = [
    ("{", "The file is not JSON"),
    ("[]", "is not of the format"),
    ({"format": "glint-conversations", "version": 2, "conversations": []}, "is not of the format"),
    (exported("text"), "conversation 1 of the file: it has no messages"),
    (exported({"messages": {}}, {"messages": []}), "conversation 2 of the file: it has no messages"),
    (exported(conversation(role="system")), "a role that is not one of user, assistant, tool"),
    (exported(conversation(content={"x": 1})), "a content that is not text"),
    (exported(conversation(parent="none")), "a message has no parent"),
    (exported(conversation(parent="__proto__")), "a message has no parent"),
    (exported(conversation(id="b")), "has another id"),
    (exported({"messages": CIRCLE}), "follow each other in a circle"),
]


def test_a_bad_file_is_refused_whole(page: Page, scripted: ScriptedServer, tmp_path: Path) -> None:
    page.goto(scripted.url)
    expect(page.locator("#model-line")).to_contain_text("scripted")
    for content, sentence in BAD_FILES:
        import_file(page, tmp_path, content)
        expect(page.locator("#banner")).to_contain_text(sentence)
    assert stored(page) == []


def test_script_in_an_imported_file_stays_text(page: Page, scripted: ScriptedServer, tmp_path: Path) -> None:
    page.goto(scripted.url)
    expect(page.locator("#model-line")).to_contain_text("scripted")
    hostile = conversation(
        role="assistant",
        content=ATTACKS[1],
        reasoning=ATTACKS[0],
        finish=ATTACKS[0],
        error=ATTACKS[1],
        seed="1",
        usage={"prompt_tokens": ATTACKS[1], "completion_tokens": {"x": 1}},
        timing={"first": "x", "rest": []},
        toolCalls=[{"name": ATTACKS[1], "arguments": ["x"]}, 7],
        onclick="window.hit = 1",
    )
    hostile |= {"title": ATTACKS[1], "settings": {"temperature": ATTACKS[0]}, "__proto__": {"hit": 1}}
    import_file(page, tmp_path, exported(hostile))
    page.locator("#list .title").get_by_text(ATTACKS[1]).click()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text(ATTACKS[1])
    expect(page.get_by_role("alert")).to_contain_text(ATTACKS[1])
    expect_no_hit(page)


def test_storage_that_was_tampered_with_does_not_break_the_page(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    page.evaluate("localStorage['glint.conversation.x'] = '{broken'; localStorage['glint.settings'] = '[1'")
    page.evaluate("localStorage['glint.conversation.y'] = 'null'; localStorage['glint.theme'] = '<b>'")
    page.reload()
    scripted.replies = [says("Fine.")]
    ask(page, "Hello")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Fine.")


def test_hostile_markdown_is_shown(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    for number, unit in enumerate(HOSTILE, 1):
        page.evaluate(
            """async ([text, number]) => {
              const { renderMarkdown } = await import("/web/markdown.js");
              setTimeout(() => (window.shown = renderMarkdown(text).childNodes.length > 0 && number));
            }""",
            [unit * 20_000, number],
        )
        page.wait_for_function(f"window.shown === {number}")
