"""The tokenizer of a model folder against the tokenizers library, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glint.errors import TextError
from glint.text.tokenizer import Detokenizer, Tokenizer
from tests.pure.text_folder import PLAIN_TOKENS, ROLE_TOKENS, build_tokenizer, write_tokenizer

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import glint.text.chat
import glint.text.tokenizer
assert "transformers" not in sys.modules
tokenizer = glint.text.tokenizer.Tokenizer(sys.argv[1])
print(tokenizer.decode(tokenizer.encode("hello world")))
print(glint.text.chat.render_chat(tokenizer, [{"role": "user", "content": "hi"}]))
"""
REFERENCE = build_tokenizer()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(text=st.text(max_size=60) | st.lists(st.sampled_from(ROLE_TOKENS + PLAIN_TOKENS)).map(" ".join))
def test_encodes_and_decodes_as_the_tokenizers_library(tokenizer: Tokenizer, text: str) -> None:
    expected = REFERENCE.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == expected
    for skip in (True, False):
        assert tokenizer.decode(expected, skip) == REFERENCE.decode(expected, skip_special_tokens=skip)


def test_special_tokens_have_their_ids(tokenizer: Tokenizer) -> None:
    for token in ROLE_TOKENS + PLAIN_TOKENS:
        assert tokenizer.token_to_id(token) == REFERENCE.token_to_id(token)
        assert tokenizer.encode(token) == [REFERENCE.token_to_id(token)]
        assert tokenizer.is_special(REFERENCE.token_to_id(token)) == (token in ROLE_TOKENS)
    assert tokenizer.token_to_id("<|nothing|>") is None
    assert tokenizer.eos_token_ids == (REFERENCE.token_to_id("<|endoftext|>"),)
    assert tokenizer.vocab_size == REFERENCE.get_vocab_size(with_added_tokens=True)
    assert not tokenizer.has_chat_template


def test_the_settings_are_shown_without_paths_and_with_tokens_as_text(tmp_path: Path) -> None:
    end = {"content": "<|endoftext|>", "lstrip": False, "special": True}
    settings: dict[str, Any] = {
        "eos_token": {"__type": "AddedToken", **end},
        "added_tokens_decoder": {"400": end},
        "additional_special_tokens": ["<|user|>", {"__type": "AddedToken", "content": "<sop>"}],
        "model_max_length": 128,
        "name_or_path": "models/mine",
        "special_tokens_map_file": "models/mine/map.json",
    }
    assert Tokenizer(write_tokenizer(tmp_path / "chat", "{{ messages }}", **settings)).info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {"400": "<|endoftext|>"},
        "additional_special_tokens": ["<|user|>", "<sop>"],
        "model_max_length": 128,
        "chat_template": "{{ messages }}",
    }
    assert "chat_template" not in Tokenizer(write_tokenizer(tmp_path / "plain")).info


def test_long_texts_are_not_cut(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = write_tokenizer(tmp_path, model_max_length=16)
    limited = build_tokenizer()
    limited.enable_truncation(8)
    limited.enable_padding(length=8)
    limited.save(str(folder / "tokenizer.json"))
    text = "hello " * 1000
    assert Tokenizer(folder).encode(text) == REFERENCE.encode(text).ids
    assert Tokenizer(folder).encode("a") == REFERENCE.encode("a").ids
    assert not recwarn.list


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_tokenizer(tmp_path) / name).unlink()
    with pytest.raises(TextError, match=name):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "\udcff"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "nothing"),
        ("tokenizer.json", ""),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (write_tokenizer(tmp_path) / name).write_bytes(content.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(TextError, match=name):
        Tokenizer(tmp_path)


def test_code_is_never_run(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, auto_map={"AutoTokenizer": ["code.Own", None]}, tokenizer_class="Own")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(TextError, match="auto_map"):
        Tokenizer(folder)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None, 3])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(TextError, match="cannot be encoded"):
        tokenizer.encode(text)


def test_ids_that_are_none_are_refused_and_unknown_ids_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    for wrong in (-1, 2**40, "a"):
        with pytest.raises(TextError):
            tokenizer.decode([wrong])
        with pytest.raises(TextError):
            tokenizer.token_bytes(wrong)


def test_other_decoders_are_refused_for_streaming(tmp_path: Path) -> None:
    document = json.loads((write_tokenizer(tmp_path) / "tokenizer.json").read_text())
    document["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TextError, match="Fuse"):
        Detokenizer(Tokenizer(tmp_path))


def test_works_without_torch_and_imports_transformers_late(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template="{{ messages[0].content }}!")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, "hello world\nhi!\n"), finished.stderr
    assert "PyTorch" not in finished.stderr
