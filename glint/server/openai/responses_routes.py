"""The routes of stored responses: `GET` and `DELETE /v1/responses/{id}`, and its input items."""

from collections.abc import Iterable

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from glint.server.auth import tenant_of
from glint.server.http.body import shorten
from glint.server.http.problems import Problem
from glint.server.response_store import ResponseStore, StoredItem, StoredResponse

DEFAULT_LISTED = 20
MAX_LISTED = 100


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
            found = [index for index, item in enumerate(items) if item.id == after]
            if not found:
                raise _wrong_query("after", after, "the id of an item of this list")
            items = items[found[-1] + 1 :]
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
