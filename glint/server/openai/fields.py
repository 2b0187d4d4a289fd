"""Fields that the bodies of the OpenAI routes share."""

from itertools import chain
from typing import Any, Literal

import msgspec

from glint.sampling import SamplingParams
from glint.server.fields import (
    Strict,
    check_cache_salt,
    check_count,
    check_metadata,
    check_not_stored,
    check_token_ids,
    deadline_of,
    refusal,
    thinking_budget,
    unsigned_seed,
)
from glint.server.generation.request import ChatPrompt, GenerationRequest, TextPrompt
from glint.server.state import ServerState
from glint.text.grammar import Choice, Constraint, JsonObject, JsonSchema, Regex, WrittenGrammar
from glint.text.tools import Tool

FORMAT_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
CacheRetention = Literal["in_memory", "in-memory", "24h"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class PromptCacheOptions(Strict):
    """How OpenAI caches a prompt. The server caches every prompt by itself."""

    mode: Literal["implicit"] | None = None
    ttl: Literal["30m"] | None = None


class StreamOptions(Strict):
    """Options of a stream. With `continuous_usage_stats` every event has the usage so far. Events carry no padding."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class NamedSchema(Strict):
    """A JSON schema with a name, as in response_format. The output always fits it, `strict` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict, tag="text"):
    """Any text."""


class JsonObjectFormat(Strict, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Strict, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: NamedSchema


class RegexFormat(Strict, tag="regex"):
    """Text that matches a regular expression as a whole."""

    pattern: str


class ChoiceFormat(Strict, tag="choice"):
    """One of several texts."""

    choices: list[str]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat


class StructuredOutputs(Strict):
    """The same constraints under the names of vLLM's API. A request sets exactly one."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingFields(Strict):
    """Sampling and stop fields: those of OpenAI and those of the other engines.

    Clients send `metadata`, `store`, `service_tier`, `safety_identifier`, the fields of the prompt cache and the
    defaults of other engines by themselves. Their allowed values change no answer: these routes store nothing, has one
    tier, caches every prompt, and has no beam search, which alone reads `length_penalty`.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    thinking_budget: int | None = None
    thinking_closing_text: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_sequences: list[list[int]] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    deadline_seconds: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    cache_prompt: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None

    def to_params(self, state: ServerState, effort: str | None = None, **changes: Any) -> SamplingParams:
        """The sampling parameters of this body, checked against the server's limits."""
        limits = state.limits
        check_metadata(self.metadata)
        check_not_stored(self.store)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if self.n is not None and not 1 <= self.n <= limits.choices:
            raise refusal(f"n is {self.n}; it must be an integer from 1 to {limits.choices} (--max-choices)", "n")
        check_count("stop", len(stops), limits.stops)
        check_count("stop", max(map(len, stops), default=0), limits.stop_chars, "characters in a stop string")
        check_count("stop_token_ids", len(self.stop_token_ids or ()), limits.stops)
        sequences = self.stop_token_sequences or ()
        check_count("stop_token_sequences", len(sequences), limits.stops)
        check_count("logit_bias", len(self.logit_bias or ()), limits.logit_bias_entries)
        check_token_ids("stop_token_ids", self.stop_token_ids or (), state)
        check_token_ids("stop_token_sequences", chain.from_iterable(sequences), state)
        check_token_ids("logit_bias", self.logit_bias or (), state)
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options is given, but stream is not true", "stream_options")
        own = {
            name: getattr(self, name)
            for name in (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "logit_bias",
                "prompt_logprobs",
                "n",
                "stop_token_ids",
                "stop_token_sequences",
                "min_tokens",
                "thinking_closing_text",
                "include_stop_str_in_output",
                "skip_special_tokens",
                "ignore_eos",
            )
        }
        own["thinking_budget"] = thinking_budget(effort, state, {"thinking_budget": self.thinking_budget})
        return state.sampling(**(own | {"stop": stops, "seed": unsigned_seed(self.seed)} | changes))

    def check_whole(self) -> None:
        """Refuse log-probabilities of the prompt in a stream, as vLLM does."""
        if self.stream and self.prompt_logprobs is not None:
            raise refusal("prompt_logprobs is not supported in a stream; leave one of them out", "prompt_logprobs")

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def make_request(
        self, prompt: ChatPrompt | TextPrompt, params: SamplingParams, state: ServerState
    ) -> GenerationRequest:
        """The generation request for one prompt of this body."""
        return GenerationRequest(
            prompt,
            params,
            deadline_of(self.deadline_seconds, state.limits),
            self.to_constraint(),
            self.format_field,
            self.priority or 0,
            check_cache_salt(self.cache_salt),
        )

    @property
    def format_field(self) -> str:
        """The name of the field that sets the constraint."""
        return next((name for name in FORMAT_FIELDS if getattr(self, name) is not None), "response_format")

    def to_constraint(self) -> Constraint | None:
        """The constraint of the output. At most one of the fields may set it."""
        asked = read_format(self.response_format)
        given = [name for name in FORMAT_FIELDS if getattr(self, name) is not None]
        if len(given) + (asked is not None) > 1:
            first = "response_format" if asked is not None else given[0]
            raise refusal(f"{first} and {given[-1]} are both given; give one", given[-1])
        if not given:
            return asked
        if self.structured_outputs is not None:
            return _read_structured(self.structured_outputs, "structured_outputs")
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        return _read_structured(guided, given[0])


def read_format(asked: ResponseFormat | None) -> Constraint | None:
    """The constraint of a response format; None for any text."""
    match asked:
        case JsonObjectFormat():
            return JsonObject()
        case JsonSchemaFormat(json_schema=named):
            if named.schema is None:
                raise refusal("json_schema has no schema", "response_format.json_schema.schema")
            return JsonSchema(named.schema)
        case RegexFormat(pattern=pattern):
            return Regex(pattern)
        case ChoiceFormat(choices=choices):
            return Choice(tuple(choices))
        case _:
            return None


def _read_structured(asked: StructuredOutputs, field: str) -> Constraint:
    constraints: list[Constraint] = []
    if asked.json is not None:
        schema = _parse_schema(asked.json, field) if isinstance(asked.json, str) else asked.json
        constraints.append(JsonSchema(schema))
    if asked.json_object:
        constraints.append(JsonObject())
    if asked.regex is not None:
        constraints.append(Regex(asked.regex))
    if asked.choice is not None:
        constraints.append(Choice(tuple(asked.choice)))
    if asked.grammar is not None:
        constraints.append(WrittenGrammar(asked.grammar))
    if len(constraints) != 1:
        names = ", ".join(StructuredOutputs.__struct_fields__)
        raise refusal(f"{field} asks for {len(constraints)} things; give one of {names}", field)
    return constraints[0]


def _parse_schema(text: str, field: str) -> dict[str, Any]:
    """The JSON schema that a client sent as text."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise refusal(f"{field} has a schema as text that is no JSON object: {error}", field) from None


class FunctionFields(Strict):
    """A function as OpenAI's tools describe it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """The tool in the form of every API."""
        return Tool(self.name, self.description, self.parameters or {}, bool(self.strict))
