"""A tool, whichever API it came through."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that the model may call: its name, what it does, and the JSON schema of its arguments.

    `is_strict` asks that the arguments of a call always fit the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False

    def as_function(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}
