"""The thinking budget of a request: the smallest of its fields, each checked under its own name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glint.errors import RequestError
from glint.server.auth import ApiKeys
from glint.server.fields import EFFORT_BUDGETS, thinking_budget
from glint.server.http.problems import Problem
from glint.server.settings import ServerSettings
from glint.server.state import ServerState
from glint.text.tokenizer import Tokenizer
from tests.pure.text_folder import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", name="glm")
def glm_state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state of a server whose model can think."""
    return SimpleNamespace(tokenizer=Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module", name="plain")
def plain_state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state of a server whose model has no token that ends thinking."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"</think>"', '"</thought>"'))
    return SimpleNamespace(tokenizer=Tokenizer(folder))


@pytest.mark.parametrize(
    ("effort", "budgets", "held"),
    [
        (None, {}, None),
        (None, {"thinking_budget": None}, None),
        (None, {"thinking_budget": 0}, 0),
        (None, {"thinking_budget": 9, "thinking.budget_tokens": 4}, 4),
        ("none", {}, None),
        ("minimal", {}, 512),
        ("low", {}, 2048),
        ("medium", {}, 8192),
        ("high", {}, None),
        ("xhigh", {"thinking_budget": 9}, 9),
        ("low", {"thinking_budget": 9000}, 2048),
        ("low", {"thinking_budget": 17}, 17),
        (None, {"thinking_budget": 2**31 - 1}, 2**31 - 1),
    ],
)
def test_the_smallest_holds(glm: Any, effort: str | None, budgets: dict[str, int | None], held: int | None) -> None:
    assert thinking_budget(effort, glm, budgets) == held


@pytest.mark.parametrize("value", [-1, 2**31])
def test_each_is_checked_even_where_another_is_smaller(glm: Any, value: int) -> None:
    with pytest.raises(Problem, match=r"thinking\.budget_tokens is") as refused:
        thinking_budget("low", glm, {"thinking_budget": 1, "thinking.budget_tokens": value})
    assert (refused.value.status, refused.value.param) == (400, "thinking.budget_tokens")


def test_a_model_that_cannot_think_takes_efforts_and_refuses_budgets(plain: Any) -> None:
    assert thinking_budget("low", plain, {"thinking_budget": None}) is None
    with pytest.raises(Problem, match="has no token '</think>'") as refused:
        thinking_budget(None, plain, {"thinking_budget": 0})
    assert (refused.value.status, refused.value.param) == (400, "thinking_budget")


def test_the_budgets_of_the_efforts_are_documented() -> None:
    rows = re.findall(r"^\| effort `(\w+)` \| ([\d,]+) \|$", (ROOT / "docs" / "server.md").read_text(), re.MULTILINE)
    assert {effort: int(budget.replace(",", "")) for effort, budget in rows} == EFFORT_BUDGETS


@pytest.mark.parametrize(("most", "asked", "held"), [(5, None, 5), (5, 17, 5), (5, 1, 1), (0, 1, 0), (None, 17, 17)])
def test_the_bound_of_the_server_holds_for_every_request(most: int | None, asked: int | None, held: int) -> None:
    state: Any = SimpleNamespace(max_thinking_tokens=most, sampling_defaults={}, max_model_len=100)
    assert ServerState.sampling(state, thinking_budget=asked).thinking_budget == held


@pytest.mark.parametrize("value", [-1, 2**31])
def test_a_bound_that_cannot_be_is_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(RequestError, match=f"--max-thinking-tokens is {value}; it must be"):
        ServerSettings(tmp_path, ("glm",), ApiKeys([]), max_thinking_tokens=value)
