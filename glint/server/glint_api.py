"""glint's own routes: /generate, /tokenize, /detokenize, the list of models, metrics and statistics."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glint import __version__
from glint.server.auth import OPEN_PATHS
from glint.server.fields import Strict, check_token_ids, check_tools, refusal
from glint.server.generation.generation import Delta, Generation
from glint.server.generation.prepare import encode_chat
from glint.server.generation.request import ChatPrompt, GenerationRequest, TextPrompt
from glint.server.http_call import HttpCall
from glint.server.openai.chat import FunctionTool, TemplateArguments, check_messages, with_known_names
from glint.server.openai.fields import SamplingFields
from glint.server.openai.output import StreamUsage, finite, openai_usage
from glint.server.state import ServerState

ANTHROPIC_HEADER = "anthropic-version"


class GenerateBody(SamplingFields, kw_only=True):
    """The body of /generate: a text or its tokens, and the sampling. The response has texts and tokens."""

    prompt: str | list[int]
    logprobs: int | None = None

    def to_request(self, call: HttpCall) -> GenerationRequest:
        """The generation request of this body."""
        state = call.state
        state.check_model(self.model)
        params = self.to_params(state, max_tokens=self.max_tokens, logprobs=self.logprobs)
        return self.make_request(TextPrompt(self.prompt), params, state)


async def handle_generate(call: HttpCall) -> None:
    """Continue a text: one JSON object, or one per step as server-sent events."""
    body = await call.read(GenerateBody)
    call.user = body.user or body.safety_identifier
    generation = await call.begin(body.to_request(call))
    if body.stream:
        await _stream_generate(call, generation, body)
    else:
        await _reply_generate(call, generation)


async def _reply_generate(call: HttpCall, generation: Generation) -> None:
    choices: list[dict[str, Any]] = [{"text": "", "token_ids": []} for _ in range(generation.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    prompt_logprobs = None
    async for deltas in generation.deltas():
        for delta in deltas:
            choice, part = choices[delta.choice], _part(delta)
            texts[delta.choice].append(part["text"])
            choice["token_ids"] += part["token_ids"]
            if "logprobs" in part:
                choice.setdefault("logprobs", []).extend(part["logprobs"])
            prompt_logprobs = part.get("prompt_logprobs", prompt_logprobs)
            choice |= {name: part[name] for name in ("finish_reason", "stop_reason") if name in part}
    for choice, pieces in zip(choices, texts, strict=True):
        choice["text"] = "".join(pieces)
    answer = {"id": call.request_id, "model": call.state.model_name, "choices": choices}
    if prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs
    await call.reply(msgspec.json.encode(answer | {"usage": openai_usage(generation.usage)}))


async def _stream_generate(call: HttpCall, generation: Generation, body: GenerateBody) -> None:
    usage = StreamUsage(generation, body.wants_continuous_usage)

    def encode(delta: Delta) -> bytes:
        usage.count(delta)
        return b"data: " + msgspec.json.encode({"index": delta.choice} | _part(delta))[:-1] + usage.end()

    await call.open_stream()
    await call.stream(generation, encode)
    last = {"id": call.request_id, "usage": openai_usage(generation.usage)}
    await call.send_events(b"data: " + msgspec.json.encode(last) + b"\n\n")
    await call.end_stream()


def _part(delta: Delta) -> dict[str, Any]:
    output = delta.output
    part: dict[str, Any] = {"text": delta.text, "token_ids": list(output.token_ids)}
    if output.logprobs is not None:
        part["logprobs"] = [_by_token(known) for known in output.logprobs]
    if output.prompt_logprobs is not None:
        part["prompt_logprobs"] = [_by_token(known) for known in output.prompt_logprobs]
    if delta.finish_reason is not None:
        part |= {"finish_reason": delta.finish_reason, "stop_reason": output.stop_reason}
    return part


def _by_token(known: dict[int, float] | None) -> dict[str, float] | None:
    return None if known is None else {str(token): finite(logprob) for token, logprob in known.items()}


class TokenizeBody(Strict):
    """The body of /tokenize: a prompt, or a conversation to render."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: TemplateArguments | None = None

    def to_prompt(self, state: ServerState) -> ChatPrompt:
        """The conversation, as a chat completion renders it."""
        messages = [with_known_names(message) for message in self.messages or []]
        check_messages(messages, state)
        tools = check_tools([tool.function.to_tool() for tool in self.tools or []], state)
        kwargs = self.chat_template_kwargs or TemplateArguments()
        return ChatPrompt(messages, tools, enable_thinking=kwargs.enable_thinking, clear_thinking=kwargs.clear_thinking)


