"""The chat page in a browser: conversations, branches, stops, errors, keys and reloads."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.served import Served
from tests.web.conftest import KEY
from tests.web.scripted_server import Reply, ScriptedServer, chunk, event, says

ANSWER = ".message.assistant"
USER = ".message.user"


def ask(page: Page, text: str) -> None:
    """Type a message and send it."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def stored(page: Page) -> list[dict[str, object]]:
    """The conversations in the browser's storage."""
    entries = page.evaluate("Object.entries(localStorage)")
    return [json.loads(text) for name, text in entries if name.startswith("glint.conversation.")]


def test_a_conversation_with_the_real_server(page: Page, real: Served) -> None:
    page.goto(real.url)
    expect(page.get_by_role("dialog")).to_contain_text("wants an API key")
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("dialog")).to_contain_text("wrong")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#model-line")).to_contain_text("up to")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Save").click()
    ask(page, "What is the capital of France?")
    figures = page.locator(f"{ANSWER} .figures")
    expect(figures).to_contain_text("tokens")
    expect(figures).to_contain_text("tok/s")
    text = page.locator(f"{ANSWER} .markdown").inner_text()
    assert "Paris" in text
    page.reload()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text(text)
    assert KEY not in json.dumps(page.evaluate("Object.entries(localStorage)"))
    assert page.evaluate("sessionStorage.getItem('glint.key')") == KEY
    ask(page, "And of Italy?")
    expect(page.locator(f"{ANSWER} .figures").nth(1)).to_contain_text("tok/s")


def test_another_tab_asks_for_the_key_again(page: Page, real: Served) -> None:
    page.goto(real.url)
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#model-line")).to_contain_text("up to")
    other = page.context.new_page()
    other.goto(real.url)
    expect(other.get_by_role("dialog")).to_contain_text("wants an API key")
    other.get_by_role("button", name="Cancel").click()
    expect(other.locator("#banner")).to_contain_text("wants an API key")


def test_text_thinking_tools_and_figures_are_shown(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    calls = (("weather", '{"city": "Zürich \\u00e9"}'),)
    goes_on = threading.Event()
    scripted.replies = [says("Grüße, 世界 🌍!", "First I think.", calls, goes_on=goes_on), says("It is sunny.")]
    ask(page, "Hello")
    answer = page.locator(ANSWER).first
    expect(answer.locator(".markdown")).to_contain_text("Grüße")
    goes_on.set()
    expect(answer.locator(".markdown")).to_have_text("Grüße, 世界 🌍!")
    thinking = answer.locator(".reasoning")
    expect(thinking.locator(".thought")).to_be_hidden()
    thinking.locator("summary").click()
    expect(thinking.locator(".thought")).to_have_text("First I think.")
    expect(answer.locator(".call")).to_contain_text('"city": "Zürich é"')
    for part in ("21 tokens", "prompt 1,234, 1,000 cached", "8 drafts accepted", "first token", "tok/s"):
        expect(answer.locator(".figures")).to_contain_text(part)
    expect(page.locator("#announcement")).to_contain_text("Answer: Grüße")
    answer.get_by_role("button", name="Give results").click()
    page.get_by_label("Result of weather").fill("24 degrees")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(ANSWER).nth(1)).to_contain_text("It is sunny.")
    sent = scripted.asked[1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert sent[2] == {"role": "tool", "content": "24 degrees", "tool_call_id": "call_0"}


def test_settings_reach_the_server_and_stay(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    page.keyboard.press("Alt+s")
    page.get_by_label("System prompt").fill("Be brief.")
    numbers = {"Temperature": "0.5", "Top p": "0.9", "Max tokens": "77", "Thinking budget": "12", "Seed": "11"}
    for label, value in numbers.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Tools").fill("{not json")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings-error")).to_contain_text("not valid JSON")
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "f"}}]')
    page.get_by_role("button", name="Save").click()
    page.get_by_label("Thinking", exact=True).uncheck()
    scripted.replies = [says("Yes."), says("No.")]
    ask(page, "Hello")
    expect(page.locator(ANSWER)).to_contain_text("Yes.")
    page.reload()
    page.keyboard.press("Alt+n")
    ask(page, "Again")
    expect(page.locator(ANSWER)).to_contain_text("No.")
    wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 77, "thinking_budget": 12, "seed": 11, "stream": True}
    for body in scripted.asked:
        assert wanted.items() <= body.items()
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["tools"][0]["function"] == {"name": "f"}


@pytest.mark.parametrize("way", ["key", "button"])
def test_stop_keeps_what_has_arrived(page: Page, scripted: ScriptedServer, way: str) -> None:
    page.goto(scripted.url)
    scripted.replies = [says("One two three", hangs=True), says("Four.")]
    ask(page, "Count")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("One two three")
    stop = page.get_by_role("button", name="Stop")
    if way == "key":
        page.keyboard.press("Escape")
    else:
        stop.click()
    expect(stop).to_be_hidden()
    expect(page.locator(f"{ANSWER} .figures")).to_contain_text("stopped")
    ask(page, "Go on")
    expect(page.locator(ANSWER).nth(1)).to_contain_text("Four.")
    assert scripted.asked[1]["messages"][1] == {"role": "assistant", "content": "One two three"}


