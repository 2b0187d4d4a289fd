"""`glint bench serve`: the load, the table, JSON and plot, for any OpenAI-compatible server, alone or beside peers."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from glint.bench.engine_alone import alone_json, measure_engine, show_shares
from glint.bench.load import LoadSettings, run_load
from glint.bench.own_server import own_server
from glint.bench.plot import draw
from glint.bench.rank import StepLoad
from glint.bench.rank_shapes import find_model
from glint.bench.report import LoadReport
from glint.bench.serving_flags import KEY_VARIABLE, SYNTHETIC_WAVES, fill_defaults
from glint.bench.synthetic import synthetic_checkpoint, write_tokenizer
from glint.bench.table import as_json, compare, render, render_comparison
from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.engine.args import FLAGS, EngineArgs
from glint.errors import RequestError
from glint.flags import engine_args, model_source

EXIT_FAILED = 1
WITHOUT_SPECULATION = (FLAGS["num_speculative_tokens"].spellings.split()[0], "0")


def run(chosen: argparse.Namespace) -> int:
    """Measures, prints the tables as they come, and writes JSON and plot where asked.

    The exit code is 1 if a load had no complete request.
    """
    check_files(chosen)
    check_server(chosen)
    fill_defaults(chosen)
    if chosen.base_url is not None:
        return measure(chosen, chosen.base_url)
    if chosen.synthetic is not None:
        return run_synthetic(chosen)
    source = model_source(chosen)
    alone = measure_alone(chosen, open_checkpoint(source.folder)) if chosen.engine_alone else None
    flags = server_flags(chosen, source.pinned_id or source.folder)
    with ExitStack() as servers:
        url = servers.enter_context(own_server(flags))
        if chosen.without_speculation:
            plain = servers.enter_context(own_server([*flags, *WITHOUT_SPECULATION]))
            print(f"glint: {plain} is the same server without drafts", file=sys.stderr)
            chosen.peer_url = [*chosen.peer_url, plain]
        return measure(chosen, url, alone)


def run_synthetic(chosen: argparse.Namespace) -> int:
    """Measures a server on random weights, which the bench alone can start, and its engine alone before it."""
    model = find_model(chosen.synthetic, "--synthetic")
    with TemporaryDirectory(prefix="glint-synthetic-") as name:
        folder = Path(name)
        write_tokenizer(folder, model.vocab_size)
        alone = measure_alone(chosen, synthetic_checkpoint(model, folder))
        flags = [*server_flags(chosen, folder), "--served-model-name", f"synthetic-{Path(chosen.synthetic).name}"]
        with own_server(flags, ("glint.synthetic_server", chosen.synthetic)) as url:
            print(
                f"the weights are random, in the shapes of {chosen.synthetic}: the text means nothing; every figure is "
                "measured, none is projected"
            )
            return measure(chosen, url, alone)


def check_server(chosen: argparse.Namespace) -> None:
    """Refuses flags that do not go together."""
    wanted = "--synthetic" if chosen.synthetic is not None else "--engine-alone"
    if chosen.base_url is not None and (chosen.engine_alone or chosen.synthetic is not None):
        raise RequestError(
            f"{wanted} is of a server that the bench starts, not of --base-url {chosen.base_url}; leave one out"
        )
    if chosen.prompts == "questions" and (chosen.engine_alone or chosen.synthetic is not None):
        raise RequestError(
            f"--prompts questions with {wanted}: answers have no fixed length to measure the engine alone by, and "
            "random weights have no chat; use --prompts random or text"
        )
    if chosen.without_speculation and (chosen.base_url is not None or chosen.synthetic is not None):
        raise RequestError(
            "--without-speculation is of a server that the bench starts on a real model; leave it out beside "
            f"{'--base-url' if chosen.base_url is not None else '--synthetic'}"
        )
    if chosen.synthetic is None:
        return
    if chosen.model is not None:
        raise RequestError(f"--synthetic {chosen.synthetic} and --model {chosen.model} are both given; give one")
    if chosen.device != "cuda":
        raise RequestError(
            f"--synthetic {chosen.synthetic} with --device {chosen.device}: random weights are made on a GPU only; use "
            "--device cuda, or measure a real model with --model and --engine-alone"
        )
    if chosen.tp != 1:
        raise RequestError(f"--synthetic with --tp {chosen.tp}: random weights are made for one rank; use --tp 1")


def measure_alone(chosen: argparse.Namespace, checkpoint: Checkpoint) -> dict[int, StepLoad]:
    """The loads of the command line on the engine alone, by concurrency."""
    return measure_engine(
        checkpoint, server_args(chosen), chosen.engine, chosen.concurrency, chosen.prompt_len, chosen.gen_len
    )


def server_args(chosen: argparse.Namespace) -> EngineArgs:
    """The options of the engine. Without --max-num-seqs it takes as many requests at once as the load has."""
    args = engine_args(chosen)
    return replace(args, max_num_seqs=args.max_num_seqs or max(chosen.concurrency))


def server_flags(chosen: argparse.Namespace, model: str | Path) -> list[str]:
    """The command line of the server that the bench starts for itself."""
    flags = ["--model", str(model), "--log-level", "warning"]
    for name, value in vars(server_args(chosen)).items():
        flags += [] if value is None else [FLAGS[name].spellings.split()[0], str(value)]
    return flags + ([] if chosen.engine is None else ["--engine", str(chosen.engine)])


def measure(chosen: argparse.Namespace, base_url: str, alone: Mapping[int, StepLoad] | None = None) -> int:
    """Runs all loads on a server and its peers; gives the exit code.

    `alone` has the same loads on the engine alone, where they were measured.
    """
    settings = settings_of(chosen, base_url)
    runs: list[LoadReport] = []
    for single in turns(settings, chosen):
        print(f"glint: {single.base_url}, {single.concurrency} at once, {single.lengths}", file=sys.stderr, flush=True)
        report = run_load(single)
        runs.append(report)
        if len(runs) > 1:
            print()
        if chosen.peer_url or len(chosen.concurrency) > 1:
            print(f"{report.measured.base_url} ({report.measured.model})")
        print(render(report), flush=True)
    if chosen.peer_url:
        print("\n" + render_comparison(settings.base_url, compare(runs)))
    if alone is not None:
        show_shares([report for report in runs if report.measured.base_url == settings.base_url], alone)
    write_files(chosen, runs, alone)
    if all(report.completed for report in runs):
        return 0
    print(
        "glint: a load ended without one complete answer, so there are no latencies; give a longer --duration, fewer "
        "at once (--concurrency) or shorter texts (--prompt-len, --gen-len)",
        file=sys.stderr,
    )
    return EXIT_FAILED


def turns(settings: LoadSettings, chosen: argparse.Namespace) -> Iterator[LoadSettings]:
    """The loads in their order: at each concurrency the server and its peers by turns, every turn with new prompts.

    The server and its peers get the same prompts. A peer has a model name and a key of its own.
    """
    for count in chosen.concurrency:
        for round_index in range(chosen.rounds):
            own = replace(settings, concurrency=count, label=f"{count}/{round_index}")
            if own.duration_seconds is None and own.num_prompts is None:
                own = replace(own, num_prompts=SYNTHETIC_WAVES * count)
            yield own
            for url in chosen.peer_url:
                yield replace(own, base_url=url, api_key=chosen.peer_api_key, model=None)


def settings_of(chosen: argparse.Namespace, base_url: str) -> LoadSettings:
    """The load of the command line, at its first concurrency; questions are asked in chat, at their own lengths."""
    asks_questions = chosen.prompts == "questions"
    return LoadSettings(
        base_url=base_url,
        api_key=chosen.api_key or os.environ.get(KEY_VARIABLE) or None,
        model=chosen.served_model_name,
        endpoint="chat" if asks_questions else chosen.endpoint,
        concurrency=chosen.concurrency[0],
        duration_seconds=chosen.duration,
        num_prompts=chosen.num_prompts,
        request_rate=chosen.request_rate,
        prompt_tokens=0 if asks_questions else chosen.prompt_len,
        output_tokens=chosen.gen_len,
        prompts=chosen.prompts,
        tokenizer=chosen.tokenizer,
        seed=chosen.seed,
        warmup=chosen.warmup,
        temperature=chosen.temperature,
        ignores_eos=chosen.ignore_eos and not asks_questions,
        percentiles=tuple(chosen.percentiles),
        goodput=tuple(chosen.goodput),
        timeout_seconds=chosen.timeout,
    )


def check_files(chosen: argparse.Namespace) -> None:
    """Refuses files that could not be written, before anything is measured."""
    if chosen.plot is not None and chosen.plot.suffix != ".svg":
        raise RequestError(f"--plot {chosen.plot} is no SVG file, and nothing else is drawn; name it FILE.svg")
    for flag, path in (("--json", chosen.json), ("--plot", chosen.plot)):
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()):
            raise RequestError(f"{flag} {path} cannot be written; name a file in a folder that you may write to")


def write_files(chosen: argparse.Namespace, runs: Sequence[LoadReport], alone: Mapping[int, StepLoad] | None) -> None:
    """Writes the figures: one load as a flat object, several as `runs`, with `comparison` beside peers."""
    if chosen.json is not None:
        documents = [as_json(report) | ({} if alone is None else alone_json(report, alone)) for report in runs]
        for document in documents if chosen.synthetic is not None else ():
            document["weights"] = "synthetic"
        document = documents[0] if len(documents) == 1 else {"runs": documents, "comparison": compare(runs)}
        chosen.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if chosen.plot is not None:
        chosen.plot.write_text(draw(runs), encoding="utf-8")
