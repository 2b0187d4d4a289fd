"""Bodies of requests as hypothesis strategies, made from the types that the server itself decodes.

Values are plausible where a field has a narrow meaning, so that a good part of the bodies is served; `damaged` then
breaks a body in one of many ways.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from tests.fuzz.hostile import GRAMMARS, ODD_BYTES, ODD_TEXTS, ODD_VALUES, PATTERNS, SCHEMAS, TOOL_NAMES

Values = st.SearchStrategy[Any]
MAX_OPTIONAL_FIELDS = 5
MODEL = "fuzzed"

TEXTS = st.sampled_from(["a", "hello world", "Name a colour.", "", "über", "日本", "😀", " "]) | st.text(max_size=12)
TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=3)
ARGUMENTS = OBJECTS.map(json.dumps) | TEXTS | st.sampled_from(["{}", "{", "[]", "null", '{"a":1}x', '{"a":NaN}', '"'])
NAMES = st.sampled_from(["get_weather", "now", "a.b-c"]) | st.sampled_from(TOOL_NAMES)
SCHEMA = st.sampled_from(SCHEMAS)
PATTERN = st.sampled_from(PATTERNS)
GRAMMAR = st.sampled_from(GRAMMARS)


def _one(**fields: Values) -> Values:
    return st.fixed_dictionaries(fields)


_TEXT_PART = _one(type=st.just("text"), text=TEXTS)
_CALL = _one(id=TEXTS, type=st.just("function"), function=_one(name=NAMES, arguments=ARGUMENTS | OBJECTS))
_QUESTION = _one(role=st.just("user"), content=st.sampled_from(["Hello?", "What is the weather in Paris?"]))
_ANY_MESSAGES: Values = st.lists(
    _one(role=st.sampled_from(["user", "system", "developer"]), content=TEXTS | st.lists(_TEXT_PART, max_size=2))
    | _one(role=st.just("assistant"), content=TEXTS | st.none(), reasoning_content=TEXTS)
    | _one(role=st.just("assistant"), content=st.none(), tool_calls=st.lists(_CALL, min_size=1, max_size=2))
    | _one(role=st.just("tool"), tool_call_id=TEXTS, content=TEXTS)
    | OBJECTS,
    max_size=3,
)
CHAT_MESSAGES = st.one_of(
    _ANY_MESSAGES,
    st.lists(_QUESTION, min_size=1, max_size=2),
    st.builds(lambda first, last: [*first, last], _ANY_MESSAGES, _QUESTION),
)
INPUT_ITEMS: Values = st.lists(
    _one(type=st.just("message"), role=st.sampled_from(["user", "assistant", "system", "developer"]), content=TEXTS)
    | _one(role=st.just("user"), content=st.lists(_one(type=st.just("input_text"), text=TEXTS), max_size=2))
    | _one(type=st.just("function_call"), call_id=TEXTS, name=NAMES, arguments=ARGUMENTS)
    | _one(type=st.just("function_call_output"), call_id=TEXTS, output=TEXTS)
    | _one(type=st.just("reasoning"), id=TEXTS, summary=st.just([]), encrypted_content=TEXTS)
    | OBJECTS,
    max_size=4,
)
_TINY = st.integers(1, 4)
_SHARE = st.floats(0, 1, exclude_min=True)
_STOP = st.sampled_from(["a", "\n", "the", "", "</think>"])
_PENALTY = st.floats(-2, 2)
PLAUSIBLE: Mapping[str, Values] = {
    "model": st.sampled_from([MODEL] * 9 + ["other"]),
    "max_tokens": _TINY,
    "max_completion_tokens": _TINY,
    "max_output_tokens": _TINY,
    "budget_tokens": st.sampled_from([4, 1024, 3]),
    "temperature": st.sampled_from([0, 0.0, 0.5, 1, 1.5]),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_k": st.sampled_from([-1, 0, 1, 40]),
    "repetition_penalty": st.sampled_from([0.9, 1, 1.2]),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.sampled_from([-100, -1, 1.5, 100]), max_size=3),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 3),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": _STOP | st.lists(_STOP, max_size=3),
    "stop_sequences": st.lists(_STOP, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "top_logprobs": st.integers(0, 20),
    "deadline_seconds": st.sampled_from([60, 100.5, 0.001]),
    "prompt": TEXTS | TOKENS,
    "structured_outputs": st.one_of(
        _one(json=SCHEMA), _one(regex=PATTERN), _one(grammar=GRAMMAR), _one(choice=st.lists(TEXTS, max_size=3))
    ),
    "tokens": TOKENS,
    "input": TEXTS | INPUT_ITEMS | OBJECTS,
    "arguments": ARGUMENTS,
    "name": NAMES,
    "parameters": SCHEMA,
    "input_schema": SCHEMA,
    "schema": SCHEMA,
    "json": SCHEMA,
    "regex": PATTERN,
    "pattern": PATTERN,
    "choice": st.lists(TEXTS, max_size=3),
    "choices": st.lists(TEXTS, max_size=3),
}
LENGTH_FIELDS = ("max_tokens", "max_output_tokens")
NEEDS = {"stream_options": "stream", "tool_choice": "tools", "top_logprobs": "logprobs"}


def values_of(kind: inspect.Type) -> Values:
    """Values that a decoder of this type takes."""
    match kind:
        case inspect.StructType():
            return struct_values(kind)
        case inspect.UnionType(types=types):
            return st.one_of([values_of(each) for each in types])
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.ListType(item_type=item):
            return CHAT_MESSAGES if isinstance(item, inspect.DictType) else st.lists(values_of(item), max_size=3)
        case inspect.TupleType():
            return st.just([])
        case inspect.DictType(value_type=inspect.AnyType()):
            return OBJECTS
        case inspect.DictType(value_type=value):
            return st.dictionaries(TEXTS, values_of(value), max_size=2)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(0, 5)
        case inspect.FloatType():
            return st.floats(0, 2)
        case inspect.StrType():
            return TEXTS
        case _:
            raise NotImplementedError(f"no strategy for {kind!r}: add one here")


def struct_values(kind: inspect.StructType) -> Values:
    """Objects with all required fields and a few of the others; an answer's length is always asked for."""
    strategies = {
        field.encode_name: PLAUSIBLE[field.encode_name] if field.encode_name in PLAUSIBLE else values_of(field.type)
        for field in kind.fields
    }
    required = [field.encode_name for field in kind.fields if field.required]
    required += [name for name in LENGTH_FIELDS if name in strategies and name not in required]
    others = [name for name in strategies if name not in required]

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        chosen = draw(st.lists(st.sampled_from(others), max_size=MAX_OPTIONAL_FIELDS, unique=True)) if others else []
        tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        document = tag | {name: draw(strategies[name]) for name in [*required, *chosen]}
        if draw(st.integers(0, 4)):
            for name, needed in NEEDS.items():
                if name in document and needed in strategies:
                    document[needed] = True if needed in ("stream", "logprobs") else draw(strategies[needed])
        return document

    return build()


