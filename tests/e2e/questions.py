"""What several interfaces are asked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Town(BaseModel):
    """An answer that fits a schema."""

    name: str
    is_capital: bool
