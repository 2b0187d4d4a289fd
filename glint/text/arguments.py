"""Arguments of a tool call as JSON: the types come from the tool's schema, the bytes from the model.

The GLM formats write every value as bare text, so only the schema tells a number from a string. What may be a string
and nothing else is escaped and passed on as it comes; every other value is kept until it is whole, and passed on as
the model wrote it if it is JSON of a declared type, as a JSON string if it is not. So the result is always valid JSON.

Models sometimes write an array or an object as JSON that is escaped once too often or as a Python literal, and a
boolean as True or False. Where the schema allows no string, such a value becomes the JSON that it stands for. No byte
of any other value is ever changed.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

ENCODER = json.JSONEncoder(ensure_ascii=False)
JSON_SPACE = " \t\r\n"
MAX_SCHEMA_DEPTH = 64
MAX_VALUE_DEPTH = 128
MAX_LITERAL_CHARS = 262_144
PYTHON_BOOLEANS = {"True": "true", "False": "false"}
ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
OBJECT_KEYWORDS = ("properties", "additionalProperties", "required")
ARRAY_KEYWORDS = ("items", "prefixItems")
UNION_KEYWORDS = ("anyOf", "oneOf")
BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
ANY_KEY = re.compile(r"[\w.\-]{1,64}")


def to_json_string(text: str) -> str:
    """The text as a JSON string; characters beyond ASCII stay as they are."""
    return ENCODER.encode(text)


def escape_json(text: str) -> str:
    """The text as it stands inside a JSON string; pieces may be escaped one by one and joined."""
    return to_json_string(text)[1:-1]


def kinds_of(value: object) -> frozenset[str]:
    """The JSON types that a parsed value belongs to; 5 and 5.0 are both an integer and a number."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    if value is None:
        return frozenset({"null"})
    return frozenset({"object"}) if isinstance(value, Mapping) else frozenset({"array"})


def refuse_constant(name: str) -> None:
    """Refuse NaN and the infinities, which Python reads and JSON does not know."""
    raise ValueError(f"{name} is not JSON")


def is_nested_too_deep(text: str) -> bool:
    """Whether JSON text opens more than `MAX_VALUE_DEPTH` brackets at once; brackets inside strings do not count."""
    depth = 0
    for match in BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
            if depth > MAX_VALUE_DEPTH:
                return True
        elif match[0] in "]}":
            depth -= 1
    return False


def unescape_string(source: str) -> str | None:
    """The string that a JSON string holds; None if the text is no JSON string."""
    try:
        held = json.loads(source) if source.startswith('"') else None
    except ValueError:
        return None
    return held if isinstance(held, str) and is_utf8(held) else None


def unescape_inside(source: str) -> str | None:
    """The string that the text would be inside a JSON string; None if it cannot stand there."""
    try:
        held = str(json.loads(f'"{source}"', strict=False)) if "\\" in source else None
    except ValueError:
        return None
    return held if held is not None and is_utf8(held) else None


def literal_to_json(source: str) -> str | None:
    """A Python literal as JSON; None if it is none, or holds what JSON does not know."""
    if len(source) > MAX_LITERAL_CHARS or not source.startswith(("[", "{", "(")):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(source)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return written if is_utf8(written) else None


