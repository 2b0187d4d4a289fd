"""Tokenizers with tokens that span the joints of JSON and of tool calls, and random walks through grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from glint.text.grammar import Grammar, GrammarCompiler, GrammarLimits, Matcher
from glint.text.tokenizer import Tokenizer

CORPUS = (
    '{"a": 1, "b": [true, false, null], "name": "value"}{"a":12,"b":"x y"} the red fox, über 3.5e-7\n  [1, 2], {}',
    *(
        5
        * [
            "ool_call>now</",
            ">look<arg",
            "_key>city</",
            'lue>{"x": 1}</',
            "</tool_",
            "><tool",
            "</arg_",
            "ol_call",
            "g_value>",
            "key><arg",
        ]
    ),
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>")
TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
EXTRA_ROWS = 70
CLOSING = frozenset(b'"}]<>')


def build_tokenizer(folder: Path, plain_tokens: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer whose merges cross quotes, braces and tags, with added tokens that are not special."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([text[begin:] for text in CORPUS for begin in range(0, len(text), 3)], trainer)
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain_tokens])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def build_compiler(tokenizer: Tokenizer, limits: GrammarLimits | None = None) -> GrammarCompiler:
    """A compiler whose model has more rows than the tokenizer has tokens, with two tokens that end a text."""
    ends = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    known = [end for end in ends if end is not None]
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + EXTRA_ROWS, known, limits)


def end_ids(tokenizer: Tokenizer) -> set[int | None]:
    """The tokens that end a text."""
    return {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}


def allowed(matcher: Matcher) -> set[int]:
    """The ids whose bits are set in the mask."""
    words = matcher.mask()
    assert words is not None
    bits = format(int.from_bytes(bytes(words), "little"), "b")[::-1]
    return {index for index, bit in enumerate(bits) if bit == "1"}


def push_text(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    """Accepts a text byte by byte, each of which has its token."""
    single = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    for byte in text.encode():
        matcher.accept(single[bytes([byte])])


def steps(grammar: Grammar, tokenizer: Tokenizer, seed: int, max_tokens: int = 1_500) -> Iterator[tuple[int, Matcher]]:
    """Accepts random allowed tokens until the text is finished, and gives each with the matcher behind it.

    Every third choice closes something if it can, and now and then a tag is written as far as it is allowed, so that
    texts end.
    """
    chance = random.Random(seed)
    words = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    closers = end_ids(tokenizer) | {index for index, word in enumerate(words) if CLOSING & set(word)}
    matcher = grammar.start()
    rest = b""
    for _ in range(max_tokens):
        if matcher.is_finished:
            return
        choices = sorted(allowed(matcher))
        rest = rest or (chance.choice(TAGS).encode() if chance.random() < 0.15 else b"")
        closing = [index for index in choices if index in closers]
        following = [index for index in choices if rest and words[index] and rest.startswith(words[index])]
        chosen = following or (closing if closing and chance.random() < 0.35 else choices)
        token_id = chance.choice(chosen)
        rest = rest.removeprefix(words[token_id]) if following else b""
        matcher.accept(token_id)
        yield token_id, matcher
    raise AssertionError(f"no end after {max_tokens} tokens with seed {seed}")


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int) -> bytes:
    """The bytes of one random text of the grammar, without the token that ended it."""
    ends = end_ids(tokenizer)
    tokens = [token_id for token_id, _ in steps(grammar, tokenizer, seed)]
    return b"".join(tokenizer.token_bytes(token_id) for token_id in tokens if token_id not in ends)
