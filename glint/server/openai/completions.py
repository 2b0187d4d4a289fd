"""POST /v1/completions of the OpenAI API: continues texts or tokens."""

from dataclasses import replace
from typing import Any, Literal, cast

import msgspec

from glint.server.fields import check_count, refusal, renamed_fields
from glint.server.generation.generation import Delta, Generation
from glint.server.generation.request import GenerationRequest, TextPrompt
from glint.server.http_call import HttpCall
from glint.server.openai.fields import SamplingFields
from glint.server.openai.output import DONE, StreamUsage, openai_usage, prompt_logprobs, text_logprobs

DEFAULT_MAX_TOKENS = 16


class TextBody(SamplingFields, kw_only=True):
    """The body of a text completion. `echo` puts the prompt before the output, which `max_tokens` 0 leaves out."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True

    def to_requests(self, call: HttpCall) -> list[GenerationRequest]:
        """One generation request per prompt."""
        state = call.state
        state.check_model(self.model)
        prompts = self._prompts()
        check_count("prompt", len(prompts), state.limits.prompts, "prompts")
        if not prompts:
            raise refusal("prompt is an empty list; give at least one prompt", "prompt")
        if self.best_of not in (None, self.n or 1):
            raise refusal(f"best_of is {self.best_of}; it must be n, which is {self.n or 1}", "best_of")
        if self.echo and self.stream:
            raise refusal("echo is not supported in a stream; leave one of them out", "echo")
        self.check_whole()
        if self.max_tokens == 0 and not self.echo:
            raise refusal(
                "max_tokens is 0, which asks for the prompt alone; set echo to true or ask for more", "max_tokens"
            )
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens or 1
        params = self.to_params(state, max_tokens=max_tokens, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            params = replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return [self.make_request(TextPrompt(prompt, self.add_special_tokens), params, state) for prompt in prompts]

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [cast(list[int], self.prompt)]
        if int in kinds:
            raise refusal("prompt mixes token ids with whole prompts; give one list of either", "prompt")
        return cast(list[str | list[int]], self.prompt)


async def handle_text(call: HttpCall) -> None:
    """Answer a text completion, streamed or whole."""
    body = await call.read(TextBody)
    call.user = body.user or body.safety_identifier
    with renamed_fields({"prompt_logprobs": "logprobs"} if body.prompt_logprobs is None else {}):
        generation = await call.begin(*body.to_requests(call))
    if body.stream:
        await _stream(call, generation, body)
    else:
        await _reply(call, generation, body)


async def _reply(call: HttpCall, generation: Generation, body: TextBody) -> None:
    choices = [_ChoiceBuilder() for _ in range(generation.num_choices)]
    async for deltas in generation.deltas():
        for delta in deltas:
            choices[delta.choice].add_delta(delta)
    if body.max_tokens == 0:
        _drop_output(generation, choices)
    if body.echo:
        _echo(call, generation, choices)
    written = [choice.as_choice(index, call, body.logprobs) for index, choice in enumerate(choices)]
    if body.prompt_logprobs is not None:
        await _add_prompt_logprobs(call, generation, choices, written, body.prompt_logprobs)
    answer = _opening(call) | {
        "choices": written,
        "usage": openai_usage(generation.usage),
    }
    await call.reply(msgspec.json.encode(answer))


def _opening(call: HttpCall) -> dict[str, Any]:
    return {
        "id": call.request_id,
        "object": "text_completion",
        "created": call.created,
        "model": call.state.model_name,
    }


class _ChoiceBuilder:
    """Collects the output of one choice for a whole response."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float] | None] = []
        self.prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def add_delta(self, delta: Delta) -> None:
        """Add the output of one step."""
        output = delta.output
        self.texts.append(delta.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self._finish_reason = delta.finish_reason or self._finish_reason
        self._stop_reason = output.stop_reason

    def drop_output(self) -> None:
        """Leave out all output."""
        self.texts, self.token_ids, self.logprobs = [], [], []
        self._finish_reason, self._stop_reason = "length", None

    def as_choice(self, index: int, call: HttpCall, num_logprobs: int | None) -> dict[str, Any]:
        """The choice as the response has it."""
        logprobs = None
        if num_logprobs is not None:
            logprobs = text_logprobs(self.token_ids, self.logprobs, call.state.tokenizer, num_logprobs, 0)
        return {
            "index": index,
            "text": "".join(self.texts),
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }


def _drop_output(generation: Generation, choices: list[_ChoiceBuilder]) -> None:
    """Leave out the one token that the engine computes behind every prompt."""
    generation.usage.completion_tokens = 0
    for choice in choices:
        choice.drop_output()


def _echo(call: HttpCall, generation: Generation, choices: list[_ChoiceBuilder]) -> None:
    """Put every prompt before its outputs."""
    count = generation.params.n
    for index, choice in enumerate(choices):
        tokens = list(generation.prompts[index // count].engine_request.prompt_tokens)
        choice.texts.insert(0, call.state.tokenizer.decode(tokens, skip_special_tokens=False))
        known = choices[index - index % count].prompt_logprobs
        if known is not None:
            choice.token_ids = tokens + choice.token_ids
            choice.logprobs = [*known, *choice.logprobs]


async def _add_prompt_logprobs(
    call: HttpCall,
    generation: Generation,
    choices: list[_ChoiceBuilder],
    written: list[dict[str, Any]],
    count: int,
) -> None:
    """Add the log-probabilities of its prompt to every choice. The engine gives them with the first of each prompt."""
    for index in range(len(generation.prompts)):
        first = index * generation.params.n
        known = choices[first].prompt_logprobs or ()
        entries = await prompt_logprobs(call.state, generation, index, known, count)
        for choice in written[first : first + generation.params.n]:
            choice["prompt_logprobs"] = entries


async def _stream(call: HttpCall, generation: Generation, body: TextBody) -> None:
    opening = b"data: " + msgspec.json.encode(_opening(call))[:-1] + b',"choices":['
    offsets = [0] * generation.num_choices
    usage = StreamUsage(generation, body.wants_continuous_usage)
    await call.open_stream()
    await call.stream(generation, lambda delta: _event(call, opening, delta, body.logprobs, offsets, usage))
    last = DONE
    if body.wants_usage:
        last = opening + b'],"usage":' + msgspec.json.encode(openai_usage(generation.usage)) + b"}\n\n" + DONE
    await call.send_events(last)
    await call.end_stream()


def _event(
    call: HttpCall, opening: bytes, delta: Delta, num_logprobs: int | None, offsets: list[int], usage: StreamUsage
) -> bytes:
    """One chunk of one choice, or nothing where a step added neither text nor an end."""
    usage.count(delta)
    output = delta.output
    logprobs = None
    if num_logprobs is not None and output.logprobs:
        offset = offsets[delta.choice]
        logprobs = text_logprobs(output.token_ids, output.logprobs, call.state.tokenizer, num_logprobs, offset)
    if not delta.text and delta.finish_reason is None and logprobs is None:
        return b""
    offsets[delta.choice] += len(delta.text)
    entry = {
        "index": delta.choice,
        "text": delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": output.stop_reason,
    }
    return opening + msgspec.json.encode(entry) + b"]" + usage.end()
