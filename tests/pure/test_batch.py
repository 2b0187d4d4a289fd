"""A batch before it runs: which lines are refused and by which number, and what an output already answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glint.batch import Progress, Response, open_output, read_input, read_output, read_settings
from glint.checkpoint.hub import ModelSource
from glint.cli import make_parser
from glint.errors import RequestError


def line(custom_id: Any = "a", **changes: Any) -> str:
    """A line of an input."""
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes
    return json.dumps({name: value for name, value in asked.items() if value is not None})


def answer(custom_id: str, status: int = 200) -> str:
    """A line of an output."""
    response = {"status_code": status, "request_id": "cmpl-1", "body": {"choices": []}}
    return json.dumps({"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": None})


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[]", "line 2: Expected `object`, got `array`"),
        (line(""), "line 2: custom_id is empty"),
        (line(5), "line 2: Expected `str`, got `int`"),
        (line("a"), "line 2: custom_id 'a' is that of line 1"),
        (line("b", method="GET"), "line 2: Invalid enum value 'GET'"),
        (line("b", url="/v1/embeddings"), "line 2: Invalid enum value '/v1/embeddings'"),
        (line("b", body=None), "line 2: Object missing required field `body`"),
        (line("b", body=[1]), "line 2: Expected `object`, got `array`"),
        (line("b", body={"stream": True}), "line 2: stream is true"),
        (line("b", extra=1), "line 2: Object contains unknown field `extra`"),
        ("\udcff", "line 2: "),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_by_its_number(tmp_path: Path, bad: str, said: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes("\n".join([line("a"), bad, "", line("c")]).encode(errors="surrogateescape"))
    with pytest.raises(RequestError) as refused:
        read_input(file)
    assert said in str(refused.value) and "nothing has run" in str(refused.value)


def test_all_wrong_lines_are_named_up_to_twenty(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n" * 23)
    with pytest.raises(RequestError) as refused:
        read_input(file)
    assert "line 20: " in str(refused.value) and "line 21: " not in str(refused.value)
    assert "and 3 more lines" in str(refused.value)


def test_an_input_that_is_absent_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        read_input(tmp_path / "in.jsonl")
    (tmp_path / "in.jsonl").write_text("\n\n")
    with pytest.raises(RequestError, match="holds no request"):
        read_input(tmp_path / "in.jsonl")


def test_a_cut_last_line_is_dropped_and_whole_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join([line("a"), line("b"), line("c")]))
    asked = read_input(tmp_path / "in.jsonl")
    assert list(asked) == ["a", "b", "c"] and bytes(asked["a"].body) == b'{"prompt": "x"}'
    file = tmp_path / "out.jsonl"
    whole = f"{answer('b')}\n{answer('a', 400)}\n"
    file.write_text(whole + answer("c")[:-1])
    with open_output(file) as output:
        assert read_output(output, file, asked) == {"b": 200, "a": 400}
        output.write(b"next")
    assert file.read_text() == whole + "next"


@pytest.mark.parametrize(
    ("text", "said"),
    [(f"{answer('a')}\nno\n", "line 2 is no line of a batch"), (f"{answer('z')}\n", "answers 'z', which is not asked")],
)
def test_an_output_of_something_else_is_refused_and_kept(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(RequestError, match=said), open_output(file) as output:
        read_output(output, file, read_input(tmp_path / "in.jsonl"))
    assert file.read_text() == text


def test_only_one_run_writes_an_output(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with open_output(file), pytest.raises(RequestError, match="being written by another run"), open_output(file):
        raise AssertionError("two runs write the same file")
    with pytest.raises(RequestError, match="cannot be written: "), open_output(tmp_path / "absent" / "out.jsonl"):
        raise AssertionError("a folder that is not there was written to")


def test_failures_are_counted_and_tokens_of_every_route_are_read() -> None:
    progress = Progress(0, 3)
    progress.count(Response(200, "", b'{"usage": {"completion_tokens": 5}}'))
    progress.count(Response(200, "", b'{"usage": {"output_tokens": 7}}'))
    progress.count(Response(400, "", b'{"error": {}}'))
    assert (progress.num_failed, progress.num_tokens) == (1, 12)


def test_a_model_that_comes_by_its_id_is_called_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ModelSource(tmp_path / "snapshot", "owner/name", "c" * 40)
    monkeypatch.setattr("glint.flags.locate_model", lambda model, say: source)
    chosen = make_parser().parse_args(["batch", "in.jsonl", "out.jsonl", "--model", "owner/name"])
    settings = read_settings(chosen)
    assert settings.model_names == ("owner/name",) and settings.model_dir == source.folder
    assert (settings.repository, settings.commit) == ("owner/name", "c" * 40)
