"""Where reasoning begins and ends, and what becomes of the space and the tags around it."""

from __future__ import annotations

import pytest

from glint.text.output import ContentText, OutputParser, OutputStart, ParsedOutput, ReasoningText, find_start
from tests.pure.output_text import CALL_PARIS, CONTENT, PLAIN, REASONING, UNDECIDED, read, read_pieces


@pytest.mark.parametrize(
    ("prompt", "has_think_token", "start"),
    [
        ("[gMASK]<sop><|user|>hi<|assistant|><think>", True, REASONING),
        ("[gMASK]<sop><|user|>hi<|assistant|><think>\n", True, REASONING),
        ("[gMASK]<sop><|user|>hi<|assistant|></think>", True, CONTENT),
        ("[gMASK]<sop><|user|>\nhi/nothink<|assistant|>\n<think></think>", True, CONTENT),
        ("[gMASK]<sop><|user|>\nhi<|assistant|>\n<think></think>\n", True, CONTENT),
        ("[gMASK]<sop><|user|>\nhi<|assistant|>", True, UNDECIDED),
        ("what does <think> mean?", True, UNDECIDED),
        ("", True, UNDECIDED),
        ("<|im_start|>assistant\n", False, PLAIN),
        ("the word <think>", False, PLAIN),
    ],
)
def test_the_prompt_tells_the_start(prompt: str, has_think_token: bool, start: OutputStart) -> None:
    assert find_start(prompt, has_think_token) is start


def test_reasoning_that_the_prompt_opened_ends_at_the_tag() -> None:
    assert read("let me see</think>Paris.", REASONING) == ParsedOutput("let me see", "Paris.", ())


def test_reasoning_that_the_model_opens_after_space() -> None:
    assert read("\n<think>let me see</think>\n\nParis.", UNDECIDED) == ParsedOutput("let me see", "Paris.", ())


def test_an_undecided_output_without_the_tag_is_content() -> None:
    assert read("\nParis. <b>", UNDECIDED) == ParsedOutput("", "\nParis. <b>", ())
    assert read(" \n", UNDECIDED) == ParsedOutput("", " \n", ())


def test_an_empty_think_pair_gives_no_reasoning() -> None:
    assert read("<think></think>\nParis.", UNDECIDED) == ParsedOutput("", "Paris.", ())


def test_think_tags_are_text_where_the_model_does_not_know_them() -> None:
    text = " <think>a</think>\n\nb</think> "
    assert read(text, PLAIN) == ParsedOutput("", text, ())
    assert len(read(CALL_PARIS, PLAIN).calls) == 1


def test_unclosed_reasoning_stays_reasoning() -> None:
    assert read("let me see. Paris.", REASONING) == ParsedOutput("let me see. Paris.", "", ())
    assert read("cut in a tag </thi", REASONING) == ParsedOutput("cut in a tag </thi", "", ())


def test_reasoning_keeps_all_its_bytes() -> None:
    text = "\n\n  a < b\r\n\t</thin> </tool_call><arg_key> é \n"
    assert read(f"{text}</think>ok", REASONING) == ParsedOutput(text, "ok", ())


def test_repeated_opening_tags_in_reasoning_are_dropped() -> None:
    assert read("<think>a<think>b</think>c", REASONING) == ParsedOutput("ab", "c", ())


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ("\n\nhello\n", "hello\n"),
        ("\r\n\r\nhello", "hello"),
        ("hello\n\n", "hello\n\n"),
        ("\n  indented", "  indented"),
        ("  \nhello", "  \nhello"),
        ("\n \n", ""),
        ("", ""),
        ("a\n\n\nb", "a\n\n\nb"),
    ],
)
def test_line_ends_before_the_content_are_dropped_and_nothing_else(written: str, content: str) -> None:
    assert read(f"why</think>{written}", REASONING) == ParsedOutput("why", content, ())
    assert read(written, CONTENT) == ParsedOutput("", content, ())


def test_a_closing_tag_without_an_opening_one_is_dropped_from_content() -> None:
    assert read("a</think></think>\nb", REASONING) == ParsedOutput("a", "b", ())
    assert read("</think>b", CONTENT) == ParsedOutput("", "b", ())
    assert read("a</think>b </think>c", REASONING) == ParsedOutput("a", "b c", ())


def test_content_may_speak_about_the_think_tags() -> None:
    text = "Write <think>here</think> and stop."
    assert read(text, CONTENT) == ParsedOutput("", text, ())
    assert read(f"{text}</think>!", CONTENT) == ParsedOutput("", f"{text}!", ())


def test_reasoning_may_open_again_where_no_content_was_written() -> None:
    assert read("a</think>\n<think>b</think>c", REASONING) == ParsedOutput("ab", "c", ())
    assert read("<think>b</think>c", CONTENT) == ParsedOutput("b", "c", ())
    output = read(f"{CALL_PARIS}\n<think>b</think>c", CONTENT)
    assert (output.reasoning, output.content, len(output.calls)) == ("b", "c", 1)


def test_the_mention_of_a_call_tag_does_not_end_reasoning() -> None:
    assert read("use the <tool_call> tag, then</think>ok", REASONING) == ParsedOutput(
        "use the <tool_call> tag, then", "ok", ()
    )
    long = "I might write <tool_call> here; " + "but why? " * 50
    assert read_pieces(long + "</think>ok", REASONING) == ParsedOutput(long, "ok", ())


def test_text_streams_at_once_and_only_a_possible_tag_is_held() -> None:
    parser = OutputParser(REASONING, ())
    assert parser.push("so ") == [ReasoningText("so ")]
    assert parser.push("a<") == [ReasoningText("a")]
    assert parser.push("/thi") == []
    assert parser.push("s") == [ReasoningText("</this")]
    assert parser.push("</think>\nyes") == [ContentText("yes")]
    assert parser.push(" a<b") == [ContentText(" a<b")]
    assert parser.push(" <tool_") == [ContentText(" ")]
    assert parser.push("box> \n") == [ContentText("<tool_box> \n")]
    assert parser.finish() == []


def test_events_of_one_kind_are_merged_within_a_push() -> None:
    parser = OutputParser(REASONING, ())
    assert parser.push("a<think>b</tool_call>c</think>d</think>e") == [
        ReasoningText("ab</tool_call>c"),
        ContentText("de"),
    ]
