"""Bad requests, structs, pointers and ids to the C functions: a status, a text that names the thing, no change.

Steps are abused in test_abi_abuse_steps.py, the making of an engine in test_abi_abuse_tables.py.
"""

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest

from glint.native import abi
from tests.cpu.raw_engine import (
    CONTROL,
    MAX_CONTEXT,
    MAX_REQUESTS,
    NARROW_OPTIONS,
    Handle,
    RawEngine,
    step_items,
)
from tests.cpu.small_engine import VOCAB_SIZE, Ask, int_array, native_request, native_sampling

pytestmark = pytest.mark.sanitize

INVALID = abi.STATUS_INVALID_ARGUMENT
UNKNOWN = abi.STATUS_UNKNOWN_REQUEST
BUSY = abi.STATUS_BUSY
INT_MAX = 2**31 - 1
NAN = math.nan
INF = math.inf
WRONG_SIZES = (0, 1, 3, -1, 8, 2**32 - 1)


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    """An engine; after the test it holds nothing and still gives the right answer."""
    opened = RawEngine(**NARROW_OPTIONS)
    yield opened
    assert opened.is_unharmed()
    opened.close()


def wrong_size(struct: Any, change: int) -> Any:
    """The struct with a size that is not its own: small changes count from the right one."""
    struct.struct_bytes = change if change in (0, 2**32 - 1) else struct.struct_bytes + change
    return struct


def array_of(kind: Any, *values: Any) -> Any:
    """A C array of the values."""
    return (kind * len(values))(*values)


REQUEST_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_count is -1", {"prompt_count": -1}),
    ("prompt_count is 0", {"prompt_count": 0}),
    (f"prompt_count is {MAX_CONTEXT}", {"prompt_count": MAX_CONTEXT}),
    (f"prompt_count is {INT_MAX}", {"prompt_count": INT_MAX}),
    ("prompt_tokens is null", {"prompt_tokens": None}),
    ("prompt_tokens[1] is -1", {"prompt_tokens": int_array([1, -1, 1])}),
    (f"prompt_tokens[2] is {VOCAB_SIZE}", {"prompt_tokens": int_array([1, 1, VOCAB_SIZE])}),
    (f"prompt_tokens[0] is {INT_MAX}", {"prompt_tokens": int_array([INT_MAX, 1, 1])}),
    ("prompt_tokens[0] is -2147483648", {"prompt_tokens": int_array([-(2**31), 1, 1])}),
    ("max_new_tokens is 0", {"max_new_tokens": 0}),
    ("max_new_tokens is -1", {"max_new_tokens": -1}),
    ("stop_token_count is -1", {"stop_token_count": -1}),
    ("stop_token_count is 1025", {"stop_token_count": 1025}),
    (f"stop_token_count is {INT_MAX}", {"stop_token_count": INT_MAX}),
    ("stop_tokens is null", {"stop_token_count": 1, "stop_tokens": None}),
    ("stop_tokens[0] is -5", {"stop_token_count": 1, "stop_tokens": int_array([-5])}),
    (f"stop_tokens[1] is {VOCAB_SIZE}", {"stop_token_count": 2, "stop_tokens": int_array([0, VOCAB_SIZE])}),
    ("stop_sequence_count is -1", {"stop_sequence_count": -1}),
    ("stop_sequence_count is 257", {"stop_sequence_count": 257}),
    (f"stop_sequence_count is {INT_MAX}", {"stop_sequence_count": INT_MAX}),
    ("stop_sequence_lengths is null", {"stop_sequence_count": 1, "stop_sequence_lengths": None}),
    ("stop_sequence_lengths[0] is 0", {"stop_sequence_count": 1, "stop_sequence_lengths": int_array([0])}),
    ("stop_sequence_lengths[0] is -1", {"stop_sequence_count": 1, "stop_sequence_lengths": int_array([-1])}),
    ("stop_sequence_lengths[0] is 257", {"stop_sequence_count": 1, "stop_sequence_lengths": int_array([257])}),
    (
        f"stop_sequence_lengths[1] is {INT_MAX}",
        {"stop_sequence_count": 2, "stop_sequence_lengths": int_array([1, INT_MAX])},
    ),
    (
        "stop_sequence_tokens is null",
        {"stop_sequence_count": 1, "stop_sequence_lengths": int_array([2]), "stop_sequence_tokens": None},
    ),
    (
        f"stop_sequence_tokens[2] is {VOCAB_SIZE}",
        {
            "stop_sequence_count": 2,
            "stop_sequence_lengths": int_array([2, 1]),
            "stop_sequence_tokens": int_array([3, 4, VOCAB_SIZE]),
        },
    ),
    (f"cache_salt is {2**63}", {"cache_salt": 2**63}),
    (f"cache_salt is {2**64 - 1}", {"cache_salt": 2**64 - 1}),
    ("sampling is null", {"sampling": None}),
]

