"""The C functions called as they are, without the checks of the Python side."""

import ctypes
from typing import Any

from glint.checkpoint.table import Checkpoint
from glint.native import abi
from glint.native.library import choose_library, load_library
from tests.cpu.small_engine import Answer, Ask, answer_alone, engine_options, make_ask, native_request, small_model

Handle = ctypes.POINTER(abi.Engine)
CONTROL = make_ask(range(40, 61), 6)
MAX_CONTEXT = 256
MAX_STEP_TOKENS = 64
MAX_STEP_ITEMS = 8
MAX_REQUESTS = 12
NARROW_OPTIONS = {
    "num_pages": 64,
    "max_context_tokens": MAX_CONTEXT,
    "max_step_tokens": MAX_STEP_TOKENS,
    "max_step_items": MAX_STEP_ITEMS,
    "max_requests": MAX_REQUESTS,
}


class RawEngine:
    """An engine by its handle. Statuses are returned as numbers; a call that must be refused goes to `refuses`."""

    def __init__(self, checkpoint: Checkpoint | None = None, **changes: int) -> None:
        chosen = small_model() if checkpoint is None else checkpoint
        self.library = load_library(choose_library("cpu"))
        self.handle = Handle()
        table = chosen.tensor_array()
        tensors = table.ctypes.data_as(ctypes.POINTER(abi.Tensor))
        options = engine_options(chosen, **changes)
        status = self.library.glint_init_engine(options, tensors, len(table), self.handle)
        assert status == abi.STATUS_OK, self.error()

    def error(self) -> str:
        """The text of the last failure."""
        return str(self.library.glint_last_error().decode())

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function with this engine as its first argument."""
        return int(getattr(self.library, name)(self.handle, *arguments))

    def succeeds(self, name: str, *arguments: Any) -> None:
        """Call a function that must work."""
        status = self.call(name, *arguments)
        assert status == abi.STATUS_OK, self.error()
        assert not self.error()

    def refuses(self, status: int, words: str, name: str, *arguments: Any) -> None:
        """Call a function that must fail with this status and a text that holds the words, changing no counter."""
        before = bytes(self.stats())
        assert self.call(name, *arguments) == status, self.error()
        text = self.error()
        assert words in text, f"{words!r} is not in {text!r}"
        assert bytes(self.stats()) == before
        self.succeeds("glint_check")

    def stats(self) -> abi.EngineStats:
        """The engine's counters."""
        stats = abi.sized(abi.EngineStats)
        self.succeeds("glint_stats", stats)
        return stats

    def add(self, ask: Ask) -> int:
        """Add a request and return its id."""
        request_id = ctypes.c_uint64()
        self.succeeds("glint_add_request", native_request(ask), request_id)
        return request_id.value

    def submit(self, *items: tuple[int, int]) -> abi.Ticket:
        """Submit a step of (request id, tokens to advance) pairs."""
        ticket = abi.sized(abi.Ticket)
        self.succeeds("glint_submit_step", step_items(*items), len(items), ticket)
        return ticket

    def finish(self, ticket: abi.Ticket) -> abi.StepResults:
        """Sample a step and collect it."""
        self.succeeds("glint_sample_step", ticket, None)
        return self.collect(ticket)

    def collect(self, ticket: abi.Ticket) -> abi.StepResults:
        """Collect a step that was sampled; what the results point to lives until the next collect."""
        results = abi.sized(abi.StepResults)
        self.succeeds("glint_collect_step", ticket, results)
        return results

    def answer(self, ask: Ask) -> Answer:
        """Run a request to its end with the calls for one request, and free it."""
        request_id = self.add(ask)
        answer = Answer(len(ask.prompt))
        results = abi.sized(abi.StepResults)
        name = "glint_prefill"
        while answer.finish_reason == abi.FINISH_NONE:
            self.succeeds(name, request_id, results)
            answer.tokens += results.items[0].tokens[: results.items[0].token_count]
            answer.finish_reason = results.items[0].finish_reason
            for entry in results.logprobs[: results.logprob_count]:
                pair = (entry.token, entry.logprob)
                answer.logprobs[entry.position] = tuple(dict((*answer.logprobs.get(entry.position, ()), pair)).items())
            name = "glint_decode_step"
        self.succeeds("glint_free_request", request_id)
        return answer

    def is_unharmed(self) -> bool:
        """Whether the engine holds nothing, its books add up and it still gives the right answer."""
        left = self.stats()
        self.succeeds("glint_check")
        is_empty = (left.num_requests, left.steps_in_flight, left.pages_held) == (0, 0, 0)
        return is_empty and self.answer(CONTROL) == answer_alone(CONTROL)

    def close(self) -> None:
        """End the engine."""
        assert self.library.glint_free_engine(self.handle) == abi.STATUS_OK, self.error()


def step_items(*pairs: tuple[int, int]) -> Any:
    """An array of step items."""
    return (abi.StepItem * len(pairs))(
        *(abi.StepItem(request_id=request_id, advance_tokens=advance) for request_id, advance in pairs)
    )
