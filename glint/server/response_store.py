"""The responses of POST /v1/responses that the server keeps: in memory, bounded, each for the key that asked for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from glint.server.auth import Tenant, tenant_of
from glint.server.http.body import shorten
from glint.server.http.problems import Problem

STORE_FLAG = "--responses-store-size"
MAX_BYTES = 256 * 2**20
ITEM_BYTES = 200
DEFAULT_LISTED = 20
MAX_LISTED = 100
OFF = f"this server stores no responses; start it with {STORE_FLAG} N"


class StoredItem(NamedTuple):
    """An item of a conversation as JSON, and its id."""

    id: str
    body: bytes


@dataclass(frozen=True)
class StoredResponse:
    """A response as JSON, with every item that the model read before it and the items of its output.

    Of `context`, the last `num_new` items came with the request itself and the others with earlier ones.
    """

    id: str
    body: bytes
    context: tuple[StoredItem, ...]
    num_new: int
    output: tuple[StoredItem, ...]

    @property
    def num_bytes(self) -> int:
        """An upper bound of its memory: it counts items that several responses share with each of them."""
        return len(self.body) + sum(len(item.body) + ITEM_BYTES for item in (*self.context, *self.output))

    @property
    def own_items(self) -> tuple[StoredItem, ...]:
        """The items that no earlier response has."""
        return (*self.context[len(self.context) - self.num_new :], *self.output)


class _KeyResponses:
    """The responses of one key, oldest first, and their items by id."""

    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.items: dict[str, bytes] = {}
        self.num_bytes = 0

    def add(self, response: StoredResponse) -> None:
        """Add a response."""
        self.responses[response.id] = response
        self.items |= dict(response.own_items)
        self.num_bytes += response.num_bytes

    def remove(self, response_id: str) -> None:
        """Remove a response and the items that came with it."""
        response = self.responses.pop(response_id)
        for item in response.own_items:
            self.items.pop(item.id, None)
        self.num_bytes -= response.num_bytes


class ResponseStore:
    """At most `max_responses` responses of all keys, in at most `max_bytes`. For one thread.

    A key finds its own responses alone; the clients of a server without keys share one store. A store that is full
    drops the oldest response of the key that has the most, so that one key cannot push out those of another that has
    less. With `max_responses` 0 the store is off.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._keys: dict[int, _KeyResponses] = {}

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return self.max_responses > 0

    def add(self, tenant: Tenant, response: StoredResponse) -> None:
        """Store a response, and drop others where the store is full."""
        self._keys.setdefault(tenant.cache_salt, _KeyResponses()).add(response)
        while sum(len(key.responses) for key in self._keys.values()) > self.max_responses:
            self._drop_oldest(max(self._keys, key=lambda salt: len(self._keys[salt].responses)))
        while sum(key.num_bytes for key in self._keys.values()) > self._max_bytes:
            self._drop_oldest(max(self._keys, key=lambda salt: self._keys[salt].num_bytes))

    def find(self, tenant: Tenant, response_id: str) -> StoredResponse | None:
        """A response of the tenant."""
        return self._of(tenant).responses.get(response_id)

    def find_item(self, tenant: Tenant, item_id: str) -> bytes | None:
        """An item of the tenant's responses, of their input or output."""
        return self._of(tenant).items.get(item_id)

    def remove(self, tenant: Tenant, response_id: str) -> bool:
        """Remove a response; whether it was there."""
        if self.find(tenant, response_id) is None:
            return False
        self._remove(tenant.cache_salt, response_id)
        return True

    def explain_missing(self, what: str) -> str:
        """Why something is not in the store."""
        if not self.is_on:
            return f"{what} cannot be found: {OFF}"
        return (
            f"{what} is not stored for this key: it was sent with store false, was deleted, made room for newer ones "
            f"({STORE_FLAG} {self.max_responses}), or is in the memory of another server process or of one that ended"
        )

    def _of(self, tenant: Tenant) -> _KeyResponses:
        return self._keys.get(tenant.cache_salt, _KeyResponses())

    def _drop_oldest(self, salt: int) -> None:
        self._remove(salt, next(iter(self._keys[salt].responses)))

    def _remove(self, salt: int, response_id: str) -> None:
        self._keys[salt].remove(response_id)
        if not self._keys[salt].responses:
            del self._keys[salt]


class StoredResponseRoutes:
    """`GET` and `DELETE /v1/responses/{id}`, and `GET /v1/responses/{id}/input_items`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def show(self, request: Request) -> Response:
        """A stored response."""
        _check_query(request.query_params, ())
        return _json(self._find(request).body)

    async def delete(self, request: Request) -> Response:
        """Remove a stored response. Later ones that continue it keep their conversation."""
        found = self._find(request)
        self._store.remove(tenant_of(request.scope), found.id)
        return _json(msgspec.json.encode({"id": found.id, "object": "response", "deleted": True}))

    async def list_input(self, request: Request) -> Response:
        """The items that the model read before a stored response, those of earlier turns among them, in pages."""
        query = request.query_params
        _check_query(query, ("limit", "order", "after"))
        items = list(self._find(request).context)
        if _one_of(query, "order", ("desc", "asc")) == "desc":
            items.reverse()
        limit = query.get("limit", str(DEFAULT_LISTED))
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
            raise _wrong_query("limit", limit, f"a number from 1 to {MAX_LISTED}")
        if (after := query.get("after")) is not None:
            index = next((index for index, item in enumerate(items) if item.id == after), None)
            if index is None:
                raise _wrong_query("after", after, "the id of an item of this list")
            items = items[index + 1 :]
        return _json(_page(items, int(limit)))

    def _find(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        found = self._store.find(tenant_of(request.scope), response_id)
        if found is None:
            message = self._store.explain_missing(f"the response {shorten(response_id)!r}")
            raise Problem(404, message, code="response_not_found", param="response_id")
        return found


def _page(items: list[StoredItem], limit: int) -> bytes:
    shown = items[:limit]
    page = {
        "object": "list",
        "data": [msgspec.Raw(item.body) for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(items) > limit,
    }
    return msgspec.json.encode(page)


def _check_query(query: QueryParams, known: Iterable[str]) -> None:
    for name in query:
        if name not in known:
            message = f"the query parameter '{shorten(name)}' is not supported; remove it"
            raise Problem(400, message, code="unknown_field", param=shorten(name))


def _one_of(query: QueryParams, name: str, allowed: tuple[str, ...]) -> str:
    value = query.get(name, allowed[0])
    if value not in allowed:
        raise _wrong_query(name, value, " or ".join(allowed))
    return value


def _wrong_query(name: str, value: str, allowed: str) -> Problem:
    message = f"the query parameter '{name}' is {shorten(value)!r}; give {allowed}"
    return Problem(400, message, code="invalid_value", param=name)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
