"""Types of argument values: from the tool's JSON schema, and never at the price of a byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glint.text.arguments import ArgumentSchema
from glint.text.tools import Tool
from tests.pure.output_text import arguments_of, read_pieces

DEFS = {
    "Int": {"type": "integer"},
    "Text": {"type": "string"},
    "Chain": {"$ref": "#/$defs/Int"},
    "Tree": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    "Self": {"$ref": "#/$defs/Self"},
    "a/b~c %": {"type": "boolean"},
}


def value_of(schema: Any, written: str) -> Any:
    """What an argument of this schema is once the call is read as JSON."""
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": DEFS, "definitions": DEFS}
    text = f"<tool_call>f<arg_key>v</arg_key><arg_value>{written}</arg_value></tool_call>"
    tools = [Tool("f", parameters=parameters)]
    output = read_pieces([text], tools=tools)
    assert read_pieces(text, tools=tools) == output
    ((_, arguments),) = arguments_of(output)
    return arguments["v"]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "-12345678901234567890123", -12345678901234567890123),
        ({"type": "integer"}, "\n5 ", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "boolean"}, "true", True),
        ({"type": "null"}, "null", None),
        ({"type": "array"}, ' [1, "a]", {}]\n', [1, "a]", {}]),
        ({"type": "object"}, '{"a": "\\u00e9\\n"}', {"a": "é\n"}),
    ],
)
def test_a_value_of_the_declared_type(schema: Any, written: str, value: Any) -> None:
    read = value_of(schema, written)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("type_name", "written"),
    [
        ("integer", "123_456"),
        ("integer", "123abc"),
        ("integer", "0x10"),
        ("integer", "007"),
        ("integer", "+5"),
        ("integer", "5.5"),
        ("integer", "true"),
        ("integer", ""),
        ("integer", " "),
        ("integer", "1 2"),
        ("integer", "\uff11\uff12"),
        ("integer", "9" * 5000),
        ("number", "NaN"),
        ("number", "Infinity"),
        ("number", "-Infinity"),
        ("number", ".5"),
        ("boolean", "TRUE"),
        ("boolean", "'True'"),
        ("boolean", '"true"'),
        ("boolean", "1"),
        ("null", "None"),
        ("array", "{}"),
        ("array", "[1, 2"),
        ("array", "[NaN]"),
        ("array", "[" * 100_000),
        ("array", "[" * 5_000 + "]" * 5_000),
        ("object", "{'a': nope}"),
        ("object", "{'a'}"),
        ("object", "{'a': b'1'}"),
        ("object", "{'a': 1j}"),
        ("object", "{'a': 1e999}"),
        ("object", "{'a': '\\ud800'}"),
        ("object", "{('a',): 1}"),
        ("object", "{'a': __import__('os')}"),
        ("object", "['a']"),
        ("object", "'{}'"),
        ("object", '"[1]"'),
        ("object", '"{"'),
        ("object", "[]"),
        ("array", "[" * 199 + "]" * 199),
        ("array", "['" + '"' + "'," + "[" * 150 + "]" * 150 + "]"),
        ("array", "[" + "-" * 100_000 + "1]"),
        ("array", "['" + "a" * 300_000 + "']"),
        ("array", r"[\"a\", 'b']"),
        ("array", r"[\"\ud800\"]"),
        ("array", "range(3)"),
        ("integer", "'5'"),
        ("integer", '"5"'),
        ("null", "None "),
        ("object", '"text"'),
        ("object", '{"a": "line\nend"}'),
    ],
)
def test_what_is_not_of_the_declared_type_stays_a_string_byte_for_byte(type_name: str, written: str) -> None:
    parameters = {"properties": {"v": {"type": type_name}}}
    text = f"<tool_call>f<arg_key>v</arg_key><arg_value>{written}</arg_value></tool_call>"
    assert arguments_of(read_pieces([text], tools=[Tool("f", parameters=parameters)])) == [("f", {"v": written})]


@pytest.mark.parametrize(
    ("schema", "written", "json_text"),
    [
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "\nFalse ", "false"),
        ({"type": ["boolean", "null"]}, "False", "false"),
        ({"type": "object"}, "{'a': 1, 'b': [True, None, \"it's\"]}", '{"a": 1, "b": [true, null, "it\'s"]}'),
        ({"type": "array"}, "['é', (1, -2.5)]", '["é", [1, -2.5]]'),
        ({"type": "array"}, "('a', 'b')", '["a", "b"]'),
        ({"type": "array"}, r"['\d']", r'["\\d"]'),
        ({"type": "object"}, r"{\"a\": \"say \\\"hi\\\"\"}", r'{"a": "say \"hi\""}'),
        ({"type": "array"}, r"[\"a\",\n {\"b\": 1.10}]", '["a",\n {"b": 1.10}]'),
        ({"type": "array"}, r'"[\"a\", \"b\"]"', '["a", "b"]'),
        ({"type": "object"}, r'"{\"a\": 1}"', '{"a": 1}'),
        ({"type": ["object", "null"]}, "{'a': None}", '{"a": null}'),
        ({"properties": {"a": {}}}, "{'a': 1}", '{"a": 1}'),
        ({"$ref": "#/$defs/Tree"}, "{'left': None}", '{"left": null}'),
    ],
)
def test_what_almost_is_json_is_mended_where_no_string_is_allowed(schema: Any, written: str, json_text: str) -> None:
    parameters = {"properties": {"v": schema}, "$defs": DEFS}
    text = f"<tool_call>f<arg_key>v</arg_key><arg_value>{written}</arg_value></tool_call>"
    for pieces in ([text], list(text)):
        (call,) = read_pieces(pieces, tools=[Tool("f", parameters=parameters)]).calls
        assert call.arguments == '{"v":' + json_text + "}"


@pytest.mark.parametrize("written", ["True", "{'a': 1}", r"{\"a\": 1}", r'"{\"a\": 1}"', "['a']"])
def test_nothing_is_mended_where_a_string_is_allowed(written: str) -> None:
    assert value_of({"type": ["string", "boolean", "object", "array"]}, written) == written
    assert value_of({"type": "string"}, written) == written
    assert value_of({}, written) == written


@pytest.mark.parametrize(
    "written", ["1.10", "1e400", "-0", "12345678901234567.123456789", '{"a" : 1.0,\n"b":"\\ud800"}']
)
def test_json_is_passed_on_as_it_was_written(written: str) -> None:
    parameters = {"properties": {"v": {"type": ["number", "object"]}}}
    text = f"<tool_call>f<arg_key>v</arg_key><arg_value>{written}</arg_value></tool_call>"
    (call,) = read_pieces([text], tools=[Tool("f", parameters=parameters)]).calls
    assert call.arguments == '{"v":' + written + "}"


STRING_OR = [
    {"type": ["string", "integer", "null", "array"]},
    {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}, {"type": "array"}]},
    {"oneOf": [{"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Chain"}, {"type": ["null", "array"]}]},
    {"type": ["string", "integer", "array"], "nullable": True},
    {"allOf": [{"type": ["string", "integer", "null", "array"]}, {"minLength": 1}]},
]


@pytest.mark.parametrize("schema", STRING_OR)
def test_a_union_with_string_takes_the_other_types_first(schema: Any) -> None:
    assert value_of(schema, "123") == 123
    assert value_of(schema, "null") is None
    assert value_of(schema, '["a"]') == ["a"]
    for text in ("abc", " 123", "123 ", "123_456", "1.5", "true", '"quoted"', "{}", "", "[1"):
        assert value_of(schema, text) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "nullable": True},
        {"enum": ["a", "b", None]},
    ],
)
def test_string_or_null(schema: Any) -> None:
    assert value_of(schema, "null") is None
    for text in ("123", "true", "None", "", "{}", "a"):
        assert value_of(schema, text) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Int"},
        {"$ref": "#/definitions/Int"},
        {"$ref": "#/$defs/Chain", "description": "a chain"},
        {"$ref": "#/$defs/Loop"},
        {"allOf": [{"$ref": "#/$defs/Int"}], "default": 3},
        {"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]},
        {"allOf": [{"type": "number"}, {"type": "integer"}]},
        {"allOf": [{"type": "number"}, {"enum": [1, 2, 5]}]},
        {"enum": [1, 2, 5]},
        {"const": 5},
        {"type": "number", "enum": [1, 5]},
    ],
)
def test_schemas_that_mean_an_integer(schema: Any) -> None:
    assert value_of(schema, "5") == 5
    assert value_of(schema, "x") == "x"


def test_references_with_escapes_and_into_themselves() -> None:
    assert value_of({"$ref": "#/$defs/a~1b~0c%20%25"}, "true") is True
    assert value_of({"$ref": "#/$defs/Tree"}, '{"left": null}') == {"left": None}
    assert value_of({"$ref": "#/$defs/Tree"}, "null") is None
    assert value_of({"$ref": "#/properties/v"}, "5") == "5"
    assert value_of({"$ref": "#/$defs/Self"}, "5") == "5"
    assert value_of({"$ref": "#"}, '{"v": 1}') == {"v": 1}


def test_an_enumerated_string_stays_a_string() -> None:
    schema = {"enum": ["1", "null", 2, None]}
    assert [value_of(schema, text) for text in ("1", "null", "2")] == ["1", "null", 2]
    assert value_of({"anyOf": [{"const": "10"}, {"type": "integer"}]}, "10") == "10"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        False,
        None,
        7,
        "string",
        {"description": "anything"},
        {"type": "any"},
        {"type": []},
        {"type": [None, {"type": "integer"}]},
        {"type": 3},
        {"anyOf": []},
        {"anyOf": "integer"},
        {"anyOf": [{}, {"type": "integer"}]},
        {"enum": {}},
        {"$ref": 5},
        {"$ref": "#/$defs/Missing"},
        {"$ref": "#/$defs/Int/type/deeper"},
        {"$ref": "https://schemas.test/int.json"},
        {"type": "string", "enum": [1, 2]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_a_schema_that_says_nothing_clear_means_a_string(schema: Any) -> None:
    for text in ("5", "null", "{}", " x "):
        assert value_of(schema, text) == text


def test_shape_keywords_stand_for_a_missing_type() -> None:
    assert value_of({"properties": {"a": {}}}, '{"a": 1}') == {"a": 1}
    assert value_of({"items": {"type": "integer"}}, "[1]") == [1]


def types_in(parameters: dict[str, Any], *names: str) -> list[list[str]]:
    """The types of some arguments."""
    schema = ArgumentSchema(parameters)
    return [sorted(schema.type_of(name).types) for name in names]


def test_arguments_that_are_not_declared() -> None:
    properties = {"a": {"type": "boolean"}}
    extra = {"type": "object", "properties": properties, "additionalProperties": {"type": "null"}}
    assert types_in(extra, "a", "z") == [["boolean"], ["null"]]
    for additional in (True, False, {}, None):
        assert types_in({"properties": properties, "additionalProperties": additional}, "z") == [["string"]]
    assert types_in({}, "z") == [["string"]]


def test_arguments_declared_behind_references_and_unions() -> None:
    one = {"properties": {"kind": {"const": "one"}, "v": {"type": "integer"}}}
    two = {"properties": {"kind": {"const": "two"}, "v": {"type": "null"}}}
    assert types_in({"$ref": "#/$defs/One", "$defs": {"One": one}}, "kind", "v") == [["string"], ["integer"]]
    assert types_in({"oneOf": [one, two]}, "kind", "v") == [["string"], ["integer", "null"]]
    assert types_in({"allOf": [{"$ref": "#"}, one]}, "v") == [["integer"]]


def test_malformed_parameters_never_raise() -> None:
    broken: list[Any] = [[], None, "x", {"properties": []}, {"properties": {"v": {"$ref": "#/properties/0"}}}]
    for parameters in broken:
        assert types_in(parameters, "v") == [["string"]]
    assert types_in({"$defs": [{"type": "null"}], "properties": {"v": {"$ref": "#/$defs/0"}}}, "v") == [["null"]]
    assert types_in({"$defs": [], "properties": {"v": {"$ref": "#/$defs/" + "9" * 5000}}}, "v") == [["string"]]


def test_schemas_that_grow_without_end_or_without_measure() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert types_in({"properties": {"v": deep}, "anyOf": [deep]}, "v") == [["string"]]
    wide = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(20)}
    wide["d20"] = {"type": "null"}
    assert types_in({"properties": {"v": {"$ref": "#/$defs/d0"}}, "$defs": wide}, "v") == [["null"]]


def test_keys_are_escaped() -> None:
    text = '<tool_call>f<arg_key>a"\\é\n b</arg_key><arg_value>1</arg_value></tool_call>'
    (call,) = read_pieces([text], tools=[Tool("f")]).calls
    assert json.loads(call.arguments) == {'a"\\é\n b': "1"}
