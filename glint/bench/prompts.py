"""Prompts of an exact number of tokens, for any model: from a local tokenizer or from the server's own /tokenize.

The text is the prose of Python's language reference, which every interpreter carries. Beside it there are short
questions, for answers that end where the model ends them.
"""

import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from glint.bench.stream import Link
from glint.errors import RequestError

PromptKind = Literal["random", "text", "questions"]
Encode = Callable[[str], Awaitable[list[int]]]

SENTENCE = re.compile(r"(?<!\S)[A-Z][a-z]+(?: [A-Za-z][a-z]*(?:[,;]|'[a-z]+)?){7,39}\.(?=\s)")
WORD = re.compile(r"(?<= )[a-z]{3,10}(?= )")
NUM_WORDS = 400
FEWEST_WORDS = 16
FIRST_WORDS = 3
OPENING = "Continue:"


@dataclass(frozen=True)
class Passage:
    """A piece of text that follows a space, and its tokens."""

    text: str
    token_ids: tuple[int, ...]


def read_sentences() -> list[str]:
    """Distinct plain sentences of the language reference."""
    from pydoc_data.topics import topics

    text = " ".join("\n\n".join(topics.values()).split())
    return list(dict.fromkeys(SENTENCE.findall(text)))


def read_questions() -> list[str]:
    """200 short questions and tasks, one a line of the file beside this module."""
    return Path(__file__).with_name("questions.txt").read_text(encoding="utf-8").splitlines()


def common_words(sentences: Sequence[str]) -> list[str]:
    """The words that occur most often, the most frequent first."""
    return [word for word, _ in Counter(WORD.findall(" ".join(sentences))).most_common(NUM_WORDS)]


def encode_locally(folder: Path) -> Encode:
    """Encodes with the tokenizer of a model folder."""
    from glint.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)

    async def encode(text: str) -> list[int]:
        return tokenizer.encode(text)

    return encode


async def encode_by_server(link: Link, model: str) -> Encode | None:
    """Encodes with the server's /tokenize in the form that it takes: vLLM's or llama.cpp's; None if it has none."""
    forms: tuple[Callable[[str], dict[str, object]], ...] = (
        lambda text: {"model": model, "prompt": text, "add_special_tokens": False},
        lambda text: {"content": text, "add_special": False},
        lambda text: {"prompt": text},
    )
    for form in forms:
        reply = await link.call("POST", "/tokenize", form("The first sentence."))
        document = reply.document()
        if reply.status == 200 and isinstance(document, dict) and document.get("tokens"):
            return _server_encoder(link, form)
    return None


def _server_encoder(link: Link, form: Callable[[str], dict[str, object]]) -> Encode:
    async def encode(text: str) -> list[int]:
        reply = await link.call("POST", "/tokenize", form(text))
        document = reply.document()
        if reply.status != 200 or not isinstance(document, dict):
            raise RequestError(f"/tokenize answered {reply.status} to {text!r}; give --tokenizer DIR")
        return [int(token) for token in document["tokens"]]

    return encode


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts by number: the same seed and number give the same prompt, other numbers give others.

    A text begins within a sentence or with words of its own, so that prompts share no beginning that a prefix cache
    would find, but for a rare few tokens.
    """

    kind: PromptKind
    seed: int
    sentences: tuple[Passage, ...]
    words: tuple[Passage, ...]

    @classmethod
    async def prepare(cls, kind: PromptKind, seed: int, encode: Encode, needs_words: bool) -> "PromptMaker":
        """Encodes the text; `needs_words` also finds the words of one token that exact text prompts are filled with."""
        sentences = read_sentences()
        words = common_words(sentences) if needs_words else []
        passages = [Passage(text, tuple(await encode(" " + text))) for text in sentences]
        singles = [Passage(text, tuple(await encode(" " + text))) for text in words]
        kept = tuple(passage for passage in singles if len(passage.token_ids) == 1)
        if needs_words and len(kept) < FEWEST_WORDS:
            raise RequestError(
                f"only {len(kept)} of {len(singles)} common English words are one token of this model, too few to make "
                "chat prompts of an exact length; use --endpoint completions"
            )
        return cls(kind, seed, tuple(passages), kept)

    @cached_property
    def _pool(self) -> list[int]:
        return sorted({token for passage in self.sentences for token in passage.token_ids})

    def token_ids(self, label: str, length: int) -> list[int]:
        """A prompt of exactly `length` tokens; `label` numbers it."""
        draw = random.Random(f"{self.seed}/{label}")
        if self.kind == "random":
            return draw.choices(self._pool, k=length)
        first = draw.choice(self.sentences).token_ids
        found = list(first[draw.randrange(len(first)) :])
        while len(found) < length:
            found.extend(draw.choice(self.sentences).token_ids)
        return found[:length]

    def text(self, label: str, length: int) -> str:
        """A text that adds exactly `length` tokens to the opening; `label` numbers it."""
        draw = random.Random(f"{self.seed}/{label}")
        first = draw.choices(self.words, k=min(FIRST_WORDS, length))
        parts = [OPENING, *(word.text for word in first)]
        length -= len(first)
        while length > 0:
            passage = draw.choice(self.sentences if self.kind == "text" else self.words)
            if len(passage.token_ids) > length:
                parts += [word.text for word in draw.choices(self.words, k=length)]
                break
            parts.append(passage.text)
            length -= len(passage.token_ids)
        return " ".join(parts)
