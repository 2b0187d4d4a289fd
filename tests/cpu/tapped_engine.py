"""An LLM on the test build of the library, whose hidden states, logits and pages a test can reach."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from glint import LLM, SamplingParams
from glint.engine.args import Device, Kernels, KvCacheDtype
from glint.native import abi
from tests.cpu.testing_library import declare, load_testing_library

FloatArray = NDArray[np.float32]
MAX_STEP_TOKENS = 1024
_FLOATS = POINTER(c_float)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens to a prompt with the five best log-probabilities at each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]]


class TappedEngine:
    """One model on one kernel set; a context that frees it."""

    def __init__(
        self,
        folder: Path,
        kernels: Kernels,
        threads: int = 2,
        device: Device = "cpu",
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        self._device = device
        self.llm = LLM(
            folder,
            threads=threads,
            skip_tokenizer=True,
            kernels=kernels,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            engine=load_testing_library(device)._name,
            max_step_tokens=MAX_STEP_TOKENS,
            max_num_seqs=64,
            kv_cache_bytes=64 << 20,
        )
        self._salts = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.llm.close()

    @property
    def kernels(self) -> int:
        """The kernel set that computes, as the header numbers it."""
        return self.llm.engine.stats().kernels

    def answer(self, prompts: Sequence[list[int]], count: int) -> list[Answer]:
        """Greedy answers of a number of tokens to prompts run together; fails where one does not come to its end."""
        params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=5, ignore_eos=True)
        completions = self.llm.generate(prompt_token_ids=prompts, sampling_params=params)
        assert all(completion.failure is None and len(completion.token_ids) == count for completion in completions)
        return [
            Answer(list(prompt), completion.token_ids, completion.logprobs or [])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def run_prompt(self, tokens: list[int]) -> None:
        """Compute all tokens in one step, finding nothing in the prefix cache."""
        assert len(tokens) <= MAX_STEP_TOKENS
        engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        steps_before = engine.stats().steps_done
        engine.submit(tokens, params, cache_salt=next(self._salts))
        (output,) = engine.step()
        assert output.failure is None and engine.stats().steps_done == steps_before + 1

    def logits(self, tokens: list[int]) -> FloatArray:
        """Logits [len, vocab] of every position of one step over the tokens."""
        self.run_prompt(tokens)
        vocab_size = self.llm.engine._model.vocab_size
        read = self._declare("glint_testing_logits", c_int32, POINTER(abi.Engine), _FLOATS, POINTER(c_int32), c_int64)
        parts = []
        piece = self.llm.settings.max_num_seqs
        for rows in np.split(np.arange(len(tokens), dtype=np.int32), range(piece, len(tokens), piece)):
            out = np.full((len(rows), vocab_size), np.nan, np.float32)
            pointers = out.ctypes.data_as(_FLOATS), rows.ctypes.data_as(POINTER(c_int32))
            self._check(read(self._handle, *pointers, len(rows)))
            parts.append(out)
        return np.concatenate(parts)

    def hidden_states(self, tokens: list[int], replaced: dict[int, FloatArray] | None = None) -> FloatArray:
        """What comes to each layer and out of the last, [layers + 1, len, hidden].

        The layers in `replaced` do not work on what comes to them but on the given rows [len, hidden].
        """
        with self._tap() as tap:
            replace = self._declare("glint_testing_tap_replace", c_int32, c_void_p, c_int64, _FLOATS, c_int64)
            for layer, rows in (replaced or {}).items():
                kept = np.ascontiguousarray(rows, np.float32)
                self._check(replace(tap, layer, kept.ctypes.data_as(_FLOATS), len(kept)))
            self.run_prompt(tokens)
            model = self.llm.engine._model
            states = np.full((model.num_layers + 1, len(tokens), model.hidden_size), np.nan, np.float32)
            count = self._declare("glint_testing_tap_count", c_int64, c_void_p, c_int64)
            read = self._declare("glint_testing_tap_read", None, c_void_p, c_int64, _FLOATS)
            for layer in range(model.num_layers + 1):
                assert count(tap, layer) == len(tokens)
                read(tap, layer, states[layer].ctypes.data_as(_FLOATS))
            return states

    def poison_pages(self) -> None:
        """Fill the whole page cache with NaN."""
        self._check(self._declare("glint_testing_poison_pages", c_int32, POINTER(abi.Engine))(self._handle))

    @property
    def _handle(self) -> Any:
        return self.llm.engine._native._engine

    @contextmanager
    def _tap(self) -> Iterator[Any]:
        tap = self._declare("glint_testing_tap_new", c_void_p, POINTER(abi.Engine))(self._handle)
        assert tap is not None
        try:
            yield tap
        finally:
            self._check(self._declare("glint_testing_tap_remove", c_int32, POINTER(abi.Engine))(self._handle))
            self._declare("glint_testing_tap_free", None, c_void_p)(tap)

    def _declare(self, name: str, result: Any, *arguments: Any) -> Any:
        return declare(name, result, *arguments, device=self._device)

    def _check(self, status: int) -> None:
        assert status == abi.STATUS_OK, self._declare("glint_testing_taps_error", c_char_p)().decode()
