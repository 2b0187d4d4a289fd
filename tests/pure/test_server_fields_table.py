"""The table of fields in docs/server.md against the bodies that the routes read."""

from __future__ import annotations

import re
from pathlib import Path

from glint.server.anthropic.messages import MessagesBody, PromptBody
from glint.server.fields import Strict
from glint.server.glint_api import DetokenizeBody, GenerateBody, TokenizeBody
from glint.server.openai.chat import ChatBody
from glint.server.openai.completions import TextBody
from glint.server.openai.responses import ResponsesBody

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


def test_every_field_of_every_route_is_in_the_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
    section = text.partition("\n## Fields\n")[2].partition("\n## ")[0]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    routes = [cell.strip() for cell in head.split("|")[2:-2]]
    assert routes == list(BODIES)
    listed: dict[str, set[str]] = {route: set() for route in routes}
    for row in rows:
        field, *marks = [cell.strip() for cell in row.split("|")[1 : len(routes) + 2]]
        assert re.fullmatch(r"`\w+`", field) and set(marks) <= {"+", "o", ""}, row
        for route, mark in zip(routes, marks, strict=True):
            listed[route] |= {field.strip("`")} if mark else set()
    for route, body in BODIES.items():
        assert listed[route] == set(body.__struct_fields__), route
