"""Refusals in the words of the interface that was called."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from glint.server.http.problems import Problem


@contextmanager
def field_names(own: Mapping[str, str]) -> Iterator[None]:
    """Let a `Problem` with a field that has another name in the interface speak of that name; `own` maps ours to it."""
    try:
        yield
    except Problem as problem:
        ours = problem.param
        if ours is None or ours not in own:
            raise
        name = own[ours]
        message = problem.message.replace(ours, name)
        raise Problem(problem.status, message, problem.code, name, problem.headers) from problem
