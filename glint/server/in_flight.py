"""The requests in flight: a listing without prompts and texts, and their cancelling.

A client sees and cancels the requests of its own key. The admin key reaches those of every key. Without any key the
clients of a server cannot be told apart, so only a server that this machine alone reaches lets them through.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glint.server.auth import ADMIN_KEYS_VARIABLE, AdminAccess, Tenant, tenant_of
from glint.server.http.body import shorten
from glint.server.http.problems import Problem

CANCELLED = 410
CANCELLED_BY_ADMIN = "cancelled_by_admin"
CANCELLED_BY_OWNER = "cancelled_by_owner"


class OpenCall(Protocol):
    """A call that has been read and has not ended."""

    @property
    def request_id(self) -> str:
        """The id in its response, in its headers and in the log."""

    @property
    def tenant(self) -> Tenant:
        """The holder of its key."""

    def describe(self) -> Mapping[str, object]:
        """Its id, route, state, age and token counts."""

    def cancel(self, problem: Problem) -> None:
        """End it early; its client gets the problem."""


class RequestsInFlight:
    """All open calls, oldest first. For one thread."""

    def __init__(self) -> None:
        self._calls: dict[str, OpenCall] = {}

    def add(self, call: OpenCall) -> None:
        """Add a call."""
        self._calls[call.request_id] = call

    def remove(self, call: OpenCall) -> None:
        """Remove a call, or do nothing where it was not added."""
        self._calls.pop(call.request_id, None)

    def of(self, tenant: Tenant) -> list[OpenCall]:
        """The calls that a tenant may see and cancel."""
        return [call for call in self._calls.values() if tenant.is_admin or call.tenant == tenant]


class RequestRoutes:
    """`GET /requests` and `DELETE /requests/{id}`."""

    def __init__(self, in_flight: RequestsInFlight, access: AdminAccess) -> None:
        self._in_flight = in_flight
        self._access = access

    async def list_requests(self, request: Request) -> Response:
        """The requests of the client's key, or with the admin key those of every key."""
        tenant = self._identify(request)
        reaches_all = tenant.is_admin or self._access == "local"
        listing = [call.describe() for call in self._in_flight.of(tenant)]
        return _json({"object": "list", "shown": "all" if reaches_all else "own", "data": listing})

    async def cancel_request(self, request: Request) -> Response:
        """End a request: its client gets an error, and its pages become free."""
        tenant = self._identify(request)
        request_id = request.path_params["request_id"]
        for call in self._in_flight.of(tenant):
            if call.request_id == request_id:
                call.cancel(_cancelled(tenant))
                return _json({"id": request_id, "object": "request", "cancelled": True})
        message = (
            f"no request {shorten(request_id)!r} of this key is in flight; it may have ended, and GET /requests "
            "lists those that have not"
        )
        raise Problem(404, message, code="request_not_found")

    def _identify(self, request: Request) -> Tenant:
        """The tenant of the client; refuses a client that cannot be told from others."""
        tenant = tenant_of(request.scope)
        if tenant.is_admin or self._access in ("keys", "local"):
            return tenant
        if self._access == "admin":
            message = "requests in flight need the admin key; send it as 'Authorization: Bearer KEY'"
            raise Problem(401, message, code="admin_key_required", headers={"WWW-Authenticate": 'Bearer realm="glint"'})
        message = (
            "this server has no keys and others may reach it, so nobody may list or cancel requests; start it with "
            f"--admin-api-key or {ADMIN_KEYS_VARIABLE}"
        )
        raise Problem(403, message, code="admin_key_required")


def _cancelled(tenant: Tenant) -> Problem:
    if tenant.is_admin:
        return Problem(CANCELLED, "the administrator of the server cancelled the request", code=CANCELLED_BY_ADMIN)
    return Problem(CANCELLED, "the request was cancelled with the key that sent it", code=CANCELLED_BY_OWNER)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
