"""The tags that structure a model's output, found in text that comes in pieces."""

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum


class Tag(StrEnum):
    """A tag of the GLM output formats."""

    THINK = "<think>"
    THINK_END = "</think>"
    CALL = "<tool_call>"
    CALL_END = "</tool_call>"
    KEY = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE = "<arg_value>"
    VALUE_END = "</arg_value>"


THINK_TAGS = frozenset({Tag.THINK, Tag.THINK_END})
CALL_TAGS = frozenset(Tag) - THINK_TAGS


def compile_tags(tags: Iterable[Tag]) -> re.Pattern[str]:
    """A pattern that finds the tags."""
    return re.compile("|".join(sorted(tags)))


ALL_PATTERN = compile_tags(Tag)
CALL_PATTERN = compile_tags(CALL_TAGS)
MAX_TAIL = max(map(len, Tag)) - 1


class TagScanner:
    """Cuts text into tags and the text between them.

    Yields every tag as a `Tag` and everything else as plain pieces of text. Holds back only what may be the beginning
    of a tag. Where the model does not know the think tags they are text.
    """

    def __init__(self, knows_think: bool) -> None:
        self._pattern = ALL_PATTERN if knows_think else CALL_PATTERN
        tags = frozenset(Tag) if knows_think else CALL_TAGS
        self._beginnings = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self._tail = ""

    def push(self, text: str) -> Iterator[str]:
        """The tags and texts that are certain once this text has come."""
        text = self._tail + text
        begin = 0
        for match in self._pattern.finditer(text):
            if match.start() > begin:
                yield text[begin : match.start()]
            yield Tag(match[0])
            begin = match.end()
        end = text.rfind("<", max(begin, len(text) - MAX_TAIL))
        if end < 0 or text[end:] not in self._beginnings:
            end = len(text)
        self._tail = text[end:]
        if end > begin:
            yield text[begin:end]

    def finish(self) -> str:
        """The text that was held back and is no tag."""
        tail, self._tail = self._tail, ""
        return tail
