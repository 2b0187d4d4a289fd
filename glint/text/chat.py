"""Chat prompts, rendered by the model folder's own template.

Only the template writes control tokens. What users, tools, system messages and tool definitions say is text, whatever
it spells; the assistant's own text keeps the tags of thinking and calls, on which templates act, and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from glint.errors import TextError
from glint.text.guard import ControlTokens, PromptText, change_strings, choose_mark
from glint.text.tokenizer import SETTINGS_NAME, TEMPLATE_NAME, Tokenizer

ROLES: Final = ("system", "user", "assistant", "tool")
_FIELDS: Final = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_OWN_TEXT: Final = ("content", "reasoning_content")
_PROBE_NAME: Final = "probe_of_the_template_3141592653"
_PROBE_TOOL: Final = {"type": "function", "function": {"name": _PROBE_NAME, "description": "", "parameters": {}}}
_PROBE_CALL: Final = {"id": "1", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {}}}
_TOOLS_TEXT: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}
<arg_key>{{arg-key-1}}</arg_key>
<arg_value>{{arg-value-1}}</arg_value>
<arg_key>{{arg-key-2}}</arg_key>
<arg_value>{{arg-value-2}}</arg_value>
</tool_call>"""


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """Gives the text of a conversation, to be read; what is to be encoded is `render_prompt`, with these arguments."""
    return render_prompt(tokenizer, messages, **arguments).text


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    clear_thinking: bool | None = None,
    add_generation_prompt: bool = True,
    allow_special_tokens: bool = False,
    continues: bool = False,
) -> PromptText:
    """Gives the prompt of a conversation, ready for `Tokenizer.encode_prompt`.

    Messages have the shape of the OpenAI API and are checked first; text parts are joined, an assistant's content of
    None is empty, tool-call arguments may be JSON text or a mapping. An argument that is None is not passed, so that
    the template's own default holds. With `allow_special_tokens` control tokens spelled in messages become control
    tokens. A template that ignores tools gets them in the system message, and calls in the assistant's content, in the
    format of GLM-4.5. With `continues` the prompt ends in the middle of the last message, an assistant's, behind its
    content or, where that is empty, behind its reasoning. Whatever goes wrong is a TextError that names the message.
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
    arguments["add_generation_prompt"] = add_generation_prompt and not continues
    if continues:
        end = choose_mark([checked, offered])
        checked[-1] = _with_end(checked[-1], end, f"messages[{len(checked) - 1}]")
    if allow_special_tokens:
        rendered = PromptText(_render(tokenizer, checked, offered, arguments))
        return _cut(rendered, end) if continues else rendered
    try:
        mark = choose_mark([checked, offered])
        checked = [_mark_message(tokenizer, message, mark) for message in checked]
        offered = _mark(tokenizer.control_tokens, offered, mark)
    except RecursionError as error:
        raise TextError("messages or tools nest too deep; use flatter arguments and schemas") from error
    rendered = PromptText(_render(tokenizer, checked, offered, arguments), mark)
    return _cut(rendered, end) if continues else rendered


def _with_end(message: dict[str, Any], end: str, where: str) -> dict[str, Any]:
    """The message with a mark where the model is to go on."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        what = "has tool calls" if message.get("tool_calls") else f"is of the role {message['role']!r}"
        raise TextError(f"{where} {what}; only an assistant's message without calls can be continued")
    field = "reasoning_content" if message.get("reasoning_content") and not message["content"] else "content"
    return message | {field: message[field] + end}


def _cut(rendered: PromptText, end: str) -> PromptText:
    """The prompt up to the mark, which the template must have written exactly once."""
    if rendered.marked.count(end) != 1:
        raise TextError(
            "the chat template of the model does not write the last message as it is; it cannot be continued"
        )
    return PromptText(rendered.marked.partition(end)[0], rendered.mark)


def _mark_message(tokenizer: Tokenizer, message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark inside each control token that is not its own to write."""
    own = _OWN_TEXT if message["role"] == "assistant" else ()
    marked = {"role": message["role"]}
    for field, value in message.items():
        if field != "role":
            tokens = tokenizer.foreign_tokens if field in own else tokenizer.control_tokens
            marked[field] = _mark(tokens, value, mark)
    return marked


def _mark(tokens: ControlTokens, data: Any, mark: str) -> Any:
    return change_strings(data, lambda text: tokens.mark(text, mark))


def _render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, bool],
) -> str:
    if any("tool_calls" in message for message in messages) and not shows_calls(tokenizer):
        messages = [_with_calls_as_text(message) for message in messages]
    if tools is None or shows_tools(tokenizer):
        return _apply(tokenizer, messages, tools, arguments)
    text = _TOOLS_TEXT.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    rendered = _apply(tokenizer, _with_system_text(messages, text), None, arguments)
    if text not in rendered:
        raise TextError(
            "the chat template of the model shows it neither tools nor a system message that describes them; "
            "leave tools out, or copy a template that knows tools to the model folder"
        )
    return rendered


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the folder's template shows tools to the model; found out once."""
    return _is_shown(tokenizer, "tools", [{"role": "user", "content": "Q"}], [_PROBE_TOOL])


def shows_calls(tokenizer: Tokenizer) -> bool:
    """Whether the folder's template shows the calls of earlier turns to the model; found out once."""
    call = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
    return _is_shown(tokenizer, "calls", [{"role": "user", "content": "Q"}, call], None)


def drops_reasoning(tokenizer: Tokenizer, clear_thinking: bool | None) -> bool:
    """Whether the folder's template leaves the reasoning out once a user's message follows it; found out once."""
    turn = {"role": "assistant", "content": "A", "reasoning_content": _PROBE_NAME}
    messages = [{"role": "user", "content": "Q"}, turn, {"role": "user", "content": "Q"}]
    arguments = {} if clear_thinking is None else {"clear_thinking": clear_thinking}
    return not _is_shown(tokenizer, f"reasoning {clear_thinking}", messages, None, **arguments)


def _is_shown(
    tokenizer: Tokenizer,
    what: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    **arguments: bool,
) -> bool:
    """Whether a conversation with an unlikely name in it is rendered with that name; a refusal is no answer: true."""
    known = tokenizer.template_facts.get(what)
    if known is None:
        try:
            known = _PROBE_NAME in tokenizer.apply_template(messages, tools, add_generation_prompt=True, **arguments)
        except Exception:
            known = True
        tokenizer.template_facts[what] = known
    return known


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text at the end of the first system message, which is made where there is none."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    said = messages[0]["content"]
    return [messages[0] | {"content": f"{said}\n\n{text}" if said else text}, *messages[1:]]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    return message | {"content": "\n".join([*texts, *(_write_call(**call["function"]) for call in calls)])}


def _write_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as GLM-4.5 writes it."""
    lines = [f"<tool_call>{name}"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{text}</arg_value>"]
    return "\n".join([*lines, "</tool_call>"])


def _apply(
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
        if field not in _FIELDS[role] and not _is_empty(value):
            raise TextError(
                f"{where} has the field {field!r}, which a message of the role {role!r} cannot have; remove it"
            )
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


def _is_empty(value: Any) -> bool:
    """Whether a field says nothing: clients send back what their own objects hold, such as {"refusal": None}."""
    if isinstance(value, Mapping):
        return all(inner is None for inner in value.values())
    return value is None or value == []


def _check_content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            problem = "null" if "content" in message else "missing"
            raise TextError(f"{where}.content is {problem}; give a string, which may be empty")
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
