"""Chat prompts, rendered by the model folder's own template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from glint.errors import TextError
from glint.text.tokenizer import SETTINGS_NAME, TEMPLATE_NAME, Tokenizer

ROLES: Final = ("system", "user", "assistant", "tool")
_FIELDS: Final = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_EMPTY: Final[tuple[Any, ...]] = (None, [], {})


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    clear_thinking: bool | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Gives the prompt text of a conversation, ready to be encoded without special tokens.

    Messages have the shape of the OpenAI interface and are checked first; text parts are joined, a content of None is
    empty, tool-call arguments may be JSON text or a mapping. An argument that is None is not passed, so that the
    template's own default holds. Whatever goes wrong is a TextError that names the message.
    """
    if not tokenizer.has_chat_template:
        raise TextError(
            f"the model folder has no chat template: {TEMPLATE_NAME} is missing and {SETTINGS_NAME} has none; "
            "copy the model's own file there, or use a plain prompt"
        )
    if isinstance(messages, str | Mapping) or not messages:
        raise TextError("messages must be a list with at least one message, each with a role and a content")
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    offered = None if not tools else [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    chosen = {"enable_thinking": enable_thinking, "clear_thinking": clear_thinking}
    arguments = {name: value for name, value in chosen.items() if value is not None}
    return _render(tokenizer, checked, offered, arguments | {"add_generation_prompt": add_generation_prompt})


def _render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, bool],
) -> str:
    try:
        from jinja2.exceptions import TemplateError
    except ImportError as error:
        raise TextError("jinja2 cannot be imported; install glint with its dependencies") from error
    try:
        return tokenizer.apply_template(messages, tools, **arguments)
    except TemplateError as error:
        said = error.message if type(error) is TemplateError else type(error).__name__
        raise TextError(f"the chat template of the model refuses these messages: {said}") from error
    except Exception as error:
        raise TextError(
            f"the chat template of the model cannot render these messages ({type(error).__name__}); "
            "check their roles and contents against what the model expects"
        ) from error


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TextError(f"{where} is {type(message).__name__}, an object with a role and a content is needed")
    role = message.get("role")
    if role not in ROLES:
        raise TextError(f"{where}.role is {role!r}; use one of {', '.join(ROLES)}")
    for field, value in message.items():
        if field not in _FIELDS[role] and value not in _EMPTY:
            raise TextError(f"{where} has the field {field!r}, which a {role} message cannot have; remove it")
    checked: dict[str, Any] = {"role": role, "content": _check_content(message, where)}
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(field)
        if value is None:
            continue
        if not isinstance(value, str):
            raise TextError(f"{where}.{field} is {type(value).__name__}, a string is needed")
        checked[field] = value
    calls = message.get("tool_calls")
    if calls:
        if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
            raise TextError(f"{where}.tool_calls is {type(calls).__name__}, a list is needed")
        checked["tool_calls"] = [_check_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return checked


def _check_content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant" and "content" not in message:
            raise TextError(f"{where}.content is missing; give a string")
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise TextError(f"{where}.content is {type(content).__name__}; give a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise TextError(f"{where}.content[{index}] is of type {kind!r}; this model reads text parts only")
        texts.append(part["text"])
    return "".join(texts)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise TextError(f"{where} needs a function with a name")
    checked = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    arguments = _parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    return checked | {"function": {"name": function["name"], "arguments": arguments}}


def _parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise TextError(f"{where} is not JSON, or nests too deep: {error}") from error
    if not isinstance(parsed, Mapping):
        raise TextError(f"{where} is {type(parsed).__name__}, a JSON object is needed")
    return dict(parsed)


def _check_tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise TextError(f"{where} needs type 'function' and a function with a name")
    try:
        json.dumps(tool)
    except (TypeError, ValueError) as error:
        raise TextError(f"{where} is not JSON: {error}") from error
    return dict(tool)