def bodies_of(body: type[msgspec.Struct]) -> Values:
    """Bodies of one route."""
    kind = inspect.type_info(body)
    assert isinstance(kind, inspect.StructType)
    return struct_values(kind)


def constrained(path: str) -> Values:
    """Bodies whose answer must fit a schema, an expression or a tool, however hostile it is."""
    schema = _one(schema=SCHEMA, name=st.just("a"))
    tool = _one(name=NAMES, parameters=SCHEMA, strict=st.booleans())
    common: dict[str, Values] = {"stream": st.booleans(), "temperature": st.just(0)}
    match path:
        case "/v1/messages":
            named = _one(name=NAMES, input_schema=SCHEMA, strict=st.booleans())
            base = common | {"model": st.just(MODEL), "max_tokens": _TINY, "messages": st.lists(_QUESTION, min_size=1)}
            return _one(**base, output_config=_one(format=_one(type=st.just("json_schema"), schema=SCHEMA))) | _one(
                **base, tools=st.lists(named, min_size=1, max_size=2), tool_choice=st.just({"type": "any"})
            )
        case "/v1/responses":
            base = common | {"max_output_tokens": _TINY, "input": st.just("Hello?")}
            return _one(**base, text=_one(format=schema.map(lambda made: made | {"type": "json_schema"}))) | _one(
                **base,
                tools=st.lists(tool.map(lambda made: made | {"type": "function"}), min_size=1, max_size=2),
                tool_choice=st.just("required"),
            )
        case "/v1/chat/completions":
            base = common | {"max_tokens": _TINY, "messages": st.lists(_QUESTION, min_size=1, max_size=1)}
            formats = st.one_of(
                _one(type=st.just("json_schema"), json_schema=schema), _one(type=st.just("regex"), pattern=PATTERN)
            )
            return _one(**base, response_format=formats, enable_thinking=st.booleans()) | _one(
                **base,
                tools=st.lists(_one(type=st.just("function"), function=tool), min_size=1, max_size=2),
                tool_choice=st.sampled_from(["required", "auto", "none"]),
            )
        case _:
            base = common | {"max_tokens": _TINY, "prompt": st.just("Hello?")}
            return _one(**base, structured_outputs=PLAUSIBLE["structured_outputs"])


def encode(document: Any) -> bytes:
    """JSON as Python writes it: lone surrogates are escaped, and what is not finite is NaN or Infinity."""
    return json.dumps(document).encode()


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with each of its keys."""
    found: list[tuple[Any, Any]] = []
    level = [document]
    while level:
        holder = level.pop()
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        found += [(holder, key) for key in keys]
        level += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return found


def _replace(draw: st.DrawFn, document: Any) -> bytes:
    places = _places(document)
    if places:
        holder, key = draw(st.sampled_from(places))
        holder[key] = draw(st.sampled_from(ODD_VALUES) | st.sampled_from(ODD_TEXTS) | JSON)
    return encode(document)


def _remove(draw: st.DrawFn, document: Any) -> bytes:
    places = _places(document)
    if places:
        holder, key = draw(st.sampled_from(places))
        del holder[key]
    return encode(document)


def _add(draw: st.DrawFn, document: Any) -> bytes:
    holders = [document, *(holder[key] for holder, key in _places(document) if isinstance(holder[key], dict))]
    holder = draw(st.sampled_from(holders))
    holder[draw(st.sampled_from(["unknown", "stream", "tools", "", "__class__", "n"]) | TEXTS)] = draw(JSON)
    return encode(document)


def _cut(draw: st.DrawFn, document: Any) -> bytes:
    raw = encode(document)
    return raw[: draw(st.integers(0, len(raw)))]


def _insert(draw: st.DrawFn, document: Any) -> bytes:
    raw = encode(document)
    first = draw(st.integers(0, len(raw)))
    last = min(len(raw), first + draw(st.sampled_from([0, 0, 1, 4])))
    return raw[:first] + draw(st.sampled_from(ODD_BYTES)) + raw[last:]


def _other(draw: st.DrawFn, document: Any) -> bytes:
    return encode(draw(JSON))


DAMAGES: list[Callable[[st.DrawFn, Any], bytes]] = [_replace, _replace, _replace, _remove, _add, _cut, _insert, _other]


@st.composite
def damaged(draw: st.DrawFn, bodies: Values) -> bytes:
    """A body with one thing wrong, or with something odd that may still be right."""
    document = json.loads(encode(draw(bodies)))
    return draw(st.sampled_from(DAMAGES))(draw, document)
