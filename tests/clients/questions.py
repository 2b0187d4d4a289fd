"""What several clients are asked for: a structured answer and a tool call, both as pydantic models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Town(BaseModel):
    """A town and what is known of it."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Oslo", "Rome"]
    is_capital: bool


class Weather(BaseModel):
    """The weather of a city for some days."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


TOWN_QUESTION = "Describe the town Oslo as JSON."
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": Weather.model_json_schema(),
    },
}
NAMED_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
