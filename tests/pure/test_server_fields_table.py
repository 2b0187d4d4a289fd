"""The tables of fields in docs/server.md against the bodies that the routes read."""

from __future__ import annotations

import re

from glint.server.anthropic.messages import MessagesBody, PromptBody
from glint.server.fields import Strict
from glint.server.glint_api import DetokenizeBody, GenerateBody, TokenizeBody
from glint.server.openai.chat import ChatBody
from glint.server.openai.completions import TextBody
from glint.server.openai.responses import ResponsesBody
from tests.house_rules.sources import ROOT

BODIES: dict[str, type[Strict]] = {
    "chat": ChatBody,
    "completions": TextBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "count": PromptBody,
    "generate": GenerateBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
ALL = ("chat", "completions", "responses", "messages", "generate")


def listed_fields(section: str) -> list[tuple[str, str]]:
    """Every route and field of the rows, once for each table that has it."""
    listed = []
    for row in (line for line in section.splitlines() if line.startswith("| `")):
        fields, routes = [cell.strip().split(", ") for cell in row.split("|")[1:3]]
        assert all(re.fullmatch(r"`\w+`", field) for field in fields), row
        named = [name for route in routes for name in (ALL if route == "all" else (route,))]
        listed += [(route, field.strip("`")) for route in named for field in fields]
    return listed


def test_every_field_of_every_route_is_in_the_tables_once() -> None:
    section = (ROOT / "docs" / "server.md").read_text().partition("\n## Fields\n")[2].partition("\n## ")[0]
    listed = listed_fields(section)
    read = [(route, field) for route, body in BODIES.items() for field in body.__struct_fields__]
    assert sorted(listed) == sorted(read)


def test_the_rows_are_read_as_written() -> None:
    rows = "| works | routes | |\n|---|---|---|\n| `a`, `b` | chat, count | c, `d` |\n| `e` | all | |\n"
    pairs = [("chat", "a"), ("chat", "b"), ("count", "a"), ("count", "b")]
    assert listed_fields(rows) == pairs + [(route, "e") for route in ALL]