SAMPLING_FAULTS: list[tuple[str, dict[str, Any]]] = [
    *((f"temperature is {text}", {"temperature": value}) for text, value in (("nan", NAN), ("inf", INF), ("-1", -1.0))),
    *((f"top_p is {text}", {"top_p": value}) for text, value in (("nan", NAN), ("inf", INF), ("0", 0.0), ("1.5", 1.5))),
    *((f"top_p is {text}", {"top_p": value}) for text, value in (("-0.5", -0.5), ("-inf", -INF))),
    *((f"min_p is {text}", {"min_p": value}) for text, value in (("nan", NAN), ("inf", INF), ("-1", -1.0), ("2", 2.0))),
    *(
        (f"repetition_penalty is {text}", {"repetition_penalty": value})
        for text, value in (("nan", NAN), ("inf", INF), ("0", 0.0), ("-1", -1.0))
    ),
    *(
        (f"{name} is {text}", {name: value})
        for name in ("frequency_penalty", "presence_penalty")
        for text, value in (("nan", NAN), ("-inf", -INF), ("2.5", 2.5), ("-2.5", -2.5))
    ),
    ("top_k is -1", {"top_k": -1}),
    ("top_k is -2147483648", {"top_k": -(2**31)}),
    *((f"{name} is {value}", {name: value}) for name in ("has_logprobs", "has_prompt_logprobs") for value in (2, -1)),
    *((f"{name} is {value}", {name: value}) for name in ("num_logprobs", "num_prompt_logprobs") for value in (21, -1)),
    ("bias_count is -1", {"bias_count": -1}),
    ("bias_count is 1025", {"bias_count": 1025}),
    (f"bias_count is {INT_MAX}", {"bias_count": INT_MAX}),
    ("bias_tokens", {"bias_count": 1, "bias_values": array_of(ctypes.c_float, 1.0)}),
    ("bias_values", {"bias_count": 1, "bias_tokens": int_array([1])}),
    *(
        (f"bias_tokens[1] is {token}", {"bias_count": 2, "bias_tokens": int_array([0, token])})
        for token in (-1, VOCAB_SIZE, INT_MAX)
    ),
    *(
        (f"bias_values[0] is {text}", {"bias_count": 1, "bias_values": array_of(ctypes.c_float, value)})
        for text, value in (("nan", NAN), ("inf", INF), ("-inf", -INF), ("101", 101.0), ("-101", -101.0))
    ),
]


