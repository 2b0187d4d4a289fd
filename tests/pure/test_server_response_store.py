"""Stored responses: continued by id through OpenAI's client, read, deleted, bounded, and each for its own key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItemList

from glint.server.auth import Tenant
from glint.server.http.problems import Problem
from glint.server.response_store import ITEM_BYTES, ResponseStore, StoredItem, StoredResponse
from tests.pure.scripted_model import MODEL, Scripted, serving

SIZE = 3
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = "I look.</think><tool_call>now</tool_call>"


@pytest.fixture
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A server that keeps a few responses of two keys."""
    with serving(tmp_path_factory.mktemp("storing"), SIZE, ("first", "second")) as server:
        yield server


def client_of(scripted: Scripted, key: str = "first") -> openai.OpenAI:
    """The official client with a key."""
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(scripted: Scripted, client: openai.OpenAI, answer: str, **fields: Any) -> Any:
    """The response to a request."""
    scripted.say(answer)
    return client.responses.create(**{"model": MODEL, "input": "Hi"} | fields)


def stream(scripted: Scripted, client: openai.OpenAI, answer: str, **fields: Any) -> Any:
    """The response that a stream ends with."""
    *_, last = ask(scripted, client, answer, stream=True, **fields)
    return last.response


@pytest.mark.parametrize("respond", [ask, stream])
def test_a_conversation_goes_on_by_id(scripted: Scripted, respond: Any) -> None:
    client = client_of(scripted)
    first = respond(scripted, client, "</think>Hello, Ann.", instructions="Be short.", input="I am Ann.")
    assert first.to_dict()["store"] is True and "<|system|>Be short.<|user|>I am Ann." in scripted.prompt
    second = respond(scripted, client, "</think>Ann.", input="Who am I?", previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.instructions is None
    whole = "<sop><|user|>I am Ann.<|assistant|></think>Hello, Ann.<|user|>Who am I?<|assistant|><think>"
    assert scripted.prompt.endswith(whole)
    respond(scripted, client, "</think>Yes.", input="Sure?", previous_response_id=second.id, instructions="Shout.")
    assert "<sop><|system|>Shout.<|user|>I am Ann." in scripted.prompt
    assert "Who am I?<|assistant|></think>Ann.<|user|>Sure?<" in scripted.prompt
    respond(scripted, client, "</think>Bob.", input="I am Bob.", previous_response_id=first.id)
    assert scripted.prompt.endswith("Hello, Ann.<|user|>I am Bob.<|assistant|><think>")


def test_a_tool_loop_by_id_sends_the_result_alone(scripted: Scripted) -> None:
    client = client_of(scripted)
    first = ask(scripted, client, CALL, input="What time is it?", tools=[NOW])
    thought, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = ask(scripted, client, "</think>Noon.", input=[result], tools=[NOW], previous_response_id=first.id)
    read = "<think>I look.</think><tool_call>now</tool_call><|observation|><tool_response>noon</tool_response>"
    assert read in scripted.prompt and second.output_text == "Noon."
    address = f"{scripted.url}/v1/responses/{second.id}/input_items?order=asc"
    listed = httpx.get(address, headers={"x-api-key": "first"}, timeout=60).json()
    kinds = [item.type for item in ResponseItemList.model_validate(listed).data]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    references: Any = [{"type": "item_reference", "id": item.id} for item in (thought, call)]
    ask(scripted, client, "</think>Noon.", input=[{"role": "user", "content": "So?"}, *references, result], tools=[NOW])
    assert f"<|user|>So?<|assistant|>{read}" in scripted.prompt


def test_a_stored_response_is_the_one_that_was_sent(scripted: Scripted) -> None:
    client = client_of(scripted)
    whole = ask(scripted, client, CALL, tools=[NOW], metadata={"topic": "time"})
    streamed = stream(scripted, client, "I th", max_output_tokens=1)
    assert streamed.status == "completed"
    for response in (whole, streamed):
        assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    cut = stream(scripted, client, "</think>A long answer", max_output_tokens=3)
    assert cut.status == "incomplete" and client.responses.retrieve(cut.id).to_dict() == cut.to_dict()


def test_the_input_in_pages(scripted: Scripted) -> None:
    client = client_of(scripted)
    texts = [f"text {number}" for number in range(5)]
    response = ask(scripted, client, "</think>Fine.", input=[{"role": "user", "content": text} for text in texts])

    def shown(**query: Any) -> list[str]:
        return [item.content[0].text for item in client.responses.input_items.list(response.id, **query)]

    assert shown(order="asc") == texts and shown() == shown(limit=2) == texts[::-1]
    page = client.responses.input_items.list(response.id, limit=2, order="asc")
    assert page.has_more and [item.content[0].text for item in page.data] == texts[:2]
    address = f"{scripted.url}/v1/responses/{response.id}/input_items"
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_1", "include=a"):
        answer = httpx.get(f"{address}?{query}", headers={"x-api-key": "first"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_deleted_response_is_gone_and_its_successor_goes_on(scripted: Scripted) -> None:
    client = client_of(scripted)
    first = ask(scripted, client, "</think>Hello, Ann.", input="I am Ann.")
    second = ask(scripted, client, "</think>Ann.", input="Who am I?", previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            call(first.id)
    ask(scripted, client, "</think>Yes.", input="Sure?", previous_response_id=second.id)
    assert "I am Ann." in scripted.prompt
    with pytest.raises(openai.BadRequestError) as missing:
        ask(scripted, client, "</think>No.", previous_response_id=first.id)
    assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")
    assert "memory of another server process" in missing.value.message and "in input" in missing.value.message


def test_a_key_reaches_its_own_responses_alone(scripted: Scripted) -> None:
    mine, other = client_of(scripted), client_of(scripted, "second")
    response = ask(scripted, mine, "</think>A secret.")
    for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    reference: Any = [{"type": "item_reference", "id": response.output[0].id}]
    for fields in ({"previous_response_id": response.id}, {"input": reference}):
        with pytest.raises(openai.BadRequestError):
            ask(scripted, other, "</think>No.", **fields)
    assert mine.responses.retrieve(response.id).output_text == "A secret."
    assert httpx.get(f"{scripted.url}/v1/responses/{response.id}", timeout=60).status_code == 401


@pytest.mark.parametrize("deleted", [0, 1])
def test_an_item_of_two_responses_stays_with_the_one_that_is_left(scripted: Scripted, deleted: int) -> None:
    client = client_of(scripted)
    item: Any = {"type": "message", "role": "user", "content": "I am Ann.", "id": "msg_ann"}
    responses = [ask(scripted, client, "</think>Fine.", input=[item]) for _ in range(2)]
    client.responses.delete(responses[deleted].id)
    reference: Any = [{"type": "item_reference", "id": "msg_ann"}]
    ask(scripted, client, "</think>Fine.", input=reference, store=False)
    assert scripted.prompt.endswith("<|user|>I am Ann.<|assistant|><think>")
    client.responses.delete(responses[1 - deleted].id)
    with pytest.raises(openai.BadRequestError, match="refers to the item 'msg_ann'"):
        ask(scripted, client, "</think>Fine.", input=reference)


def test_references_and_earlier_turns_name_no_more_than_a_body_may_have(scripted: Scripted) -> None:
    client = client_of(scripted)

    def noted(name: str, note: Any) -> Any:
        content = [{"type": "output_text", "text": "A", "annotations": note}]
        return [{"role": "assistant", "content": content, "id": name}, {"role": "user", "content": "Hi"}]

    ask(scripted, client, "</think>Fine.", input=noted("msg_long", ["x" * 2**20]))
    first = ask(scripted, client, "</think>Fine.", input=noted("msg_lists", [[]] * 60_000))
    second = ask(scripted, client, "</think>Fine.", input=noted("b", [[]] * 60_000), previous_response_id=first.id)
    long, many = ([{"type": "item_reference", "id": name}] for name in ("msg_long", "msg_lists"))
    for fields, sentence in (
        ({"input": long * 5}, "more than the 4194304 bytes"),
        ({"input": many * 2}, "100000 objects and lists"),
        ({"input": many * 5000}, "at most 4096"),
        ({"previous_response_id": second.id}, "100000 objects and lists"),
    ):
        with pytest.raises(openai.BadRequestError, match=sentence) as refused:
            ask(scripted, client, "</think>No.", **fields)
        assert refused.value.code == "limit_exceeded"


def test_the_pages_of_items_with_one_id_end(scripted: Scripted) -> None:
    client = client_of(scripted)
    items: Any = [{"role": "user", "content": "Hi", "id": "msg_same"}] * 5
    response = ask(scripted, client, "</think>Fine.", input=items)
    assert len(list(client.responses.input_items.list(response.id, limit=2))) == 2
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.id"):
        ask(scripted, client, "</think>No.", input=[items[0] | {"id": "i" * 257}])


def test_what_is_not_to_be_stored_is_not(scripted: Scripted) -> None:
    client = client_of(scripted)
    response = ask(scripted, client, "</think>Fine.", store=False)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError, match="store false"):
        client.responses.retrieve(response.id)
    scripted.say(Problem(504, "too late", code="deadline_exceeded"))
    with pytest.raises(openai.APIError):
        list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert scripted.state.responses._keys == {}


def test_the_oldest_make_room(scripted: Scripted) -> None:
    client = client_of(scripted)
    ids = [ask(scripted, client, "</think>Fine.", store=True).id for _ in range(SIZE + 1)]
    with pytest.raises(openai.NotFoundError, match=f"made room for newer ones .*{SIZE}"):
        client.responses.retrieve(ids[0])
    assert [client.responses.retrieve(kept).id for kept in ids[1:]] == ids[1:]


def test_input_that_cannot_be_read_is_named_by_its_own_place(scripted: Scripted) -> None:
    client = client_of(scripted)
    first = ask(scripted, client, "</think>Fine.")
    items: Any = [{"role": "user", "content": "a"}, {"type": "reasoning", "encrypted_content": "?"}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(scripted, client, "</think>No.", input=items, previous_response_id=first.id)
    assert refused.value.param == "input[1].encrypted_content"


def make_response(name: str, num_bytes: int) -> StoredResponse:
    """A response of so many bytes with one item in its input and one in its output."""
    items = [StoredItem(f"{kind}-{name}", b"{}") for kind in ("in", "out")]
    body = b" " * (num_bytes - sum(len(item.body) + ITEM_BYTES for item in items))
    return StoredResponse(name, body, (items[0],), 1, (items[1],))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(500, 900), st.booleans()), max_size=40))
def test_the_store_keeps_its_bounds_and_its_items(adds: list[tuple[int, int, bool]]) -> None:
    store = ResponseStore(5, 3000)
    kept: list[tuple[Tenant, StoredResponse]] = []
    for number, (salt, num_bytes, removes) in enumerate(adds):
        tenant, response = Tenant(salt), make_response(str(number), num_bytes)
        store.add(tenant, response)
        kept.append((tenant, response))
        found = [store.find(tenant, response.id) is not None for tenant, response in kept]
        assert all(
            (store.find_item(tenant, f"{kind}-{response.id}") is not None) == is_found
            for (tenant, response), is_found in zip(kept, found, strict=True)
            for kind in ("in", "out")
        )
        kept = [entry for entry, is_found in zip(kept, found, strict=True) if is_found]
        assert len(kept) <= 5 and sum(response.num_bytes for _, response in kept) <= 3000
        assert kept[-1][1] is response
        if removes:
            assert store.remove(tenant, response.id) and not store.remove(tenant, response.id)
            kept.pop()


def test_a_key_with_many_does_not_push_out_one_with_few() -> None:
    store = ResponseStore(4, 10_000)
    few, many = Tenant(1), Tenant(2)
    store.add(few, make_response("few", 2500))
    for number in range(20):
        store.add(many, make_response(str(number), 3000))
    assert store.find(few, "few") is not None
    assert [number for number in range(20) if store.find(many, str(number)) is not None] == [18, 19]


def test_a_response_larger_than_the_store_leaves_it_empty() -> None:
    store = ResponseStore(4, 1000)
    store.add(Tenant(1), make_response("large", 2000))
    assert store.find(Tenant(1), "large") is None and store._keys == {}
