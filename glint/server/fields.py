"""Fields of request bodies: their types, their checks, and errors_as_problems that name them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from glint.sampling import SEED_LIMIT, TOKEN_LIMIT
from glint.server.http.body import shorten
from glint.server.http.problems import Problem
from glint.server.limits import Limits
from glint.server.state import ServerState
from glint.text.tags import Tag
from glint.text.tools import Tool

MAX_METADATA = 16
MAX_SALT_CHARS = 1024
EFFORT_BUDGETS = {"minimal": 512, "low": 2048, "medium": 8192}


def refusal(message: str, field: str) -> Problem:
    """A refusal of the value of one field."""
    return Problem(400, message, code="invalid_value", param=field)


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body or a part of one. It refuses an undeclared field by name."""


@contextmanager
def renamed_fields(own: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of a `Problem` to its name in the API that was called; `own` maps our names to the API's."""
    try:
        yield
    except Problem as problem:
        ours = problem.param
        if ours is None or ours not in own:
            raise
        name = own[ours]
        message = problem.message.replace(ours, name)
        raise Problem(problem.status, message, problem.code, name, problem.headers) from problem


def check_count(field: str, count: int, limit: int, what: str = "entries") -> None:
    """Refuse a field whose count is above the limit."""
    if count > limit:
        message = f"the field '{field}' has {count} {what}; at most {limit} are allowed"
        raise Problem(400, message, "limit_exceeded", field)


def check_schema(field: str, schema: Any, limits: Limits) -> None:
    """Refuse a decoded JSON schema that is too deep or too long, without recursion."""
    level: list[Any] = [schema]
    depth = 0
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        if depth > limits.schema_depth:
            message = f"the field '{field}' nests deeper than the {limits.schema_depth} levels that are allowed"
            raise Problem(400, message, "limit_exceeded", field)
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]
    num_bytes = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode())
    check_count(field, num_bytes, limits.schema_bytes, "bytes as JSON")


def deadline_of(seconds: float | None, limits: Limits, field: str = "deadline_seconds") -> float:
    """The seconds that a request may take: the deadline that it asks for, or the default."""
    if seconds is None:
        return limits.deadline_seconds
    if not 0 < seconds <= limits.max_deadline_seconds:
        allowed = f"above 0 and at most {limits.max_deadline_seconds:.15g} (--max-request-timeout)"
        message = f"the field '{field}' is {seconds}; it must be {allowed}"
        raise Problem(400, message, "invalid_value", field)
    return seconds


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse more metadata than OpenAI takes."""
    check_count("metadata", len(metadata or ()), MAX_METADATA)


def check_not_stored(store: bool | None) -> None:
    """Refuse to store a response."""
    if store:
        raise refusal("store is true, but responses are not stored here; leave it out or set it to false", "store")


def check_cache_salt(salt: str | None) -> str | None:
    """The cache salt, checked: like vLLM's it is a string that is not empty."""
    if salt == "":
        raise refusal("cache_salt is empty; give a string that is not, or leave it out", "cache_salt")
    check_count("cache_salt", len(salt or ""), MAX_SALT_CHARS, "characters")
    return salt


def unsigned_seed(seed: int | None) -> int | None:
    """The unsigned seed of a seed that may be signed: a negative one counts as its 64 bits."""
    if seed is None or 0 <= seed < SEED_LIMIT:
        return seed
    if -SEED_LIMIT // 2 <= seed < 0:
        return seed + SEED_LIMIT
    raise refusal(f"seed is {seed}; it must be an integer from {-SEED_LIMIT // 2} to {SEED_LIMIT - 1}", "seed")


def thinking_budget(effort: str | None, state: ServerState, budgets: Mapping[str, int | None]) -> int | None:
    """The smallest of the budgets of a request, each checked by the name of its field, and of that of its effort.

    A model that cannot think takes any effort.
    """
    can_end = state.tokenizer.token_to_id(Tag.THINK_END) is not None
    given = [EFFORT_BUDGETS[effort]] if can_end and effort in EFFORT_BUDGETS else []
    for field, budget in budgets.items():
        if budget is None:
            continue
        if not 0 <= budget < TOKEN_LIMIT:
            raise refusal(f"{field} is {budget}; it must be an integer from 0 to {TOKEN_LIMIT - 1}", field)
        if not can_end:
            lacks = f"this model has no token {Tag.THINK_END.value!r} to end its thinking"
            raise refusal(f"{field} is {budget}, but {lacks}; leave {field.partition('.')[0]} out", field)
        given.append(budget)
    return min(given, default=None)


def check_token_ids(field: str, tokens: Iterable[int], state: ServerState) -> None:
    """Refuse token ids outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < state.vocab_size:
            raise refusal(f"{field} holds {token}; token ids go from 0 to {state.vocab_size - 1}", field)


def check_tools(tools: list[Tool], state: ServerState) -> tuple[Tool, ...]:
    """The tools, checked: their number, the size of their schemas, and their names, which must be valid and differ."""
    check_count("tools", len(tools), state.limits.tools)
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not tool.name or len(tool.name) > 128 or not tool.name.isprintable() or set(tool.name) & set("<> \t"):
            raise refusal(f"{where} has the name {shorten(tool.name)!r}; use up to 128 letters, digits, _ - .", where)
        if tool.name in seen:
            raise refusal(f"{where} has the name {tool.name!r} of another tool", where)
        check_schema(f"{where}.parameters", tool.parameters, state.limits)
        seen.add(tool.name)
    return tuple(tools)