class DetokenizeBody(Strict):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


async def handle_tokenize(call: HttpCall) -> None:
    """Respond with the tokens of a prompt or of a conversation."""
    body = await call.read(TokenizeBody)
    call.state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise refusal("give either prompt or messages, and not both", "prompt")
    for name in ("tools", "chat_template_kwargs") if body.messages is None else ("add_special_tokens",):
        if getattr(body, name) is not None:
            raise refusal(f"{name} does not go with {'prompt' if body.messages is None else 'messages'}", name)
    tokens = await call.work(_tokenize, call, body)
    answer = {"tokens": tokens, "count": len(tokens), "max_model_len": call.state.max_model_len}
    await call.reply(msgspec.json.encode(answer))


def _tokenize(call: HttpCall, body: TokenizeBody) -> list[int]:
    tokenizer = call.state.tokenizer
    if body.prompt is not None:
        call.state.check_length(body.prompt, "prompt")
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return encode_chat(call.state, body.to_prompt(call.state))


async def handle_detokenize(call: HttpCall) -> None:
    """Respond with the text of tokens."""
    body = await call.read(DetokenizeBody)
    call.state.check_model(body.model)
    text = await call.work(_detokenize, call, body.tokens, body.skip_special_tokens)
    await call.reply(msgspec.json.encode({"prompt": text}))


def _detokenize(call: HttpCall, tokens: Sequence[int], skip_special_tokens: bool) -> str:
    check_token_ids("tokens", tokens, call.state)
    return call.state.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def served_paths(request: Request) -> dict[str, list[str]]:
    """The paths of all routes by method."""
    served: dict[str, list[str]] = {"POST": [], "GET": sorted(OPEN_PATHS), "DELETE": []}
    for route in request.app.routes:
        (method,) = set(route.methods) - {"HEAD"}
        served[method].append(route.path_format)
    return served


class StatusRoutes:
    """Routes that only read: models, metrics and statistics."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def show_routes(self, request: Request) -> Response:
        """The name, the version, the models and the routes."""
        about = {"name": "glint", "version": __version__, "models": self._state.model_names}
        return _json(about | {"routes": served_paths(request), "documentation": "docs/server.md of glint"})

    async def show_version(self, request: Request) -> Response:
        """The version alone, as vLLM shows it."""
        return _json({"version": __version__})

    async def show_tokenizer(self, request: Request) -> Response:
        """The tokenizer's settings and the chat template, as vLLM shows them."""
        return _json(self._state.tokenizer.info)

    async def list_models(self, request: Request) -> Response:
        """All names of the served model, in the form of the API that the headers speak."""
        names = self._state.model_names
        if ANTHROPIC_HEADER in request.headers:
            data = [self._anthropic_model(name) for name in names]
            return _json({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        entries = [self._model(name) for name in self._state.model_names]
        return _json({"object": "list", "data": entries})

    async def show_model(self, request: Request) -> Response:
        """One model by its name."""
        name = request.path_params["name"]
        self._state.check_model(name)
        return _json(self._anthropic_model(name) if ANTHROPIC_HEADER in request.headers else self._model(name))

    async def show_metrics(self, request: Request) -> Response:
        """The metrics as Prometheus reads them."""
        body, kind = self._state.metrics.render()
        return Response(body, media_type=kind)

    async def show_stats(self, request: Request) -> Response:
        """The metrics as JSON, with the model's origin, the engine, its memory plan and figures of the last minute."""
        return _json(self._state.metrics.as_dict() | self._origin() | dict(self._state.about))

    def _model(self, name: str) -> dict[str, Any]:
        state = self._state
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "glint",
            "max_model_len": state.max_model_len,
            **self._origin(),
        }

    def _origin(self) -> dict[str, str | None]:
        """Where the model came from; nulls for a folder."""
        return {"repository": self._state.repository, "commit": self._state.commit}

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        state = self._state
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(state.created, UTC).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": state.max_model_len,
            "max_tokens": state.max_model_len,
        }


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
