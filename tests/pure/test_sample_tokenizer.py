"""The sample model's tokenizer.json against the GGUF vocabulary and llama.cpp."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from glint.sample.convert import tokenizer_documents
from glint.sample.gguf import GgufFile
from glint.text.chat import render_chat
from glint.text.tokenizer import Tokenizer
from tests.pure.sample_source import sample_gguf

__all__ = ["sample_gguf"]

TEXTS = (
    "hello world",
    " leading and trailing  ",
    "tabs\t\tx\n\n\n  y   z\r\n",
    "it's we'll I'D they've",
    "é ü 世界 🇩🇪 e\u0301 😀👩\u200d👩\u200d👧 \u00a0x\u3000y",
    "def f(x):\n    return {k: v ** 2 for k, v in x.items()}\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "  \n \n",
    "",
)
DIGIT_TEXTS = ("x1234y 2 ½ Ⅷ ٣ 3.14 1,000", "in 2024, 100% of 7x", "²³ x²")
PIECES = (*"ab zZ019  \n\t'.,;:!?-_()é½Ⅷ世😀\u00a0\u0301<|>\r", "'s", "'ll", " the", "<|im_end|>", "1 2", "  12")


def random_texts(count: int) -> list[str]:
    """Texts drawn from pieces that sit on the borders of the pre-tokeniser's rules."""
    source = random.Random(5)
    return ["".join(source.choice(PIECES) for _ in range(source.randint(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(sample_gguf: Path) -> Path:
    with GgufFile(sample_gguf) as file:
        for name, document in tokenizer_documents(file).items():
            (sample_gguf.parent / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return sample_gguf.parent


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in (*TEXTS, *DIGIT_TEXTS, *random_texts(300)):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_ids_are_those_of_the_gguf_vocabulary(tokenizer: Tokenizer, sample_gguf: Path) -> None:
    with GgufFile(sample_gguf) as file:
        tokens = file.texts("tokenizer.ggml.tokens")
        kinds = file.integers("tokenizer.ggml.token_type")
    assert tokenizer.vocab_size == len(tokens)
    for token_id, token in enumerate(tokens):
        assert tokenizer.token_to_id(token) == token_id
        assert tokenizer.is_special(token_id) == (kinds[token_id] == 3)
    assert tokenizer.encode("<|im_start|>hi<|im_end|>") == [1, tokens.index("hi"), 2]
    assert tokenizer.eos_token_ids == (2,)


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    expected = [tokenizer.token_to_id(piece) for piece in ("Ġ", "1", "2", "3", "4", "Ġ", "5", "x")]
    assert tokenizer.encode(" 1234 5x") == expected


def test_bytes_without_a_token_are_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("\u0104") is None
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, sample_gguf: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    other = llama_cpp.Llama(model_path=str(sample_gguf), vocab_only=True, verbose=False)
    for text in (*TEXTS, *DIGIT_TEXTS, *random_texts(1000)):
        if text:
            assert tokenizer.encode(text) == other.tokenize(text.encode(), add_bos=False, special=True), text


def test_the_chat_template_is_the_models_own(tokenizer: Tokenizer) -> None:
    assert render_chat(tokenizer, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
