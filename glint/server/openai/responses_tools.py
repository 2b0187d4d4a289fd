"""Tools of the Responses API: functions, alone or in namespaces, and which of them the model may call.

The model sees a function of a namespace as NAMESPACE.NAME. Calls name the two apart.
"""

from collections.abc import Sequence
from typing import Any, Literal

from glint.server.fields import Strict, check_tools, refusal
from glint.server.generation.request import ToolChoice
from glint.server.openai.fields import FunctionFields
from glint.server.state import ServerState
from glint.text.tools import Tool


class FunctionTool(FunctionFields, tag_field="type", tag="function"):
    """A function."""

    def describe(self) -> dict[str, Any]:
        """The tool as the response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class NamespaceTool(Strict, tag_field="type", tag="namespace"):
    """Functions under one name. The description of the first carries that of the namespace for the model."""

    name: str
    tools: list[FunctionTool]
    description: str | None = None

    def describe(self) -> dict[str, Any]:
        """The tool as the response repeats it."""
        described = [tool.describe() for tool in self.tools]
        return {"type": "namespace", "name": self.name, "description": self.description, "tools": described}


class NamedChoice(Strict, tag_field="type", tag="function", omit_defaults=True):
    """One function. Of a tool choice it must be called."""

    name: str
    namespace: str | None = None


class AllowedTools(Strict, tag_field="type", tag="allowed_tools"):
    """A tool choice among some of the functions; the model does not see the others."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


Choice = Literal["auto", "none", "required"] | NamedChoice | AllowedTools


def shown_name(namespace: str | None, name: str) -> str:
    """The name of a function as the model sees it."""
    return name if not namespace else f"{namespace}.{name}"


class ToolSet:
    """The tools of one request and the choice among them."""

    def __init__(
        self,
        declared: Sequence[FunctionTool | NamespaceTool] | None,
        choice: Choice | None,
        allows_several: bool,
    ) -> None:
        self._choice = choice or "auto"
        self._allows_several = allows_several
        self._tools: list[Tool] = []
        self._namespaces: dict[str, tuple[str, str]] = {}
        for tool in declared or ():
            if isinstance(tool, NamespaceTool):
                self._add_namespace(tool)
            else:
                self._tools.append(tool.to_tool())

    def offered(self, state: ServerState) -> tuple[Tool, ...]:
        """The tools that the model sees, checked."""
        tools = check_tools(self._tools, state)
        if not isinstance(self._choice, AllowedTools):
            return tools
        allowed = {shown_name(choice.namespace, choice.name) for choice in self._choice.tools}
        for name in sorted(allowed - {tool.name for tool in tools}):
            raise refusal(
                f"tool_choice allows {name!r}, but tools does not declare it; declare it, or leave it out",
                "tool_choice.tools",
            )
        return tuple(tool for tool in tools if tool.name in allowed)

    def choice(self) -> ToolChoice:
        """Whether the model must call a tool."""
        choice = self._choice
        if isinstance(choice, NamedChoice):
            return ToolChoice("required", shown_name(choice.namespace, choice.name), allows_several=False)
        mode = choice.mode if isinstance(choice, AllowedTools) else choice
        if mode == "required" and not self._tools:
            raise refusal(
                "tool_choice is 'required', but no tools are given; give some, or leave it out", "tool_choice"
            )
        return ToolChoice(mode, None, self._allows_several)

    def call_name(self, shown: str) -> dict[str, str]:
        """The name of a called function as its item has it."""
        if shown not in self._namespaces:
            return {"name": shown}
        namespace, name = self._namespaces[shown]
        return {"name": name, "namespace": namespace}

    def _add_namespace(self, space: NamespaceTool) -> None:
        for index, function in enumerate(space.tools):
            name = shown_name(space.name, function.name)
            tool = function.to_tool()
            texts = (space.description if index == 0 else None, tool.description)
            description = "\n\n".join(text for text in texts if text) or None
            self._tools.append(Tool(name, description, tool.parameters, tool.is_strict))
            self._namespaces[name] = (space.name, function.name)
