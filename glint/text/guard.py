"""Control tokens that a chat template writes, distinguished from those that a conversation only spells.

A tokenizer turns every text that reads like one of its added tokens, special or not, into that token, so a message
with `<|user|>` in it would begin a turn of its own. Here each such text in a conversation gets a mark inside before the
template sees it: one private-use character that occurs nowhere else. The rendered text is then cut at control tokens
without a mark, which the template wrote, and the rest loses its marks and is encoded by the same tokenizer without any
added tokens.

A text without control tokens is not changed, so templates that test or strip a message find it as it is. The beginning
of a control token at the end of a text, and the end of one at its beginning, are marked as well: a template may put two
texts side by side. What it makes by cutting pieces out of a text is beyond this.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

from glint.errors import TextError

_MARKS: Final = (range(0xF8FF, 0xDFFF, -1), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_TEXT_ID: Final = 0


@dataclass(frozen=True, slots=True)
class PromptText:
    """A rendered conversation. `marked` has the mark inside everything that must not become a control token."""

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def extended(self, markup: str) -> "PromptText":
        """The prompt with markup of the template's kind behind it."""
        return PromptText(self.marked + markup, self.mark)


class Span(NamedTuple):
    """Where a control token stands in a text."""

    begin: int
    end: int
    token: str


class ControlTokens:
    """Finds the control tokens that a tokenizer would make of a text, by the tokenizer's own rules, and marks them.

    Tokens of one character cannot be distinguished from text: they stay what the tokenizer makes of them.
    """

    def __init__(self, added: Iterable[Any], normalizer: Any) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        tokens = [token for token in added if len(token.content) > 1]
        self._finder = Tokenizer(WordLevel({"": _TEXT_ID}, unk_token=""))
        if normalizer is not None:
            self._finder.normalizer = normalizer
        self._finder.add_tokens(tokens)
        names = [token.content for token in tokens]
        self._spellings = names if normalizer is None else [""]
        self._beginnings = frozenset(name[:length] for name in names for length in range(1, len(name)))
        self._endings = frozenset(name[-length:] for name in names for length in range(1, len(name)))
        self._longest = max(map(len, names), default=0)

    def find(self, text: str) -> list[Span]:
        """The control tokens of a text, in order; space that a token takes in belongs to it."""
        try:
            found = self._finder.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise TextError(f"text cannot be encoded: {error}; give a string of valid Unicode") from error
        spans = zip(found.ids, found.offsets, found.tokens, strict=True)
        return [Span(begin, end, token) for index, (begin, end), token in spans if index != _TEXT_ID]

    def mark(self, text: str, mark: str) -> str:
        """The text with the mark inside everything that is a control token, or part of one at either end."""
        text = self._mark_ends(text, mark)
        if not any(spelling in text for spelling in self._spellings):
            return text
        while places := {_inside(text, span) for span in self.find(text)}:
            text = _insert(text, places, mark)
        return text

    def _mark_ends(self, text: str, mark: str) -> str:
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        lengths = range(1, min(self._longest, end - begin + 1))
        places = {end - length + 1 for length in lengths if text[end - length : end] in self._beginnings}
        places |= {begin + length - 1 for length in lengths if text[begin : begin + length] in self._endings}
        return _insert(text, places, mark)


def _inside(text: str, span: Span) -> int:
    """A place inside the token itself, behind the space that it takes in."""
    token = text[span.begin : span.end]
    space = len(token) - len(token.lstrip())
    return span.begin + 1 + (space if space < len(token) - 1 else 0)


def _insert(text: str, places: set[int], mark: str) -> str:
    marks = [0, *sorted(places), len(text)]
    return mark.join(text[begin:end] for begin, end in pairwise(marks)) if places else text


def change_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON data with every string changed, keys as well."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [change_strings(member, change) for member in value]
    if isinstance(value, dict):
        return {change_strings(key, change): change_strings(member, change) for key, member in value.items()}
    return value


def choose_mark(data: Any) -> str:
    """A private-use character that no string of the data has."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    change_strings(data, note)
    used = _used_marks(texts)
    mark = next((chr(code) for code in chain(*_MARKS) if chr(code) not in used), None)
    if mark is None:
        raise TextError("the messages hold every private-use character of Unicode; leave at least one of them out")
    return mark


def _used_marks(texts: Sequence[str]) -> set[str]:
    first = chr(_MARKS[0][0])
    return set().union(*texts) if any(first in text for text in texts) else set()
