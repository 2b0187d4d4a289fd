"""A load on the engine alone: the steps of prefill and decode without scheduler, HTTP and text.

The server's throughput over this one is the share that everything around the steps leaves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glint.bench.rank import RankBench, StepLoad
from glint.bench.report import LoadReport
from glint.checkpoint.table import Checkpoint
from glint.engine.args import EngineArgs
from glint.engine.loading import shown_loading
from glint.engine.memory_plan import size_engine
from glint.engine.native_options import native_options, refusing_in_public_words
from glint.engine.settings import EngineSettings
from glint.native.library import NativeEngine, load_progress, open_library
from glint.terminal import print_table, say

COLUMNS = (
    "at once",
    "output tok/s",
    "engine alone tok/s",
    "share",
    "TTFT p50 ms",
    "TPOT p50 ms",
    "ITL p50 ms",
    "engine prefill s",
    "engine decode ms/step",
)
NOT_MEASURED = "n/a"
WARM_UP_TOKENS = 4


def measure_engine(
    checkpoint: Checkpoint,
    args: EngineArgs,
    library_path: Path | None,
    concurrency: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
) -> dict[int, StepLoad]:
    """Make an engine as a server would, time the load at every concurrency, and free it.

    A concurrency whose requests do not fit into the page cache together is left out and named.
    """
    sized = size_engine(checkpoint.folder, checkpoint.config, checkpoint.files, args, library_path)
    sized.show()
    settings = sized.settings
    library = open_library(settings.device, library_path)
    options = native_options(settings, checkpoint.config, checkpoint.files)
    options.synthetic_seed = checkpoint.synthetic_seed
    fitting = [requests for requests in concurrency if fits(settings, requests, prompt_tokens + output_tokens)]
    if not fitting:
        return {}
    with shown_loading(lambda: load_progress(library), say), refusing_in_public_words():
        native = NativeEngine(library, options, checkpoint.tensor_array())
    with native:
        bench = RankBench(native, checkpoint.config.vocab_size, settings.max_step_tokens)
        bench.measure_load(1, prompt_tokens, min(WARM_UP_TOKENS, output_tokens))
        found = {}
        for requests in fitting:
            say(f"the engine alone, {requests} at once")
            found[requests] = bench.measure_load(requests, prompt_tokens, output_tokens)
        return found


def fits(settings: EngineSettings, requests: int, tokens: int) -> bool:
    """Whether so many requests of so many tokens run at once; says so where they do not."""
    needed = requests * -(-tokens // settings.page_tokens)
    if needed <= settings.num_pages and requests <= settings.max_num_seqs and tokens <= settings.max_model_len:
        return True
    say(
        f"the engine alone, {requests} at once: left out, for {requests} requests of {tokens} tokens need {needed:,} "
        f"pages, --max-num-seqs {requests} and --max-model-len {tokens}; there are {settings.num_pages:,}, "
        f"{settings.max_num_seqs} and {settings.max_model_len}"
    )
    return False


def show_shares(runs: Sequence[LoadReport], alone: Mapping[int, StepLoad]) -> None:
    """Print every load of the server beside that of the engine alone."""
    print()
    print_table("the server beside its engine alone, all measured", COLUMNS, _cells(runs, alone))


def _cells(runs: Sequence[LoadReport], alone: Mapping[int, StepLoad]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        steps = alone.get(run.measured.concurrency)
        yield (
            str(run.measured.concurrency),
            f"{run.output_throughput:,.0f}",
            _figure(None if steps is None else steps.tokens_per_second, 0),
            NOT_MEASURED if steps is None else f"{share(run, steps):.1%}",
            *(_figure(run.median(name), 1) for name in ("ttft", "tpot", "itl")),
            _figure(None if steps is None else steps.prefill_seconds, 3),
            _figure(None if steps is None else steps.decode_ms, 2),
        )


def share(run: LoadReport, steps: StepLoad) -> float:
    """The share of the engine's own throughput that the server reached."""
    return run.output_throughput / steps.tokens_per_second


def alone_json(run: LoadReport, alone: Mapping[int, StepLoad]) -> dict[str, Any]:
    """The keys that a load has beside those of the server; None where the engine alone was not measured."""
    steps = alone.get(run.measured.concurrency)
    if steps is None:
        return {"engine_alone": None, "share_of_engine_alone": None}
    figures = asdict(steps) | {"output_throughput": steps.tokens_per_second, "decode_ms_per_step": steps.decode_ms}
    return {"engine_alone": figures, "share_of_engine_alone": share(run, steps)}


def _figure(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"
