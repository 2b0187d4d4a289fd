"""The program of the llama.cpp peer: run by an interpreter that has llama-cpp-python; imports nothing of glint.

Takes one JSON argument and prints one JSON line. It decodes with the C functions of llama.cpp directly, takes no time
for sampling, and measures with flash attention off and on.
"""

import ctypes
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

Q8_0 = 7
FLASH_OFF = 0
FLASH_ON = 1
PROMPT_OF_DECODE = 64
PREFILL_REPEATS = 3
SLACK_TOKENS = 64


def convert(source: str, target: Path) -> None:
    """Write the model again with all matrices in Q8_0."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = Q8_0
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise SystemExit("llama.cpp could not convert the model to Q8_0")


class Peer:
    """One llama.cpp context and timed decodes on it."""

    def __init__(self, path: Path, order: dict[str, Any], flash: bool) -> None:
        """Load the model with the threads and the room that the order asks for."""
        most = max(order["batches"])
        room = most * (PROMPT_OF_DECODE + order["decode_tokens"] + SLACK_TOKENS) + order["prompt_tokens"]
        self.order = order
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = room
        params.n_batch = max(order["prompt_tokens"], most * PROMPT_OF_DECODE)
        params.n_ubatch = order["prompt_tokens"]
        params.n_seq_max = most
        params.n_threads = order["threads"]
        params.n_threads_batch = order["threads"]
        params.flash_attn_type = FLASH_ON if flash else FLASH_OFF
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp could not make a context")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.generator = np.random.default_rng(0)

    def close(self) -> None:
        """Free the context and the model."""
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def clear(self) -> None:
        """Forget all positions."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def tokens(self, count: int) -> list[int]:
        """Random tokens of the vocabulary."""
        return [int(token) for token in self.generator.integers(0, self.vocab_size, count)]

    def decode(self, rows: list[list[int]], position: int) -> float:
        """Advance every row from `position`; gives the seconds it took."""
        count = sum(len(row) for row in rows)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        entry = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[entry] = token
                batch.pos[entry] = position + offset
                batch.n_seq_id[entry] = 1
                batch.seq_id[entry][0] = sequence
                batch.logits[entry] = offset == len(row) - 1
                entry += 1
        batch.n_tokens = count
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_synchronize(self.context)
        seconds = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode answered {status}")
        return seconds

    def measure(self) -> list[float]:
        """Prefill, then decode at each batch size, in tokens per second."""
        prompt = self.order["prompt_tokens"]
        seconds = []
        for _ in range(PREFILL_REPEATS):
            self.clear()
            seconds.append(self.decode([self.tokens(prompt)], 0))
        speeds = [prompt / min(seconds)]
        for batch in self.order["batches"]:
            self.clear()
            self.decode([self.tokens(PROMPT_OF_DECODE) for _ in range(batch)], 0)
            times = [
                self.decode([self.tokens(1) for _ in range(batch)], PROMPT_OF_DECODE + step)
                for step in range(self.order["decode_tokens"])
            ]
            speeds.append(batch / statistics.median(times[1:]))
        return speeds


def measure(path: Path, order: dict[str, Any], flash: bool) -> list[float]:
    """Measure one setting on a model of its own."""
    peer = Peer(path, order, flash)
    try:
        return peer.measure()
    finally:
        peer.close()


def main() -> None:
    """Measure with flash attention off and on, and print the rows of each."""
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model-q8_0.gguf"
        convert(order["gguf"], path)
        speeds = [measure(path, order, flash) for flash in (False, True)]
    info = llama_cpp.llama_print_system_info().decode().strip()
    description = f"llama-cpp-python {llama_cpp.__version__}, Q8_0, better of flash attention on and off; {info}"
    print(json.dumps({"description": description, "tokens_per_second": speeds}))


if __name__ == "__main__":
    main()
