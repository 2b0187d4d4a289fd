"""The model folder's own tokenizer, incremental detokenising, and stop strings over streamed text."""

import codecs
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from glint.errors import TextError
from glint.text.guard import ControlTokens, PromptText
from glint.text.tags import Tag

TOKENIZER_NAME: Final = "tokenizer.json"
SETTINGS_NAME: Final = "tokenizer_config.json"
TEMPLATE_NAME: Final = "chat_template.jinja"
_ADVICE_SWITCH: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


class Tokenizer:
    """The tokenizer of a model folder, read by transformers from local files, never from the network.

    The files are data: a folder whose settings name code to run is refused, and no other tokenizer stands in for a
    missing one. Texts are encoded in full, without truncation. `template_facts` is what was found out about the chat
    template.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        _check_files(self.folder)
        self._tokenizer = _load(self.folder)
        self._fast = self._tokenizer.backend_tokenizer
        self._bytes_of: dict[int, bytes] = {}
        self.template_facts: dict[str, bool] = {}
        self._added = self._fast.get_added_tokens_decoder()
        self._added_ids = frozenset(self._added)
        self._special_ids = frozenset(index for index, token in self._added.items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id; a model may have more rows than this."""
        return int(max(self._fast.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes that one token stands for."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text token of the tokenizer's settings, if they name one; generation_config.json may name more."""
        token_id = self._tokenizer.eos_token_id
        return () if token_id is None else (int(token_id),)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brings a chat template."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def info(self) -> dict[str, Any]:
        """The folder's tokenizer settings as vLLM shows them: no paths of files, added tokens as their text."""
        settings = json.loads((self.folder / SETTINGS_NAME).read_text(encoding="utf-8"))
        shown = {name: _plain(value) for name, value in settings.items() if not name.endswith(("_file", "_path"))}
        shown.setdefault("tokenizer_class", type(self._tokenizer).__name__)
        if self.has_chat_template:
            shown["chat_template"] = self._tokenizer.chat_template
        return shown

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Gives the token ids of `text`; special tokens spelled in the text become their ids."""
        if not isinstance(text, str):
            raise TextError(f"{type(text).__name__} cannot be encoded; give a string")
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except (TypeError, UnicodeError) as error:
            raise TextError(f"text cannot be encoded: {error}; give a string of valid Unicode") from error

    def encode_prompt(self, prompt: PromptText) -> list[int]:
        """Gives the token ids of a rendered conversation; only what the template wrote becomes control tokens.

        The same ids as `encode` where nothing is marked. What is marked is text: it becomes the tokens of its letters.
        """
        if not prompt.mark or prompt.mark not in prompt.marked:
            return self.encode(prompt.marked)
        ids: list[int] = []
        begin = 0
        for span in self.control_tokens.find(prompt.marked):
            ids += self._encode_text(prompt.marked[begin : span.begin], prompt.mark)
            ids.append(self._fast.token_to_id(span.token))
            begin = span.end
        return ids + self._encode_text(prompt.marked[begin:], prompt.mark)

    def _encode_text(self, marked: str, mark: str) -> list[int]:
        """Encodes text as if there were no added tokens; cut at the marks where the model itself has such a word."""
        text = marked.replace(mark, "")
        ids: list[int] = self._textual.encode(text, add_special_tokens=False).ids if text else []
        if not self._added_ids.isdisjoint(ids):
            pieces = [piece for piece in marked.split(mark) if piece]
            ids = [index for piece in pieces for index in self._textual.encode(piece, add_special_tokens=False).ids]
        return ids

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """All added tokens, special or not."""
        return ControlTokens(self._added.values(), self._fast.normalizer)

    @cached_property
    def foreign_tokens(self) -> ControlTokens:
        """The added tokens that the model itself does not write: all but the tags of thinking and calls."""
        tags = frozenset(map(str, Tag))
        return ControlTokens(
            (token for token in self._added.values() if token.content not in tags), self._fast.normalizer
        )

    @cached_property
    def _textual(self) -> Any:
        """The same tokenizer without added tokens."""
        from tokenizers import Tokenizer as Fast

        textual = Fast(self._fast.model)
        if self._fast.normalizer is not None:
            textual.normalizer = self._fast.normalizer
        if self._fast.pre_tokenizer is not None:
            textual.pre_tokenizer = self._fast.pre_tokenizer
        return textual

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Gives the text of `token_ids`; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing."""
        try:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except (TypeError, OverflowError) as error:
            raise TextError(f"token ids cannot be decoded: {error}; give integers from 0 on") from error

    def token_to_id(self, token: str) -> int | None:
        """Gives the id of the token spelled exactly `token`, None if there is none."""
        token_id: int | None = self._fast.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether decoding with `skip_special_tokens` leaves this token out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes that this token adds to the text; empty for an id without a token."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    def require_byte_level(self) -> None:
        """Raises TextError unless every token stands for bytes, as in all GLM-4.x tokenizers."""
        decoder = type(self._fast.decoder).__name__
        if decoder != "ByteLevel":
            raise TextError(
                f"{self.folder / TOKENIZER_NAME} decodes by {decoder}, text is streamed from ByteLevel tokenizers only"
            )

    def apply_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **arguments: bool
    ) -> str:
        """Renders the folder's chat template in the tokenizer's sandbox; what the template raises passes through."""
        offered = None if tools is None else list(tools)
        return str(self._tokenizer.apply_chat_template(list(messages), tools=offered, tokenize=False, **arguments))

    def _find_bytes(self, token_id: int) -> bytes:
        try:
            token: str | None = self._fast.id_to_token(token_id)
        except (TypeError, OverflowError) as error:
            raise TextError(f"{token_id!r} is not a token id; give an integer from 0 on") from error
        if token is None:
            return b""
        if _letters().issuperset(token):
            return token.translate(_byte_of_letter()).encode("latin-1")
        return token.encode("utf-8")


class Detokenizer:
    """Turns token ids into text one by one.

    Promises that all pieces together, with that of `finish`, are the text of all tokens decoded at once, and that no
    piece ends inside a character: bytes of an unfinished character wait for the next token. A token costs the length
    of its own text, however long the text before it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        tokenizer.require_byte_level()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes the next token and gives the text that is certain now; it may be empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Gives what was held back: nothing, or U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Looks for stop strings in text that arrives in pieces.

    Promises the same answer however the text is cut: the text ends at the stop string that is complete first, of two
    that end together at the longer one, which is then `matched`. Text that could be the beginning of a stop string is
    held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise TextError(f"stop strings are {stops!r}; give a list of strings that are not empty")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> tuple[str, bool]:
        """Takes a piece of text; gives the text that is safe to emit and whether a stop string was found."""
        if self.matched is not None:
            return "", True
        text = self._held + piece
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self._held = ""
            self.matched = text[begin:end]
            return text[: end if self._include_stop else begin], True
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """Gives the text held back at the end of the stream; empty after a stop."""
        held, self._held = self._held, ""
        return held


def _plain(value: Any) -> Any:
    """A value of the tokenizer's settings where every added token is its text alone."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text[-length] == stop[0] and text.endswith(stop[:length]):
            return length
    return 0


@cache
def _byte_of_letter() -> dict[int, int]:
    """The byte that each letter of a byte-level token stands for, both as numbers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


@cache
def _letters() -> frozenset[str]:
    return frozenset(map(chr, _byte_of_letter()))


def _check_files(folder: Path) -> None:
    for name in (TOKENIZER_NAME, SETTINGS_NAME):
        if not (folder / name).is_file():
            raise TextError(f"{folder / name} is missing; copy the model's own {name} there")
    path = folder / SETTINGS_NAME
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read as JSON: {error}; copy the model's own file again") from error
    if not isinstance(settings, dict):
        raise TextError(f"{path} holds {type(settings).__name__}, a JSON object is needed")
    if settings.get("auto_map"):
        raise TextError(
            f"{path} asks to run code (auto_map {settings['auto_map']!r}), which glint never does; "
            "GLM-4.x tokenizers need no code: remove auto_map or take the original file"
        )


@contextmanager
def _without_advice() -> Iterator[None]:
    before = os.environ.get(_ADVICE_SWITCH)
    os.environ[_ADVICE_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADVICE_SWITCH]
        else:
            os.environ[_ADVICE_SWITCH] = before


def _load(folder: Path) -> Any:
    with _without_advice():
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise TextError(f"transformers is missing ({error}); install glint with its dependencies") from error
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise TextError(
                f"{folder / TOKENIZER_NAME} cannot be read by transformers: {reason[0]}; copy the model's own files"
            ) from error
    if not loaded.is_fast:
        raise TextError(f"{folder / TOKENIZER_NAME} was not read, a {type(loaded).__name__} was made in its place")
    return loaded
