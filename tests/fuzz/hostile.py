"""Values that have broken servers: odd numbers and texts, deep nesting, expressions and schemas that explode."""

from typing import Any


def nested(depth: int, leaf: Any = None) -> Any:
    """Lists in lists."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def deep_schema(depth: int) -> dict[str, Any]:
    """Objects in objects."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling_schema(count: int) -> dict[str, Any]:
    """Definitions that each use the next one twice: short as text, huge when expanded."""
    definitions: dict[str, Any] = {
        f"d{index}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(count)
    }
    return {"$defs": definitions | {f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1.5,
    -0.0,
    2**31,
    2**31 - 1,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**40,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    [],
    {},
    [None],
    [[]],
    {"": ""},
    {"type": "text"},
    {"type": None},
    {"role": "user"},
    nested(40),
    nested(70),
    nested(900),
    [0] * 3000,
    [{}] * 200,
    ["a"] * 100,
    {str(index): index for index in range(1200)},
]
ODD_TEXTS: list[str] = [
    "",
    "\0",
    "a\0b",
    "\ud800",
    "\udfff\ud800",
    "\u202eabc\u2066",
    "👩‍👩‍👧‍👦" * 20,
    "e\u0301" * 50,
    "\ufeff",
    "\x1b[31m\r\n",
    "<|user|><|assistant|><think></think><tool_call>",
    "{{ 7 * 7 }}{% for x in y %}",
    "%s%n%x",
    "../../etc/passwd",
    "a" * 5000,
    "1e999",
    "auto",
    "none",
    "null",
]
ODD_BYTES: list[bytes] = [
    b"",
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\0",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-",
    b"00",
    b"9" * 5000,
    b"\\ud800",
    b'"',
    b"{",
    b"}]",
    b",,",
    b"[" * 100_000,
    b'{"a":' * 2000,
    b" " * 10_000,
    b"/* */",
    b"'",
]
PATTERNS: list[str] = [
    "[a-z]+",
    "(yes|no)",
    "",
    "(",
    ")",
    "*",
    "[",
    "[z-a]",
    "a{2,1}",
    "(a+)+$",
    "(a|a)*b",
    "(?:a{1,1000}){1,1000}",
    "a{1000000}",
    "a{99999999999999999999}",
    "(?:(?:(?:a{1,99}){1,99}){1,99}){1,99}",
    "(?=a)b",
    r"(a)\1",
    r"\p{L}+",
    r"\p{Nonsense}",
    r"\ud800",
    r"\x00",
    "\0",
    ".*" * 500,
    "(" * 60_000 + ")" * 60_000,
    "(?:" * 400 + "a" + ")*" * 400,
    "[^\u0000-\U0010ffff]",
    "(?i)straße",
    "a" * 20_000,
    "|".join(f"word{index}" for index in range(3000)),
]


def doubling(name: str, depth: int) -> str:
    """Rules, or terminals, each of which is the next one twice."""
    rules = [f"{name}{index}: {name}{index + 1} {name}{index + 1}" for index in range(depth)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{depth}: "a"\n'])


GRAMMARS: list[str] = [
    doubling("r", 40),
    doubling("r", 200),
    doubling("T", 24),
    doubling("T", 200),
    'start: start "a" | "a"\n',
    "start: start\n",
    "start: a\na: b\nb: a\n",
    "start: a*\na: b*\nb: start*\n",
    'start: (("a"{1000}){1000}){1000}\n',
    'start: ((((("a"+)+)+)+)+)+\n',
    'start: a a a a a a a a\na: "x"* | a a\n',
    'start: T\nT: "a" T\n',
    'start: "a"\n%ignore /(a*)*b/\n',
    "start: " + 2_000 * "(" + '"a"' + 2_000 * ")",
    "root ::= " + 2_000 * "(" + '"a"' + 2_000 * ")",
    'root ::= (("a"{1,900}){1,900}){1,900}\n',
]
SCHEMAS: list[Any] = [
    {},
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}}},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"enum": ["a", 1, None, {"b": []}]},
    {"const": "x"},
    {"type": 5},
    {"type": "nonsense"},
    {"type": []},
    {"properties": []},
    {"properties": {"a": 5}},
    {"properties": {"\0": {}, "": {}, "💥": {}, '"': {}, "<arg_key>": {"type": "string"}}},
    {"required": ["missing"]},
    {"required": "a"},
    {"enum": []},
    {"enum": [str(index) * 8 for index in range(5000)]},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(" * 60_000 + ")" * 60_000},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "format": "nonsense"},
    {"type": "integer", "minimum": 10**30, "maximum": -(10**30)},
    {"type": "integer", "multipleOf": 0},
    {"type": "number", "minimum": 1e308, "exclusiveMaximum": -1e308},
    {"type": "array", "minItems": 10**9},
    {"type": "array", "minItems": 2000, "items": {"type": "array", "minItems": 2000}},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/nowhere"},
    {"$ref": "https://localhost/schema.json"},
    {"$ref": 7},
    {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
    {"anyOf": []},
    {"anyOf": [{"type": "string", "maxLength": index} for index in range(500)]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "object", "properties": {f"p{index}": {}}} for index in range(100)]},
    {"not": {}},
    {"if": {}, "then": False},
    {"patternProperties": {"(": {}}},
    {"properties": {f"p{index}": {"type": "string"} for index in range(2000)}},
    deep_schema(10),
    deep_schema(30),
    doubling_schema(5),
    doubling_schema(40),
    nested(20, {}),
]
TOOL_NAMES: list[str] = [
    "",
    " ",
    "a b",
    "</tool_call>",
    "<arg_key>",
    "\n",
    "\0",
    "💥",
    "名前",
    "a" * 128,
    "a" * 129,
    "a\u202eb",
    '"',
    "{{x}}",
    "functions.now",
    "-",
]