def names_of(faults: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [words for words, _ in faults]


@pytest.mark.parametrize(("words", "changes"), REQUEST_FAULTS, ids=names_of(REQUEST_FAULTS))
def test_bad_request_is_refused(engine: RawEngine, words: str, changes: dict[str, Any]) -> None:
    request = native_request(Ask((1, 2, 3)))
    for name, value in changes.items():
        setattr(request, name, value)
    request_id = ctypes.c_uint64(17)
    engine.refuses(INVALID, words, "glint_add_request", request, request_id)
    assert request_id.value == 17


def test_the_most_that_a_request_may_ask_for_is_accepted(engine: RawEngine) -> None:
    stops = {"stop_tokens": (0,) * 1024, "stop_sequences": ((0,) * 256,) * 256}
    request = native_request(Ask((1,) * (MAX_CONTEXT - 1), INT_MAX, cache_salt=2**63 - 1, **stops))
    biases = {"bias_tokens": int_array([2] * 1024), "bias_values": array_of(ctypes.c_float, *[-100.0, 100.0] * 512)}
    request.sampling = ctypes.pointer(native_sampling(biases | {"bias_count": 1024, "num_prompt_logprobs": 20}))
    request_id = ctypes.c_uint64()
    engine.succeeds("glint_add_request", request, request_id)
    engine.succeeds("glint_free_request", request_id)


@pytest.mark.parametrize(("words", "changes"), SAMPLING_FAULTS, ids=names_of(SAMPLING_FAULTS))
def test_bad_sampling_is_refused(engine: RawEngine, words: str, changes: dict[str, Any]) -> None:
    bias = {"bias_tokens": int_array([1, 2]), "bias_values": array_of(ctypes.c_float, 1.0, 1.0)}
    given_bias = {} if words in ("bias_tokens", "bias_values") else bias
    request = native_request(Ask((1, 2, 3)))
    request.sampling = ctypes.pointer(native_sampling(given_bias | changes))
    engine.refuses(INVALID, words, "glint_add_request", request, ctypes.c_uint64())


@pytest.mark.parametrize("change", WRONG_SIZES)
def test_struct_of_another_size_is_refused(engine: RawEngine, change: int) -> None:
    request = wrong_size(native_request(Ask((1, 2, 3))), change)
    engine.refuses(INVALID, "request.struct_bytes", "glint_add_request", request, ctypes.c_uint64())
    request = native_request(Ask((1, 2, 3)))
    request.sampling = ctypes.pointer(wrong_size(native_sampling({}), change))
    engine.refuses(INVALID, "struct_bytes", "glint_add_request", request, ctypes.c_uint64())
    engine.refuses(INVALID, "stats.struct_bytes", "glint_stats", wrong_size(abi.sized(abi.EngineStats), change))
    arithmetic = wrong_size(abi.sized(abi.Arithmetic), change)
    engine.refuses(INVALID, "arithmetic.struct_bytes", "glint_measure_arithmetic", arithmetic)
    request_id = engine.add(CONTROL)
    ticket = wrong_size(abi.sized(abi.Ticket), change)
    engine.refuses(INVALID, "ticket.struct_bytes", "glint_submit_step", step_items((request_id, 4)), 1, ticket)
    results = wrong_size(abi.sized(abi.StepResults), change)
    for name in ("glint_prefill", "glint_decode_step"):
        engine.refuses(INVALID, "results.struct_bytes", name, request_id, results)
    ticket = engine.submit((request_id, 4))
    bad_ticket = wrong_size(abi.Ticket.from_buffer_copy(ticket), change)
    engine.refuses(INVALID, "ticket.struct_bytes", "glint_sample_step", bad_ticket, None)
    masks = wrong_size(abi.sized(abi.Masks), change)
    engine.refuses(INVALID, "masks.struct_bytes", "glint_sample_step", ticket, masks)
    engine.succeeds("glint_sample_step", ticket, None)
    engine.refuses(INVALID, "ticket.struct_bytes", "glint_collect_step", bad_ticket, abi.sized(abi.StepResults))
    engine.refuses(INVALID, "results.struct_bytes", "glint_collect_step", ticket, results)
    engine.collect(ticket)
    engine.succeeds("glint_free_request", request_id)


def test_null_pointers_are_refused(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    items = step_items((request_id, 4))
    results = abi.sized(abi.StepResults)
    engine.refuses(INVALID, "request is null", "glint_add_request", None, ctypes.c_uint64())
    engine.refuses(INVALID, "request id is null", "glint_add_request", native_request(CONTROL), None)
    engine.refuses(INVALID, "items", "glint_submit_step", None, 1, abi.sized(abi.Ticket))
    engine.refuses(INVALID, "ticket is null", "glint_submit_step", items, 1, None)
    ticket = engine.submit((request_id, 4))
    engine.refuses(INVALID, "ticket is null", "glint_sample_step", None, None)
    engine.succeeds("glint_sample_step", ticket, None)
    engine.refuses(INVALID, "ticket is null", "glint_collect_step", None, results)
    engine.refuses(INVALID, "results is null", "glint_collect_step", ticket, None)
    engine.collect(ticket)
    engine.refuses(INVALID, "results is null", "glint_prefill", request_id, None)
    engine.refuses(INVALID, "results is null", "glint_decode_step", request_id, None)
    engine.refuses(INVALID, "stats is null", "glint_stats", None)
    engine.refuses(INVALID, "bytes per second is null", "glint_measure_read", 4096, None)
    engine.refuses(INVALID, "arithmetic is null", "glint_measure_arithmetic", None)
    engine.succeeds("glint_free_request", request_id)


def every_call(engine: RawEngine) -> list[tuple[str, tuple[Any, ...]]]:
    """All functions that take an engine, with arguments that are good in themselves."""
    ticket = abi.sized(abi.Ticket, step=1)
    results = abi.sized(abi.StepResults)
    return [
        ("glint_add_request", (native_request(CONTROL), ctypes.c_uint64())),
        ("glint_free_request", (1,)),
        ("glint_release_pages", (1,)),
        ("glint_limit_reuse", (1, 0)),
        ("glint_submit_step", (step_items((1, 1)), 1, ticket)),
        ("glint_sample_step", (ticket, None)),
        ("glint_collect_step", (ticket, results)),
        ("glint_prefill", (1, results)),
        ("glint_decode_step", (1, results)),
        ("glint_stats", (abi.sized(abi.EngineStats),)),
        ("glint_check", ()),
        ("glint_measure_read", (4096, ctypes.c_double())),
        ("glint_measure_arithmetic", (abi.sized(abi.Arithmetic),)),
        ("glint_free_engine", ()),
    ]


def test_every_function_is_abused_here() -> None:
    harmless = {"glint_abi_version", "glint_backend_name", "glint_last_error"}
    without_engine = {"glint_describe_device", "glint_plan_engine", "glint_load_progress", "glint_init_engine"}
    engine_functions = {name for name, _ in every_call(RawEngine.__new__(RawEngine))}
    assert engine_functions | harmless | without_engine == abi.FUNCTIONS.keys()


def test_engine_that_is_none_is_refused(engine: RawEngine) -> None:
    memory = ctypes.create_string_buffer(256)
    inside = ctypes.cast(ctypes.addressof(engine.handle.contents) + 8, Handle)
    for handle in (Handle(), ctypes.cast(memory, Handle), inside):
        for name, arguments in every_call(engine):
            assert getattr(engine.library, name)(handle, *arguments) == INVALID
            assert "engine" in engine.error()


def test_freed_engine_is_refused() -> None:
    engine = RawEngine(**NARROW_OPTIONS)
    engine.close()
    for name, arguments in every_call(engine):
        assert engine.call(name, *arguments) == INVALID
        assert "not one of a living engine" in engine.error()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("glint_free_request", ()),
        ("glint_release_pages", ()),
        ("glint_limit_reuse", (0,)),
        ("glint_prefill", (abi.sized(abi.StepResults),)),
        ("glint_decode_step", (abi.sized(abi.StepResults),)),
    ],
)
def test_unknown_ids_are_refused(engine: RawEngine, function: str, arguments: tuple[Any, ...]) -> None:
    stale = engine.add(CONTROL)
    engine.succeeds("glint_free_request", stale)
    reused = engine.add(CONTROL)
    assert stale != reused
    for request_id in (0, 1, stale, reused + 1, reused + 2**32, 2**64 - 1):
        engine.refuses(UNKNOWN, str(request_id), function, request_id, *arguments)
        items = step_items((reused, 1), (request_id, 1))
        engine.refuses(UNKNOWN, str(request_id), "glint_submit_step", items, 2, abi.sized(abi.Ticket))
    engine.succeeds("glint_free_request", reused)
    engine.refuses(UNKNOWN, str(reused), "glint_free_request", reused)


