"""Markdown as the page shows it, against markdown-it-py: the same elements around the same text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from markdown_it import MarkdownIt
from playwright.sync_api import Page, expect

from tests.web.scripted_server import ScriptedServer, says
from tests.web.test_chat import ANSWER, ask

SAMPLES = [
    "# One\n\n## Two ##\n\ntext\n### Three\ntext",
    "a *b* **c** ***d*** ~~e~~ `f` snake_case_word _g_ __h__ 2 * 3 * 4",
    "**bold with *nested* words** and `code with *stars*` and ``tick ` inside``",
    "- a\n- b\n  - c\n    - d\n- e",
    "1. a\n2. b\n   1. c\n3. d",
    "3. three\n4. four",
    "**a *b*** and ***c* d**",
    "* a\n* b\n\ntext after",
    "> quoted\n> lines\n>\n> - with a list",
    "```python\nx = 1\n\nif x:\n    y\n```\nafter",
    "~~~\n``` inside\n~~~",
    "````\n```\n````",
    "```\nnever closed",
    "- item\n  ```sh\n  ls\n  ```\n- next",
    "| a | b |\n|---|--:|\n| 1 | 2 |\n| `x` | **y** |\n\nafter",
    "a | b\n--|--\n1 | 2\\|3",
    "text\n\n---\n\n***\ntext",
    "line one  \nline two\\\nline three\nline four",
    "\\*not em\\* \\# \\[no\\](link)",
    '[label *em*](https://a.test/b_(c) "title") and <https://c.test/d>',
    "no * emphasis * here, a*b*c, *unclosed **and _more",
    "5 < 6 & 7 > 2 &amp <b>not bold</b>",
]
VOID = ("br", "hr")


class Outline(HTMLParser):
    """HTML without attributes, wrappers and needless white space."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Keep an element; a div is a wrapper."""
        self.text += "" if tag == "div" else f"<{tag}>"

    def handle_endtag(self, tag: str) -> None:
        """Keep the end of an element."""
        self.text += "" if tag == "div" or tag in VOID else f"</{tag}>"

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.text += data

    def tidy(self) -> str:
        """The outline with single spaces, and none beside elements of blocks."""
        text = re.sub(r"\s+", " ", self.text.replace("<s>", "<del>").replace("</s>", "</del>"))
        return re.sub(
            r" ?(</?(?:p|ul|ol|li|pre|table|thead|tbody|tr|th|td|h\d|hr|br|blockquote)>) ?", r"\1", text
        ).replace(" </code></pre>", "</code></pre>")


def test_the_same_elements_as_markdown_it(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    reference = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    render = """async (text) => {
      const { renderMarkdown } = await import("/web/markdown.js");
      const node = renderMarkdown(text);
      node.querySelectorAll(".code-head").forEach((head) => head.remove());
      return node.outerHTML;
    }"""
    for sample in SAMPLES:
        wanted = re.sub(r"(</?h)(\d)", lambda tag: tag[1] + str(int(tag[2]) + 2), reference.render(sample))
        assert Outline(page.evaluate(render, sample)).tidy() == Outline(wanted).tidy(), sample


def test_code_is_copied_as_it_is(page: Page, scripted: ScriptedServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(scripted.url)
    scripted.replies = [says("```html\n<b>x</b>  \n\ty\n```")]
    ask(page, "Code")
    expect(page.locator(f"{ANSWER} .figures")).to_contain_text("tokens")
    copy = page.locator(".code").get_by_role("button", name="Copy")
    copy.click()
    expect(page.locator(".code-head")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "<b>x</b>  \n\ty"
