"""Who may list and cancel requests, over the routes alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.testclient import TestClient

from glint.server.app import _answer_http, _answer_problem
from glint.server.auth import AdminAccess, ApiKeys, Authentication, Tenant
from glint.server.http.problems import Problem
from glint.server.in_flight import RequestRoutes, RequestsInFlight


@dataclass
class Call:
    """A call that remembers how it was ended."""

    request_id: str
    tenant: Tenant
    problems: list[Problem] = field(default_factory=list)

    def describe(self) -> dict[str, object]:
        return {"id": self.request_id}

    def cancel(self, problem: Problem) -> None:
        self.problems.append(problem)


def make(access: AdminAccess, keys: ApiKeys, *calls: Call) -> TestClient:
    in_flight = RequestsInFlight()
    for call in calls:
        in_flight.add(call)
    routes = RequestRoutes(in_flight, access)
    listed = Route("/requests", routes.list_requests, methods=["GET"])
    ended = Route("/requests/{request_id}", routes.cancel_request, methods=["DELETE"])
    handlers = {HTTPException: _answer_http, Problem: _answer_problem}
    return TestClient(Authentication(Starlette(routes=[listed, ended], exception_handlers=handlers), keys))


@pytest.mark.parametrize(
    ("access", "key", "status"),
    [
        ("local", None, 200),
        ("closed", None, 403),
        ("closed", "admin", 403),
        ("admin", None, 401),
        ("admin", "wrong", 401),
        ("admin", "admin", 200),
    ],
)
def test_without_api_keys(access: AdminAccess, key: str | None, status: int) -> None:
    call = Call("one", Tenant(0))
    client = make(access, ApiKeys([], admin_keys=["admin"] if access == "admin" else []), call)
    headers = {} if key is None else {"x-api-key": key}
    for answer in (client.get("/requests", headers=headers), client.delete("/requests/one", headers=headers)):
        assert answer.status_code == status
        if status != 200:
            assert answer.json()["error"]["code"] == "admin_key_required"
            assert ("--admin-api-key" in answer.text) == (status == 403)
    assert len(call.problems) == (status == 200)


def test_a_key_does_not_learn_of_the_requests_of_another() -> None:
    keys = ApiKeys(["first", "second"], admin_keys=["admin"])
    first, second = keys.find(b"first"), keys.find(b"second")
    assert first is not None and second is not None
    calls = Call("of-first", first), Call("of-second", second)
    client = make("keys", keys, *calls)

    def listed(key: str) -> list[str]:
        return [entry["id"] for entry in client.get("/requests", headers={"x-api-key": key}).json()["data"]]

    assert (listed("first"), listed("second"), listed("admin")) == (
        ["of-first"],
        ["of-second"],
        ["of-first", "of-second"],
    )
    foreign = client.delete("/requests/of-second", headers={"x-api-key": "first"})
    unknown = client.delete("/requests/of-nobody", headers={"x-api-key": "first"})
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace("of-second", "of-nobody") == unknown.text
    assert not calls[1].problems
    assert client.delete("/requests/of-second", headers={"x-api-key": "admin"}).status_code == 200
    assert [problem.code for problem in calls[1].problems] == ["cancelled_by_admin"]
    assert client.get("/requests").status_code == 401