def is_utf8(text: str) -> bool:
    """Whether the text can be sent: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ValueType:
    """The values that a schema allows: some JSON types, and strings that are named one by one in an enumeration."""

    types: frozenset[str]
    strings: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """Whether every value is a string, so that its text can be passed on before it is whole."""
        return not self.types - {"string"}

    def to_json(self, text: str) -> str:
        """The value that the model wrote as `text`, as JSON.

        The text itself if it is JSON of a declared type other than string, else the text as a JSON string. Space around
        it is allowed only where no string is. So for string or integer "123" is a number and " 123" is a string;
        a string that the enumeration names stays a string. Where no string is allowed, what almost is JSON is mended.
        """
        can_be_string = "string" in self.types
        source = text.strip(JSON_SPACE)
        if self.is_text or text in self.strings or (can_be_string and source != text) or is_nested_too_deep(source):
            return to_json_string(text)
        if self._has(source):
            return source
        mended = None if can_be_string else self._mend(source)
        return to_json_string(text) if mended is None else mended

    def _has(self, source: str) -> bool:
        """Whether the text is JSON of a declared type other than string."""
        try:
            kinds = kinds_of(json.loads(source, parse_constant=refuse_constant))
        except (ValueError, RecursionError):
            return False
        return bool(kinds & (self.types - {"string"}))

    def _mend(self, source: str) -> str | None:
        """The JSON of a declared boolean, array or object that the model wrote as something close to it; else None."""
        if "boolean" in self.types and source in PYTHON_BOOLEANS:
            return PYTHON_BOOLEANS[source]
        held = ValueType(self.types & {"array", "object"})
        if not held.types:
            return None
        for unescape in (unescape_string, unescape_inside, literal_to_json):
            mended = unescape(source)
            if mended is not None and not is_nested_too_deep(mended) and held._has(mended):
                return mended.strip(JSON_SPACE)
        return None


TEXT = ValueType(frozenset({"string"}))
NOTHING = ValueType(frozenset())


def unite(members: Iterable[ValueType | None]) -> ValueType | None:
    """The type that any member allows; None, which means unknown, if one of them is unknown or there is none."""
    types: frozenset[str] = frozenset()
    strings: frozenset[str] = frozenset()
    is_empty = True
    for member in members:
        if member is None:
            return None
        is_empty = False
        types |= member.types
        strings |= member.strings
    return None if is_empty else ValueType(types, strings)


def intersect(members: Iterable[ValueType | None]) -> ValueType | None:
    """The type of all known members that are not empty; nothing if all known ones are empty, None if none is known."""
    known = [member for member in members if member is not None]
    filled = [member for member in known if member.types]
    if not filled:
        return NOTHING if known else None
    types = frozenset.intersection(*(member.types for member in filled))
    return ValueType(types, frozenset().union(*(member.strings for member in filled)))


def follow(root: Mapping[str, Any], reference: object) -> object:
    """The part of a schema that a local reference points to; None if there is none, or if it is not local."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node: object = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(node):
            node = node[int(name[:9])]
        else:
            return None
    return node


def listed_in(schema: Mapping[str, Any], keyword: str) -> list[object]:
    """The members that a keyword such as anyOf or enum lists."""
    listed = schema.get(keyword)
    return listed if isinstance(listed, list) else []


def read_type(schema: Mapping[str, Any]) -> ValueType | None:
    """The type that the keyword `type` alone gives; a name that JSON Schema does not know says nothing."""
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = {name for name in names if isinstance(name, str) and name in ALL_TYPES}
    if "number" in types:
        types.add("integer")
    return ValueType(frozenset(types)) if types else None


