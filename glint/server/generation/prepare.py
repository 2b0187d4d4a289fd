"""Makes an engine request of a generation request: rendering, tokens and grammar. Every function may block."""

from contextlib import suppress
from dataclasses import dataclass

from glint.engine.reuse import Reuse
from glint.errors import RequestError, TextError
from glint.sampling import SamplingParams
from glint.server.auth import Tenant
from glint.server.generation.request import ChatPrompt, GenerationRequest
from glint.server.http.problems import Problem
from glint.server.service import EngineRequest
from glint.server.state import ServerState
from glint.text import chat
from glint.text.grammar import Constraint, Grammar, JsonObject, JsonSchema, ToolCalls
from glint.text.guard import PromptText
from glint.text.output import OutputParser, OutputStart, find_continued_start, find_start
from glint.text.tags import Tag
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool


@dataclass(frozen=True)
class ParserSettings:
    """How the output of a chat is parsed."""

    start: OutputStart
    tools: tuple[Tool, ...]
    discards_calls: bool

    def make(self) -> OutputParser:
        """A parser for one choice."""
        return OutputParser(self.start, self.tools, self.discards_calls)


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is ready for the engine. Without a parser its output is plain text."""

    engine_request: EngineRequest
    parser: ParserSettings | None
    deadline_seconds: float


def prepare(state: ServerState, request: GenerationRequest, tenant: Tenant) -> PreparedRequest:
    """Make what the engine and the output parser need. It blocks where the request needs a worker."""
    if isinstance(request.prompt, ChatPrompt):
        return _prepare_chat(state, request, request.prompt, tenant)
    content = request.prompt.content
    if isinstance(content, str):
        state.check_length(content, "prompt")
        content = state.tokenizer.encode(content, add_special_tokens=request.prompt.add_special_tokens)
    grammar = _compile(state, request.constraint, request.format_field)
    _check_context(state, len(content), request.params, "prompt")
    share = tenant.share(request.priority)
    engine_request = EngineRequest(content, request.params, tenant.salt_of(request.cache_salt), grammar, share=share)
    return PreparedRequest(engine_request, None, request.deadline_seconds)


def render_prompt(state: ServerState, prompt: ChatPrompt) -> PromptText:
    """Render a conversation. With tool choice "none" the prompt does not show the tools."""
    offered = () if prompt.tool_choice.mode == "none" else prompt.tools
    return chat.render_prompt(
        state.tokenizer,
        prompt.messages,
        tools=[tool.as_function() for tool in offered] or None,
        enable_thinking=prompt.enable_thinking,
        clear_thinking=prompt.clear_thinking,
        allow_special_tokens=state.allows_special_tokens,
        continues=prompt.continues,
    )


def encode_chat(state: ServerState, prompt: ChatPrompt) -> list[int]:
    """The prompt tokens of a conversation."""
    return state.tokenizer.encode_prompt(render_prompt(state, prompt))


def _prepare_chat(
    state: ServerState, request: GenerationRequest, prompt: ChatPrompt, tenant: Tenant
) -> PreparedRequest:
    tokenizer = state.tokenizer
    rendered = render_prompt(state, prompt)
    state.check_length(rendered.text, "messages")
    knows_thinking = tokenizer.token_to_id(Tag.THINK) is not None
    constraint = _chat_constraint(request, prompt)
    start = (find_continued_start if prompt.continues else find_start)(rendered.marked, knows_thinking)
    if constraint is not None and start is OutputStart.UNDECIDED:
        rendered = rendered.extended("\n" + Tag.THINK)
        start = OutputStart.REASONING
    begins_after = None
    if constraint is not None and start is OutputStart.REASONING:
        begins_after = tokenizer.token_to_id(Tag.THINK_END)
        if begins_after is None:
            raise RequestError(
                f"this model has no token {Tag.THINK_END.value!r} to end its reasoning: set enable_thinking to false"
            )
    if isinstance(constraint, ToolCalls):
        _compile(state, constraint.answer, request.format_field)
    grammar = _compile(state, constraint, "tools" if isinstance(constraint, ToolCalls) else request.format_field)
    tokens = tokenizer.encode_prompt(rendered)
    _check_context(state, len(tokens), request.params, "messages")
    share = tenant.share(request.priority)
    salt = tenant.salt_of(request.cache_salt)
    reuse = _find_reuse(tokenizer, prompt, tokens, start)
    is_thinking = start is OutputStart.REASONING
    engine_request = EngineRequest(tokens, request.params, salt, grammar, begins_after, share, reuse, is_thinking)
    is_silent = prompt.tool_choice.mode == "none"
    parser = ParserSettings(start, () if is_silent else _offered(prompt), discards_calls=is_silent)
    return PreparedRequest(engine_request, parser, request.deadline_seconds)


def _find_reuse(tokenizer: Tokenizer, prompt: ChatPrompt, tokens: list[int], start: OutputStart) -> Reuse | None:
    """What the next turn can share with this one: nothing behind thinking that the template will leave out.

    The template keeps the thinking of an answer that calls a tool, until the user speaks again. Then it leaves out the
    thinking of all answers since the user's last message, which this prompt has.
    """
    opening, closing, call = map(tokenizer.token_to_id, (Tag.THINK, Tag.THINK_END, Tag.CALL))
    if opening is None or not chat.drops_reasoning(tokenizer, prompt.clear_thinking) or (prompt.tools and call is None):
        return None
    with suppress(ValueError):
        end = tokens.index(opening) + 1
        while tokens[end : end + 1] == [closing]:
            end = tokens.index(opening, end) + 1
        return Reuse(end, call)
    return Reuse(len(tokens), call) if start is OutputStart.UNDECIDED else None


def _compile(state: ServerState, constraint: Constraint | None, field: str) -> Grammar | None:
    """The grammar of a constraint. An error names the field that asked for the constraint."""
    if constraint is None:
        return None
    try:
        return state.compiler.compile(constraint)
    except TextError as problem:
        raise RequestError(f"{field} cannot be used: {problem}", field) from problem


def _check_context(state: ServerState, num_tokens: int, params: SamplingParams, field: str) -> None:
    """Refuse a prompt that leaves no room in the context for the output, in the words that clients look for."""
    limit = f"this model's maximum context length is {state.max_model_len} tokens"
    room = state.max_model_len - num_tokens
    if room < 1:
        raise Problem(
            400,
            f"the prompt is too long: {limit} with the answer, and the prompt has {num_tokens}; shorten the prompt",
            code="context_length_exceeded",
            param=field,
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise Problem(
            400,
            f"max_tokens is {params.max_tokens}, but {limit}, and a prompt of {num_tokens} leaves room for {room}; "
            "ask for fewer",
            code="context_length_exceeded",
            param="max_tokens",
        )


def _offered(prompt: ChatPrompt) -> tuple[Tool, ...]:
    name = prompt.tool_choice.name
    return prompt.tools if name is None else tuple(tool for tool in prompt.tools if tool.name == name)


def _chat_constraint(request: GenerationRequest, prompt: ChatPrompt) -> Constraint | None:
    """The one constraint of a chat: its response format, or tool calls that are required, strict or limited to one.

    A named tool is called exactly once. Where the model may choose, JSON of the response format takes the place of the
    free text; where it must call, there is no text that could have a format.
    """
    choice = prompt.tool_choice
    offered = () if choice.mode == "none" else _offered(prompt)
    if choice.mode == "required" and not offered:
        named = "no tools are given; give some" if choice.name is None else f"tools does not declare {choice.name!r}"
        raise RequestError(f"tool_choice asks for a call, but {named}", "tool_choice")
    if not offered:
        return request.constraint
    is_required = choice.mode == "required"
    answer = None if is_required else request.constraint
    if answer is not None and not isinstance(answer, JsonObject | JsonSchema):
        raise RequestError(
            "beside tools a response format is JSON; use json_object or json_schema, set tool_choice to 'none', or "
            "leave one of them out",
            request.format_field,
        )
    allows_several = choice.allows_several and choice.name is None
    is_free = not is_required and answer is None and allows_several and not any(tool.is_strict for tool in offered)
    return None if is_free else ToolCalls(offered, is_required, allows_several, answer)