def test_regenerate_edit_and_branches(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    scripted.replies = [says("First answer"), says("Second answer"), says("Third answer")]
    ask(page, "Question one")
    expect(page.locator(ANSWER)).to_contain_text("First answer")
    page.get_by_role("button", name="Again").click()
    expect(page.locator(ANSWER)).to_contain_text("Second answer")
    expect(page.locator(ANSWER)).to_contain_text("2 / 2")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(ANSWER)).to_contain_text("First answer")
    expect(page.get_by_role("button", name="Previous version")).to_be_disabled()
    page.get_by_label("Message", exact=True).press("ArrowUp")
    page.get_by_label("Edited message").fill("Question two")
    page.get_by_role("button", name="Send as a branch").click()
    expect(page.locator(ANSWER)).to_contain_text("Third answer")
    expect(page.locator(USER)).to_contain_text("Question two")
    assert scripted.asked[2]["messages"] == [{"role": "user", "content": "Question two"}]
    assert scripted.asked[0]["seed"] != scripted.asked[1]["seed"]
    page.reload()
    expect(page.locator(USER)).to_contain_text("Question two")
    page.locator(USER).hover()
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(ANSWER)).to_contain_text("First answer")


def test_a_lost_answer_goes_on_with_the_same_seed(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    scripted.replies = [says("Once upon", breaks=True), says("Once upon a time.")]
    ask(page, "A story")
    expect(page.get_by_role("alert")).to_contain_text("was lost in the middle of the answer")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Once upon")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Once upon a time.")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert scripted.asked[0] == scripted.asked[1]


def test_a_page_that_was_left_offers_to_go_on(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    scripted.replies = [says("Half", hangs=True), says("Half and whole")]
    ask(page, "Hello")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Half")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text(re.compile("left before the answer|middle of the answer"))
    page.get_by_role("button", name="Go on").click()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Half and whole")


FAILURES = [
    (Reply(status=429, headers={"Retry-After": "7"}), "The server's queue is full. Try again in 7 s."),
    (Reply(status=503, error={"code": "not_ready"}), "The server is still loading its model."),
    (Reply(status=503, error={"message": "the server is shutting down"}), "the server is shutting down"),
    (Reply(status=400, error={"message": "the prompt has 9 tokens"}), "refused the request: the prompt has 9"),
    (Reply(status=502), "it answered with status 502"),
    (Reply((event({"error": {"message": "the engine failed"}}),)), "the engine failed"),
    (Reply((b"data: {oops\n\n",)), "is not JSON"),
]


def test_errors_are_sentences(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    scripted.replies = [reply for reply, _ in FAILURES] + [says("Now.")]
    ask(page, "Hello")
    for _, sentence in FAILURES:
        expect(page.get_by_role("alert")).to_contain_text(sentence)
        page.get_by_role("button", name="Try again").click()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Now.")


def test_a_key_that_is_asked_for_later_sends_the_request_again(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    scripted.replies = [Reply(status=401), says("Welcome.")]
    ask(page, "Hello")
    page.get_by_label("Key", exact=True).fill("a-key")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Welcome.")


def test_a_server_that_loads_is_waited_for(page: Page, scripted: ScriptedServer) -> None:
    scripted.not_ready = 1
    page.goto(scripted.url)
    expect(page.locator("#banner")).to_contain_text("The server is still loading its model. Try again in 1 s.")
    expect(page.locator("#model-line")).to_contain_text("scripted, up to 4,096 tokens")
    expect(page.locator("#banner")).to_be_hidden()


def test_conversations_are_searched_renamed_exported_deleted_and_imported(
    page: Page, scripted: ScriptedServer, tmp_path: Path
) -> None:
    page.goto(scripted.url)
    scripted.replies = [says("Apples are red."), says("Pears are green.")]
    for text in ("About apples", "About pears"):
        page.get_by_role("button", name="New chat").click()
        ask(page, text)
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("tokens")
    listed = page.locator("#list .title")
    expect(listed).to_have_text(["About pears", "About apples"])
    page.keyboard.press("Control+k")
    page.keyboard.type("RED")
    expect(listed).to_have_text(["About apples"])
    listed.click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("Fruit")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Fruit")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "conversations.json"
    downloading.value.save_as(file)
    assert {one["title"] for one in json.loads(file.read_text())["conversations"]} == {"Fruit", "About pears"}
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_label("Search").fill("")
    expect(listed).to_have_text(["About pears"])
    assert [one["title"] for one in stored(page)] == ["About pears"]
    page.locator("#import-file").set_input_files(file)
    expect(listed).to_have_count(3)
    listed.get_by_text("Fruit").click()
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Apples are red.")


def test_a_deleted_conversation_stays_deleted_while_it_is_answered(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    scripted.replies = [says("Still", hangs=True)]
    ask(page, "Hello")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Still")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert stored(page) == []


def test_an_event_may_be_split_anywhere(page: Page, scripted: ScriptedServer) -> None:
    page.goto(scripted.url)
    raw = "".join(
        [
            ": note\r\n\r\n",
            "event: x\rdata:" + json.dumps(chunk(content="é🌍"), ensure_ascii=False) + "\r\r",
            "data: " + json.dumps(chunk(content=" done"), indent=1).replace("\n", "\r\ndata: ") + "\r\n\r\n",
        ]
    ).encode()
    scripted.replies = [Reply(tuple(raw[at : at + 1] for at in range(len(raw))))]
    ask(page, "Hello")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("é🌍 done")
    expect(page.get_by_role("alert")).to_have_count(0)
