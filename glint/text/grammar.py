"""Grammars over tokens: which tokens may come next so that the text meets its constraint."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from ctypes import Array, addressof, c_uint32, sizeof
from dataclasses import replace
from random import Random
from threading import Lock
from time import monotonic
from typing import Any, Final

from glint.errors import TextError
from glint.text.constraint import (
    Choice,
    Constraint,
    GrammarLimits,
    JsonObject,
    JsonSchema,
    Regex,
    ToolCalls,
    WrittenGrammar,
)
from glint.text.schema_check import OPTIONS_KEYWORD, check_options, check_pattern, check_schema, to_json
from glint.text.tokenizer import Tokenizer
from glint.text.tool_grammar import ToolGrammar, check_tools, tag_token_ids
from glint.text.tool_values import quote, to_lark
from glint.text.written_grammar import check_written, written_to_lark

__all__ = [
    "Choice",
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "GrammarLimits",
    "JsonObject",
    "JsonSchema",
    "Matcher",
    "Regex",
    "ToolCalls",
    "WrittenGrammar",
]

_NAMES: Final = {
    JsonObject: "a JSON object",
    JsonSchema: "the JSON schema",
    Regex: "the regex",
    Choice: "the list of choices",
    WrittenGrammar: "the grammar",
    ToolCalls: "the list of tools",
}
SETTINGS: Final = '%llguidance {"no_forcing": true}\n'
JSON_OPTIONS: Final = {"whitespace_pattern": r" |\n {0,24}"}
SPECIAL_MARK: Final = b"\xff"
MAX_REASON_LENGTH: Final = 200
PANIC_MODULE: Final = "pyo3_runtime"
TRIAL_TEXTS: Final = 2
TRIAL_TOKENS: Final = 64
TRIAL_PATTERNS: Final = 8
TRIAL_STATES_SHARE: Final = 4


class GrammarCompiler:
    """Turns constraints into grammars for one tokenizer and a model of `vocab_size` rows.

    Safe to use from several threads; `compile` blocks for as long as the limits allow, and gives the same grammar for
    the same constraint as long as it is among the last ones. The first call also prepares the vocabulary. Text is
    compact JSON or JSON with at most one space, or one line break and 24 spaces, between its parts, so that no model
    can fill an answer with space. Special tokens and the tokens of tool tags are never part of text.

    Patterns may need more states, or more work for one token, than the limits allow, and that shows only while a text
    grows. So a grammar with patterns is tried out on a few random texts, with a share of the states, before it is
    used: what fails there is refused. What fails later all the same ends its own request alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        if vocab_size < tokenizer.vocab_size:
            raise TextError(
                f"the model has {vocab_size} rows, the tokenizer of {tokenizer.folder} has tokens up to "
                f"{tokenizer.vocab_size - 1}; copy the model's own tokenizer there"
            )
        if not eos_token_ids or not all(0 <= token_id < tokenizer.vocab_size for token_id in eos_token_ids):
            raise TextError(
                f"end-of-text tokens are {list(eos_token_ids)}; give at least one, from 0 to {tokenizer.vocab_size - 1}"
            )
        tokenizer.require_byte_level()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._limits = limits or GrammarLimits()
        self._tag_ids = tag_token_ids(tokenizer.token_to_id)
        closed = {*self._eos_token_ids, *self._tag_ids.values()}
        self._open_words = _mask_without(closed, tokenizer.vocab_size, vocab_size)
        self._unended_words = _mask_without(set(eos_token_ids), tokenizer.vocab_size, vocab_size)
        self._vocabulary: Any = None
        self._vocabulary_lock = Lock()
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._grammars_lock = Lock()

    def prepare(self) -> None:
        """Prepares the vocabulary now, so that the first constraint does not wait for it."""
        self._prepared_vocabulary()

    def compile(self, constraint: Constraint) -> "Grammar":
        """Gives the grammar of a constraint; raises TextError that names what is wrong with it."""
        key = _check(constraint, self._limits)
        with self._grammars_lock:
            known = self._grammars.get(key)
            if known is not None:
                self._grammars.move_to_end(key)
        if known is not None:
            known.refresh()
            return known
        source = self._write(constraint)
        name = _NAMES[type(constraint)]
        if isinstance(constraint, Regex | WrittenGrammar):
            self._try_out([source], name)
        elif isinstance(constraint, JsonSchema):
            strings = [{"type": "string", "pattern": pattern} for pattern in _patterns_of(constraint.schema)]
            self._try_out([f"start: {_json_rule(schema)}" for schema in strings] + [source] * bool(strings), name)
        grammar = Grammar(lambda: self._build(source), self._eos_token_ids, self._open_words, name)
        with self._grammars_lock:
            self._grammars[key] = grammar
            while len(self._grammars) > self._limits.max_cached_grammars:
                self._grammars.popitem(last=False)
        return grammar

    def _write(self, constraint: Constraint) -> str:
        if isinstance(constraint, JsonObject | JsonSchema):
            return f"start: {_json_rule(constraint.as_schema)}"
        if isinstance(constraint, Regex):
            return f"start: TEXT\nTEXT: /{to_lark(constraint.pattern, 'd')}/"
        if isinstance(constraint, Choice):
            return f"start: TEXT\nTEXT: {' | '.join(quote(option) for option in dict.fromkeys(constraint.options))}"
        if isinstance(constraint, WrittenGrammar):
            return written_to_lark(constraint.source)
        return self._write_tools(constraint)

    def _write_tools(self, constraint: ToolCalls) -> str:
        """Leaves those tools free that are not strict and whose schema cannot be held."""
        deadline = monotonic() + self._limits.max_seconds
        free: set[str] = set()
        for tool in constraint.tools:
            single = ToolGrammar(ToolCalls((tool,), True, False), self._tag_ids, _json_rule)
            try:
                source, what = single.build(frozenset()), f"the schema of tool {tool.name!r}"
                self._validate(source, what)
                self._try_out([source, source] if _patterns_of(tool.parameters) else [], what)
            except TextError:
                if tool.is_strict:
                    raise
                free.add(tool.name)
            if monotonic() > deadline:
                raise TextError(f"the schemas of the tools are too complex by tool {tool.name!r}; use simpler ones")
        return ToolGrammar(constraint, self._tag_ids, _json_rule).build(frozenset(free))

    def _validate(self, source: str, what: str) -> None:
        from llguidance import LLMatcher

        words, limits = self._prepared_vocabulary(), self._library_limits()
        reason = _guarded(lambda: LLMatcher.validate_grammar(SETTINGS + source, words, limits=limits))
        if reason:
            raise TextError(f"{what} cannot be used as a grammar: {explain(reason)}")

    def _try_out(self, sources: Sequence[str], what: str) -> None:
        """Raises TextError where one of the grammars cannot go on in the middle of a random text of its own."""
        limits = replace(self._limits, max_lexer_states=self._limits.max_lexer_states // TRIAL_STATES_SHARE)
        for seed, source in enumerate(TRIAL_TEXTS * list(sources)):
            reason = _follow_random_text(self._build(source, limits), Random(seed), self._unended_words)
            if reason:
                raise TextError(f"{what} cannot be used as a grammar: {explain(reason)}")

    def _build(self, source: str, limits: GrammarLimits | None = None) -> Any:
        from llguidance import LLMatcher

        words, most = self._prepared_vocabulary(), self._library_limits(limits)
        return _guarded(lambda: LLMatcher(words, SETTINGS + source, log_level=0, limits=most))

    def _library_limits(self, lowered: GrammarLimits | None = None) -> Any:
        from llguidance import LLParserLimits

        limits = lowered or self._limits
        return LLParserLimits(
            initial_lexer_fuel=limits.initial_fuel,
            step_lexer_fuel=limits.step_fuel,
            step_max_items=limits.max_step_items,
            max_lexer_states=limits.max_lexer_states,
            max_grammar_size=limits.max_grammar_size,
            verbose_errors=False,
        )

    def _prepared_vocabulary(self) -> Any:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._prepare_vocabulary()
            return self._vocabulary

    def _prepare_vocabulary(self) -> Any:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise TextError(f"llguidance is missing ({error}); install glint with its dependencies") from error
        words = _Vocabulary(self._tokenizer, self._vocab_size, {*self._eos_token_ids, *self._tag_ids.values()})
        return LLTokenizer(TokenizerWrapper(words), eos_token=list(self._eos_token_ids))


class Grammar:
    """The form of a text; shared by any number of matchers, from any thread.

    Raises TextError if the grammar cannot be built or has no token to begin with.
    """

    def __init__(
        self, build: Callable[[], Any], eos_token_ids: tuple[int, ...], open_words: "Array[c_uint32]", what: str
    ) -> None:
        """`open_words` is the mask before the grammar begins."""
        self._build = build
        self._eos_token_ids = eos_token_ids
        self._open_words = open_words
        self._lock = Lock()
        self._first = build()
        if self._first.is_error():
            raise TextError(f"{what} cannot be used as a grammar: {explain(self._first.get_error())}")
        try:
            self.start().mask()
        except TextError as error:
            raise TextError(f"{what} cannot be used as a grammar: {error}") from error

    def refresh(self) -> None:
        """Build anew what a failed matcher has used up, so that `start` does not have to."""
        with self._lock:
            if self._first is None:
                self._first = self._build()

    def start(self, begins_after: int | None = None) -> "Matcher":
        """Gives a matcher at its beginning.

        With `begins_after` the grammar holds from that token on. Until then every text is allowed, but neither its end
        nor a tool call: the grammar would never begin.
        """
        with self._lock:
            if self._first is None:
                self._first = self._build()
            inner = self._first.deep_copy()
        return Matcher(inner, self._eos_token_ids, self._open_words, begins_after, self._build_alone)

    def _build_alone(self) -> Any:
        """A matcher with states of its own; those that matchers share are taken to be used up."""
        with self._lock:
            self._first = None
        return self._build()


class Matcher:
    """Follows one text through a grammar, token by token.

    Not to be used from two threads at once. Every failure is a TextError, after which the matcher is of no use.
    Matchers of one grammar share the states that they have found, which are limited. A matcher that finds them used up
    goes on with states of its own, so a text fails by what it needs itself, never by what others needed.
    """

    def __init__(
        self,
        inner: Any,
        eos_token_ids: tuple[int, ...],
        open_words: "Array[c_uint32]",
        begins_after: int | None,
        build_alone: Callable[[], Any],
    ) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._open_words = open_words
        self._words = (c_uint32 * len(open_words))()
        self._begins_after = begins_after
        self._is_current = False
        self._is_ended = False
        self._build_alone: Callable[[], Any] | None = build_alone
        self._taken: list[int] = []

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow: the grammar is complete, or an end-of-text token was accepted."""
        return self._is_ended

    def mask(self) -> "Array[c_uint32]":
        """Gives one bit for each token that may come next, 32 to a word.

        The array belongs to the matcher and holds until its next call. Where the text may end here, the bits of all
        end-of-text tokens are set, and only those where it must.
        """
        if self._begins_after is not None and not self._is_ended:
            return self._open_words
        if not self._is_current:
            self._inner.unsafe_compute_mask_ptr(addressof(self._words), sizeof(self._words))
            if self._inner.is_error() and self._goes_on_alone():
                self._inner.unsafe_compute_mask_ptr(addressof(self._words), sizeof(self._words))
            if self._inner.is_error():
                raise self._fail("no next token can be found")
            self._is_current = True
        return self._words

    def accept(self, token_id: int) -> None:
        """Takes in the token that came; raises TextError for one that the mask does not have."""
        if self._is_ended and token_id not in self._eos_token_ids:
            raise TextError(f"token {token_id} came after the end of the grammar; stop where is_finished is true")
        if self._begins_after is not None:
            self._is_ended = token_id in self._eos_token_ids
            if token_id == self._begins_after:
                self._begins_after = None
            return
        if self._is_ended:
            return
        is_allowed = 0 <= token_id < 32 * len(self._words) and self._takes(token_id)
        if not is_allowed:
            raise self._fail(f"token {token_id} does not fit")
        self._taken.append(token_id)
        self._is_current = False
        self._is_ended = self._inner.is_stopped()

    def fork(self) -> "Matcher":
        """Gives another matcher at the same place, which goes its own way."""
        other = copy(self)
        other._inner = self._inner.deep_copy()
        other._words = (c_uint32 * len(self._words))()
        other._is_current = False
        other._taken = [*self._taken]
        return other

    def _takes(self, token_id: int) -> bool:
        is_taken = self._inner.consume_token(token_id) and not self._inner.is_error()
        return is_taken or (self._goes_on_alone() and self._takes(token_id))

    def _goes_on_alone(self) -> bool:
        """Follow the text so far once more, with states of its own; false if that was done before."""
        build, self._build_alone = self._build_alone, None
        if build is None:
            return False
        self._inner = build()
        return all(self._inner.consume_token(token_id) for token_id in self._taken) and not self._inner.is_error()

    def _fail(self, what: str) -> TextError:
        return TextError(f"{what}: {explain(self._inner.get_error())}")


def _mask_without(token_ids: set[int], num_tokens: int, vocab_size: int) -> "Array[c_uint32]":
    """A mask over a model's rows that has every token of the tokenizer but these."""
    words = (c_uint32 * ((vocab_size + 31) // 32))(*([0xFFFFFFFF] * (num_tokens // 32)))
    if num_tokens % 32:
        words[num_tokens // 32] = (1 << num_tokens % 32) - 1
    for token_id in token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF
    return words


class _Vocabulary:
    """The bytes of all tokens as the library takes them; an id without text is never part of a text."""

    bos_token_id: Final = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, control_ids: set[int]) -> None:
        self._tokenizer = tokenizer
        specials = {token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)}
        self.special_token_ids = sorted(specials | control_ids)
        self.eos_token_id = min(control_ids)
        self.tokens = [*_texts(tokenizer), *([b""] * (vocab_size - tokenizer.vocab_size))]

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text; the library asks for them only where it forces text, which is off."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


def _guarded(work: Callable[[], Any]) -> Any:
    """Does the work; a panic of the library, which Python would not take for an ordinary error, is a TextError."""
    try:
        return work()
    except BaseException as error:
        if type(error).__module__ != PANIC_MODULE:
            raise
        raise TextError(f"the constraint cannot be used as a grammar: {explain('')}") from error


def _patterns_of(schema: object) -> list[str]:
    """The patterns that stand anywhere in a schema, the longest ones if there are many."""
    patterns: set[str] = set()
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            patterns |= {node["pattern"]} if isinstance(node.get("pattern"), str) else set()
            pending += node.values()
        elif isinstance(node, list | tuple):
            pending += node
    return sorted(patterns, key=lambda pattern: (-len(pattern), pattern))[:TRIAL_PATTERNS]


def _follow_random_text(inner: Any, chance: Random, usable: "Array[c_uint32]") -> str:
    """Lets a text grow by random tokens of the mask `usable`; gives the library's reason if it cannot go on.

    A grammar that cannot even begin is no matter of this.
    """
    words = (c_uint32 * len(usable))()
    for _ in range(0 if inner.is_error() else TRIAL_TOKENS):
        inner.unsafe_compute_mask_ptr(addressof(words), sizeof(words))
        if inner.is_error():
            return str(inner.get_error())
        found = [(index, word & usable[index]) for index, word in enumerate(words) if word & usable[index]]
        if not found:
            return ""
        index, word = chance.choice(found)
        bit = chance.choice([bit for bit in range(32) if word >> bit & 1])
        inner.consume_token(32 * index + bit)
    return ""


def _texts(tokenizer: Tokenizer) -> Iterator[bytes]:
    for token_id in range(tokenizer.vocab_size):
        word = tokenizer.token_bytes(token_id)
        yield b"" if word.startswith(SPECIAL_MARK) else word


def explain(reason: str) -> str:
    """The cause in the library's message, without its place in the grammar, the grammar itself and its internals."""
    lines = [line.strip() for line in reason.strip().splitlines()] or [""]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = errors[0] if errors else re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", lines[0])
    for pattern, meaning in _MEANINGS:
        match = re.search(pattern, text)
        if match:
            return match.expand(meaning)
    if not text or ".rs" in text or "panick" in text:
        return "it is beyond what the grammar library can do; make it simpler"
    return text[:MAX_REASON_LENGTH]


_ADVICE: Final = "use a simpler pattern, in a JSON schema one between ^ and $"
_MEANINGS: Final = (
    (r"Unimplemented keys: \[(.*)\]", r"keywords that are not supported: \1; remove them"),
    (r"Unknown format: (.*)", r'the format "\1" is not supported; remove it or use a pattern'),
    (r"oneOf constraints are not supported", "oneOf is supported only for schemas that exclude each other; use anyOf"),
    (r"Unable to determine if regex is empty", "its patterns together are too complex; use fewer or simpler ones"),
    (r"Unsatisfiable schema: (?:Regex is empty)", "no string fits all of its patterns and lengths"),
    (r"circular references with sibling keys", "a $ref with keywords beside it refers to itself"),
    (r"lookarounds not supported", "^, $ and word boundaries are not supported inside a regex; anchor only its ends"),
    (r"Pointer '(.*)' does not exist", r'the reference "#\1" points to nothing'),
    (r"too many states", f"it is too complex: its patterns reach the limit of lexer states; {_ADVICE}"),
    (r"too many expressions|fuel", f"it is too complex: it reaches the limit of work for one token; {_ADVICE}"),
    (
        r"(?i)too many|too big|too large|precomputation|items; max",
        "it is too complex; use a smaller schema or a simpler pattern",
    ),
    (r"NoExtension|no token", "there is no text that fits and that the model has tokens for"),
    (r"Expected f64 for (.*), got (.*)", r"\1 must be a number and is \2"),
    (r"Failed to generate regex for", "its range of numbers is beyond what can be held; use other bounds"),
    (r"Unsatisfiable schema: (.*)", r"no value fits it: \1"),
    (r"doesn't satisfy the grammar", "the grammar does not allow it"),
)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {to_json({**schema, OPTIONS_KEYWORD: JSON_OPTIONS}, 'the JSON schema')}"


def _check(constraint: Constraint, limits: GrammarLimits) -> str:
    """Raises TextError for what is too large or malformed; gives the text that tells the constraint from others."""
    parts: list[object] = [type(constraint).__name__]
    if isinstance(constraint, JsonSchema):
        check_schema(constraint.schema, "the JSON schema", limits)
        if constraint.schema is False:
            raise TextError("the JSON schema is false, which allows no value; give a schema that allows one")
        parts += [constraint.schema]
    elif isinstance(constraint, Regex):
        parts += [check_pattern(constraint.pattern, "the regex", limits)]
    elif isinstance(constraint, WrittenGrammar):
        parts += [check_written(constraint.source, limits)]
    elif isinstance(constraint, Choice):
        parts += [check_options(constraint.options, limits)]
    elif isinstance(constraint, ToolCalls):
        check_tools(constraint.tools, limits)
        parts += [(tool.name, tool.parameters, tool.is_strict) for tool in constraint.tools]
        parts += [constraint.is_required, constraint.allows_several]
        parts += [] if constraint.answer is None else [_check(constraint.answer, limits)]
    return to_json(parts, "the constraint")