def read_values(schema: Mapping[str, Any]) -> ValueType | None:
    """The type that the keywords `enum` and `const` alone give."""
    values = [*listed_in(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    strings = frozenset(value for value in values if isinstance(value, str))
    return unite(ValueType(kinds_of(value), strings) for value in values)


def read_shape(schema: Mapping[str, Any]) -> ValueType | None:
    """The type of keywords that only make sense for one type."""
    if any(keyword in schema for keyword in OBJECT_KEYWORDS):
        return ValueType(frozenset({"object"}))
    return ValueType(frozenset({"array"})) if any(keyword in schema for keyword in ARRAY_KEYWORDS) else None


class ArgumentSchema:
    """The argument names and types that a tool's JSON schema declares.

    Follows local references, anyOf, oneOf and allOf, at the top and inside; anything it cannot understand is taken to
    allow a string. Never raises, and ends on recursive schemas.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self._properties: dict[str, list[object]] = {}
        self._additional: list[object] = []
        self._known: dict[str, ValueType] = {}
        self._collect(parameters, set(), 0)
        self._other = self._read_all(self._additional)

    @property
    def names(self) -> KeysView[str]:
        """The names of the declared arguments."""
        return self._properties.keys()

    def type_of(self, name: str) -> ValueType:
        """The type of an argument: a string where the schema does not say."""
        if name not in self._properties:
            return self._other
        if name not in self._known:
            self._known[name] = self._read_all(self._properties[name])
        return self._known[name]

    def _collect(self, schema: object, seen: set[str], depth: int) -> None:
        if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            for name, member in properties.items():
                self._properties.setdefault(name, []).append(member)
        if isinstance(schema.get("additionalProperties"), Mapping):
            self._additional.append(schema["additionalProperties"])
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            self._collect(follow(self._root, reference), seen, depth + 1)
        for keyword in ("allOf", *UNION_KEYWORDS):
            for member in listed_in(schema, keyword):
                self._collect(member, seen, depth + 1)

    def _read_all(self, schemas: list[object]) -> ValueType:
        found = unite(self._read(schema, {}, 0) for schema in schemas)
        return found if found is not None and found.types else TEXT

    def _read(self, schema: object, references: dict[str, ValueType | None], depth: int) -> ValueType | None:
        if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
            return None
        said = [read_type(schema), read_values(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in references:
                references[reference] = NOTHING
                references[reference] = self._read(follow(self._root, reference), references, depth + 1)
            said.append(references[reference])
        for keyword in UNION_KEYWORDS:
            said.append(unite(self._read(member, references, depth + 1) for member in listed_in(schema, keyword)))
        said += [self._read(member, references, depth + 1) for member in listed_in(schema, "allOf")]
        found = intersect(said)
        if found is None:
            found = read_shape(schema)
        if found is not None and schema.get("nullable") is True:
            return ValueType(found.types | {"null"}, found.strings)
        return found


class ArgumentWriter:
    """Writes the arguments of one call as one JSON object, piece by piece.

    Every method returns the JSON text it adds; all of it joined is a valid object once `end` was called. A name that
    was already given is left out the second time, so that names are unique.
    """

    def __init__(self, schema: ArgumentSchema) -> None:
        self._schema = schema
        self._given: set[str] = set()
        self._type: ValueType | None = None
        self._pieces: list[str] = []

    def begin_value(self, name: str) -> str:
        """Begin the value of an argument."""
        if name in self._given:
            return ""
        separator = "," if self._given else "{"
        self._given.add(name)
        self._type = self._schema.type_of(name)
        return f"{separator}{to_json_string(name)}:" + ('"' if self._type.is_text else "")

    def add_text(self, text: str) -> str:
        """Add text to the value that was begun."""
        if self._type is None:
            return ""
        if self._type.is_text:
            return escape_json(text)
        self._pieces.append(text)
        return ""

    def end_value(self) -> str:
        """End the value that was begun, if any."""
        kind, self._type = self._type, None
        if kind is None:
            return ""
        if kind.is_text:
            return '"'
        text = "".join(self._pieces)
        self._pieces.clear()
        return kind.to_json(text)

    def end(self) -> str:
        """End the object, and the value that was begun, if any."""
        return self.end_value() + ("}" if self._given else "{}")

    def can_follow(self, name: str) -> bool:
        """Whether a tag inside a value may be taken for the next argument's, as it is declared and not yet given.

        Where the tool declares no names any short word will do.
        """
        names = self._schema.names
        return name not in self._given and (name in names if names else ANY_KEY.fullmatch(name) is not None)

    def can_begin(self, text: str) -> bool:
        """Whether `text` may be the beginning of a name that can follow."""
        names = self._schema.names
        if not names:
            return ANY_KEY.fullmatch(text) is not None
        return any(name.startswith(text) and name not in self._given for name in names)
