"""A running request: its output, its token counts and how it ended."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from glint.engine.request import StepOutput
from glint.server.admission import QueueSlot
from glint.server.generation.prepare import PreparedRequest
from glint.server.http.problems import Problem
from glint.server.service import OutputStream
from glint.server.state import ServerState, errors_as_problems
from glint.text.output import OutputEvent, OutputParser, ToolCallBegun, merge_texts

ApiFinishReason = Literal["stop", "length", "tool_calls"]
CLIENT_LEFT = 499
ANSWER_FAILED = "answer_failed"


class Delta(NamedTuple):
    """What one step added to one choice: parsed events, or plain text where the request has no parser."""

    choice: int
    events: list[OutputEvent]
    text: str
    output: StepOutput
    finish_reason: ApiFinishReason | None


@dataclass
class Usage:
    """Tokens of a request so far, over all its choices; of its drafts, those that the model verified.

    A token of thinking is one that the model wrote while it thought: the closing tag is, the opening tag is not.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Generation:
    """A request from its admission to its end: one prompt or several, each with the same number of choices.

    Choices are numbered over all prompts. `begin` admits the request to the bounded queue and submits it to the engine.
    `deltas` yields the output until every choice has ended. `close` aborts the choices that still run and frees the
    queue slot; it may be called at any time and more than once.
    """

    def __init__(self, state: ServerState, prompts: Sequence[PreparedRequest], seconds_gone: float = 0.0) -> None:
        """The request arrived `seconds_gone` ago; its deadline counts from then."""
        self.prompts = prompts
        self.params = prompts[0].engine_request.params
        self.usage = Usage(sum(len(prompt.engine_request.prompt_tokens) for prompt in prompts))
        self.endings: list[str] = []
        self.stream: OutputStream | None = None
        self._state = state
        self._seconds = prompts[0].deadline_seconds
        self._seconds_gone = seconds_gone
        self._arrived_at = time.monotonic() - seconds_gone
        self._has_output = False
        self._deadline: asyncio.TimerHandle | None = None
        self._slot: QueueSlot | None = None
        repeated = [prompt for prompt in prompts for _ in range(self.params.n)]
        self._parsers = [None if prompt.parser is None else prompt.parser.make() for prompt in repeated]
        self._has_calls = [False] * len(repeated)
        self._counted: set[int] = set()

    @property
    def num_choices(self) -> int:
        """The number of choices over all prompts."""
        return len(self._parsers)

    async def begin(self) -> None:
        """Admit the request to the bounded queue and submit it to the engine."""
        requests = [prompt.engine_request for prompt in self.prompts]
        lengths = [len(engine_request.prompt_tokens) for engine_request in requests for _ in range(self.params.n)]
        self._slot = self._state.admission.admit(lengths, requests[0].share)
        deadline = asyncio.get_running_loop().time() + self._seconds - self._seconds_gone
        try:
            async with asyncio.timeout_at(deadline):
                with errors_as_problems():
                    self.stream = await self._state.service.submit(requests, self._slot.started)
        except TimeoutError:
            raise self._too_late() from None
        self._deadline = asyncio.get_running_loop().call_at(deadline, self._expire)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield new output until all choices have ended; raises the `Problem` that ends the request early."""
        stream = self.stream
        if stream is None:
            raise RuntimeError("begin() was not called on the generation")
        while len(self.endings) < self.num_choices:
            yield [self._read(stream.choices[output.request_id], output) for output in await stream.take()]

    async def follow(self, receive: Callable[[list[Delta]], bool]) -> None:
        """Call `receive` with the output of every step as soon as it arrives, until all choices have ended.

        It returns early once `receive` returns False; then `deltas` yields the rest. It raises the `Problem` that ends
        the request early.
        """
        stream = self.stream
        if stream is None:
            raise RuntimeError("begin() was not called on the generation")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            if ended.done():
                return
            try:
                deltas = [self._read(stream.choices[output.request_id], output) for output in stream.take_now()]
                goes_on = receive(deltas)
            except Exception as problem:
                ended.set_exception(problem)
                return
            if not goes_on or len(self.endings) == self.num_choices:
                ended.set_result(None)

        stream.listen(take)
        try:
            await ended
        finally:
            stream.listen(None)

    def cancel(self, problem: Problem) -> None:
        """End the request early. The reader of its deltas gets the problem."""
        if self.stream is not None:
            self._state.service.cancel(self.stream)
            self.stream.end(problem)

    def close(self) -> None:
        """Abort the choices that still run and free the queue slot."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self.stream is not None:
            self._state.service.cancel(self.stream)
        if self._slot is not None:
            self._slot.close()

    def _expire(self) -> None:
        self.cancel(self._too_late())

    def _too_late(self) -> Problem:
        message = f"the request was not done within {self._seconds:g} s; ask for less or raise deadline_seconds"
        return Problem(504, message, code="deadline_exceeded")

    def _read(self, choice: int, output: StepOutput) -> Delta:
        """Parse one output of a choice and count it."""
        if output.finish_reason == "failed":
            raise Problem(self._status_of_failure(), f"the answer failed: {output.failure}", code=ANSWER_FAILED)
        text = output.text or ""
        events: list[OutputEvent] = []
        if not self._has_output:
            self._has_output = True
            self._state.metrics.observe_first_token(time.monotonic() - self._arrived_at)
        self.usage.completion_tokens += len(output.token_ids)
        self.usage.draft_tokens += output.draft_tokens
        self.usage.accepted_draft_tokens += output.accepted_tokens
        if choice % self.params.n == 0 and choice not in self._counted:
            self._counted.add(choice)
            self.usage.cached_tokens += output.cached_tokens
            prompt_tokens = len(self.prompts[choice // self.params.n].engine_request.prompt_tokens)
            self._state.metrics.observe_prompt(prompt_tokens, output.cached_tokens)
        parser = self._parsers[choice]
        if parser is not None:
            events = self._parse(parser, choice, text, output)
        reason: ApiFinishReason | None = None
        if output.finish_reason is not None:
            self.endings.append(_ending(output))
            is_stop = output.finish_reason == "stop"
            reason = "tool_calls" if is_stop and self._has_calls[choice] else "stop" if is_stop else "length"
        return Delta(choice, events, text, output, reason)

    def _status_of_failure(self) -> int:
        """The client chose the grammar, so an output that the grammar cannot continue is the client's error."""
        return 500 if self.prompts[0].engine_request.grammar is None else 400

    def _parse(self, parser: OutputParser, choice: int, text: str, output: StepOutput) -> list[OutputEvent]:
        """Read the output token by token, so that no count depends on how many tokens a step had."""
        pieces = output.pieces or (text,)
        events: list[OutputEvent] = []
        for place, piece in enumerate(pieces):
            self.usage.reasoning_tokens += parser.is_reasoning and place < len(output.token_ids)
            events += parser.push(piece) if piece else []
        if output.finish_reason is not None:
            events += parser.finish(self._text_behind(output))
        if not self._has_calls[choice] and any(isinstance(event, ToolCallBegun) for event in events):
            self._has_calls[choice] = True
        return merge_texts(events) if len(pieces) > 1 else events

    def _text_behind(self, output: StepOutput) -> str | None:
        """The text behind the end of an output: a hidden stop string, nothing, or None where the output was cut.

        An output that ends at a stop token is complete: the text of that token is not part of it.
        """
        if output.finish_reason == "length":
            return None
        is_hidden = isinstance(output.stop_reason, str) and not self.params.include_stop_str_in_output
        return str(output.stop_reason) if is_hidden else ""


def _ending(output: StepOutput) -> str:
    """The outcome of a choice, as the outcome log names it."""
    if output.finish_reason == "length":
        return "length"
    return "finished" if output.stop_reason is None else "stopped"
