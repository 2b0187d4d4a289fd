"""The sample model's tokenizer.json against transformers' converter of GGUF files, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from glint.text.tokenizer import Tokenizer
from tests.pure.sample_source import sample_gguf
from tests.pure.test_sample_tokenizer import TEXTS, folder, random_texts, tokenizer

__all__ = ["folder", "sample_gguf", "tokenizer"]


def test_ids_are_those_of_the_converter_of_transformers(tokenizer: Tokenizer, sample_gguf: Path) -> None:
    other: Any = AutoTokenizer.from_pretrained(sample_gguf.parent, gguf_file=sample_gguf.name, local_files_only=True)
    without_digits = [text for text in random_texts(300) if not any(letter.isnumeric() for letter in text)]
    assert len(without_digits) >= 10
    for text in (*TEXTS, *without_digits):
        assert tokenizer.encode(text) == other.encode(text, add_special_tokens=False), text
