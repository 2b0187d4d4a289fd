"""The inside of a tool call, from behind its name to its closing tag, read as it comes."""

from collections.abc import Callable
from enum import Enum, auto

from glint.text.arguments import ArgumentSchema, ArgumentWriter
from glint.text.tags import Tag


class State(Enum):
    """Where a call stands; the last three are inside a value, after a tag that may end it."""

    BETWEEN = auto()
    KEY = auto()
    VALUE_START = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    NEXT_KEY = auto()
    AFTER_CALL = auto()


AFTER_TAG: dict[str, State] = {
    Tag.VALUE_END: State.AFTER_VALUE,
    Tag.KEY: State.NEXT_KEY,
    Tag.CALL_END: State.AFTER_CALL,
}


class CallReader:
    """Reads the keys and values of one call and gives its arguments as JSON.

    Values hold any text, tags as well, so a tag inside a value counts only where the format lets it stand:
    `</arg_value>` before the next key, the end of the call, a call or the end of the output; `</tool_call>` before
    another call or the end of the output; `<arg_key>` before the name of a declared argument that was not yet given.
    Else it is text of the value.
    """

    def __init__(self, schema: ArgumentSchema, first_key: str | None = None) -> None:
        self.is_over = False
        self._writer = ArgumentWriter(schema)
        self._state = State.BETWEEN if first_key is None else State.KEY
        self._key = [] if first_key is None else [first_key]
        self._held: list[str] = []
        self._json: list[str] = []

    def read(self, token: str) -> bool:
        """Read a tag or a text. False: it is no part of this call, which `is_over`."""
        while not STEPS[self._state](self, token):
            if self.is_over:
                return False
        return True

    def finish(self, tail: str) -> None:
        """End the call at the end of the output: an open value is kept, a key without a value is not.

        A tag that may end a value ends it, whole or cut. `tail` is what may be the beginning of a tag: it is text only
        inside a value, and only where no tag that begins so may end the value.
        """
        if self._state is State.VALUE and not any(tag.startswith(tail) for tag in AFTER_TAG):
            self._json.append(self._writer.add_text(tail))
        self._end()

    def take_json(self) -> str:
        """The text of the arguments that was added since it was last asked for."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def _end(self) -> None:
        self._json.append(self._writer.end())
        self.is_over = True

    def _read_end(self, token: str) -> bool:
        """End the call at its closing tag, or before the tag that opens the next one."""
        self._end()
        return token is Tag.CALL_END

    def _begin_value(self) -> None:
        self._json.append(self._writer.begin_value("".join(self._key).strip()))
        self._state = State.VALUE

    def _begin_key(self) -> None:
        self._json.append(self._writer.end_value())
        self._key = []
        self._state = State.KEY

    def _read_between(self, token: str) -> bool:
        if token is Tag.KEY:
            self._begin_key()
        elif token is Tag.VALUE:
            self._key = []
            self._begin_value()
        elif token is Tag.CALL_END or token is Tag.CALL:
            return self._read_end(token)
        elif token is not Tag.KEY_END and token is not Tag.VALUE_END and token.strip():
            self._end()
            return False
        return True

    def _read_key(self, token: str) -> bool:
        if token is Tag.KEY:
            self._begin_key()
        elif token is Tag.KEY_END or token is Tag.VALUE_END:
            self._state = State.VALUE_START
        elif token is Tag.VALUE:
            self._begin_value()
        elif token is Tag.CALL_END or token is Tag.CALL:
            return self._read_end(token)
        else:
            self._key.append(token)
        return True

    def _read_value_start(self, token: str) -> bool:
        if token is Tag.KEY:
            self._begin_key()
        elif token is Tag.VALUE:
            self._begin_value()
        elif token is Tag.VALUE_END:
            self._begin_value()
            return False
        elif token is Tag.CALL_END or token is Tag.CALL:
            return self._read_end(token)
        elif token is not Tag.KEY_END and token.strip():
            self._begin_value()
            self._json.append(self._writer.add_text(token.lstrip()))
        return True

    def _read_value(self, token: str) -> bool:
        state = AFTER_TAG.get(token)
        if state is None:
            self._json.append(self._writer.add_text(token))
        else:
            self._state = state
            self._held = [token]
            self._key = []
        return True

    def _keep_held(self) -> None:
        """The tag that was met inside a value, and what followed it, are text of the value."""
        self._state = State.VALUE
        self._json.append(self._writer.add_text("".join(self._held)))

    def _read_after_value(self, token: str) -> bool:
        if token is Tag.KEY:
            self._begin_key()
        elif token is Tag.CALL_END or token is Tag.CALL:
            return self._read_end(token)
        elif isinstance(token, Tag):
            self._keep_held()
            return False
        elif token.strip():
            self._state = State.NEXT_KEY
            return self._hold_key(token, token.lstrip())
        else:
            self._held.append(token)
        return True

    def _read_next_key(self, token: str) -> bool:
        if not isinstance(token, Tag):
            return self._hold_key(token, token)
        key = "".join(self._key)
        if token is Tag.KEY_END and self._writer.can_follow(key):
            self._begin_key()
            self._key = [key]
            self._state = State.VALUE_START
            return True
        self._keep_held()
        return False

    def _hold_key(self, text: str, key_text: str) -> bool:
        self._held.append(text)
        self._key.append(key_text)
        if not self._writer.can_begin("".join(self._key)):
            self._keep_held()
        return True

    def _read_after_call(self, token: str) -> bool:
        if token is Tag.CALL:
            return self._read_end(token)
        if not token.strip():
            self._held.append(token)
            return True
        self._keep_held()
        return False


STEPS: dict[State, Callable[[CallReader, str], bool]] = {
    State.BETWEEN: CallReader._read_between,
    State.KEY: CallReader._read_key,
    State.VALUE_START: CallReader._read_value_start,
    State.VALUE: CallReader._read_value,
    State.AFTER_VALUE: CallReader._read_after_value,
    State.NEXT_KEY: CallReader._read_next_key,
    State.AFTER_CALL: CallReader._read_after_call,
}