def test_reuse_of_fewer_tokens_than_none_is_refused(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    for wrong in (-1, -(2**31)):
        engine.refuses(INVALID, f"reusable_tokens is {wrong}", "glint_limit_reuse", request_id, wrong)
    for right in (0, 2**31 - 1):
        engine.succeeds("glint_limit_reuse", request_id, right)
    ticket = engine.submit((request_id, 4))
    engine.succeeds("glint_limit_reuse", request_id, 4)
    engine.succeeds("glint_free_request", request_id)
    engine.refuses(UNKNOWN, "freed before", "glint_limit_reuse", request_id, 4)
    engine.finish(ticket)


def test_full_table_is_refused_and_ids_stay_distinct(engine: RawEngine) -> None:
    ids = [engine.add(CONTROL) for _ in range(MAX_REQUESTS)]
    assert len(set(ids)) == MAX_REQUESTS
    request = native_request(CONTROL)
    engine.refuses(BUSY, f"all {MAX_REQUESTS} request slots", "glint_add_request", request, ctypes.c_uint64())
    for request_id in ids:
        engine.succeeds("glint_free_request", request_id)
    again = [engine.add(CONTROL) for _ in range(MAX_REQUESTS)]
    assert not set(ids) & set(again)
    for request_id in again:
        engine.succeeds("glint_free_request", request_id)


@pytest.mark.parametrize("byte_count", [0, 2**37, 2**63, 2**64 - 1])
def test_reading_speed_of_an_impossible_size_is_refused(engine: RawEngine, byte_count: int) -> None:
    speed = ctypes.c_double(-1.0)
    engine.refuses(INVALID, str(byte_count), "glint_measure_read", byte_count, speed)
    assert speed.value == -1.0


def test_reading_speed_is_not_measured_beside_a_step(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    ticket = engine.submit((request_id, 4))
    engine.refuses(BUSY, "in flight", "glint_measure_read", 4096, ctypes.c_double())
    engine.finish(ticket)
    engine.succeeds("glint_free_request", request_id)
    for byte_count in (1, 63, 4097):
        speed = ctypes.c_double()
        engine.succeeds("glint_measure_read", byte_count, speed)
        assert speed.value > 0


def test_arithmetic_is_not_measured_beside_a_step(engine: RawEngine) -> None:
    request_id = engine.add(CONTROL)
    ticket = engine.submit((request_id, 4))
    arithmetic = abi.sized(abi.Arithmetic)
    engine.refuses(BUSY, "in flight", "glint_measure_arithmetic", arithmetic)
    engine.finish(ticket)
    engine.succeeds("glint_free_request", request_id)
    engine.succeeds("glint_measure_arithmetic", arithmetic)
    assert arithmetic.multiply_adds_per_second > 0
    assert arithmetic.fp8_weights_per_second > 0
