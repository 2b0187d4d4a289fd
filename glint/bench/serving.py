"""`glint bench serve`: the load, the table, JSON and plot, for any OpenAI-compatible server, alone or beside peers."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from glint.bench.load import LoadSettings, run_load
from glint.bench.own_server import own_server
from glint.bench.plot import draw
from glint.bench.report import LoadReport
from glint.bench.serving_flags import KEY_VARIABLE
from glint.bench.table import as_json, compare, render, render_comparison
from glint.engine.args import FLAGS
from glint.errors import RequestError
from glint.flags import engine_args, model_folder

EXIT_FAILED = 1


def run(chosen: argparse.Namespace) -> int:
    """Measures, prints the tables as they come, and writes JSON and plot where asked.

    The exit code is 1 if a load had no complete request.
    """
    check_files(chosen)
    if chosen.base_url is not None:
        return measure(chosen, chosen.base_url)
    with own_server(server_flags(chosen)) as url:
        return measure(chosen, url)


def server_flags(chosen: argparse.Namespace) -> list[str]:
    """The command line of the server that the bench starts for itself.

    Without --max-num-seqs it takes as many requests at once as the load has.
    """
    flags = ["--model", str(model_folder(chosen)), "--log-level", "warning"]
    args = engine_args(chosen)
    for name, value in vars(replace(args, max_num_seqs=args.max_num_seqs or max(chosen.concurrency))).items():
        flags += [] if value is None else [FLAGS[name].spellings.split()[0], str(value)]
    return flags + ([] if chosen.engine is None else ["--engine", str(chosen.engine)])


def measure(chosen: argparse.Namespace, base_url: str) -> int:
    """Runs all loads on a server and its peers; gives the exit code."""
    settings = settings_of(chosen, base_url)
    runs: list[LoadReport] = []
    for single in turns(settings, chosen):
        print(f"glint: {single.base_url}, {single.concurrency} at once", file=sys.stderr, flush=True)
        report = run_load(single)
        runs.append(report)
        if len(runs) > 1:
            print()
        if chosen.peer_url or len(chosen.concurrency) > 1:
            print(f"{report.measured.base_url} ({report.measured.model})")
        print(render(report), flush=True)
    if chosen.peer_url:
        print("\n" + render_comparison(settings.base_url, compare(runs)))
    write_files(chosen, runs)
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
    for concurrency in chosen.concurrency:
        for round_index in range(chosen.rounds):
            own = replace(settings, concurrency=concurrency, label=f"{concurrency}/{round_index}")
            yield own
            for url in chosen.peer_url:
                yield replace(own, base_url=url, api_key=chosen.peer_api_key, model=None)


def settings_of(chosen: argparse.Namespace, base_url: str) -> LoadSettings:
    """The load of the command line, at its first concurrency."""
    return LoadSettings(
        base_url=base_url,
        api_key=chosen.api_key or os.environ.get(KEY_VARIABLE) or None,
        model=chosen.served_model_name,
        endpoint=chosen.endpoint,
        concurrency=chosen.concurrency[0],
        duration_seconds=None if chosen.num_prompts is not None else chosen.duration,
        num_prompts=chosen.num_prompts,
        request_rate=chosen.request_rate,
        prompt_tokens=chosen.prompt_len,
        output_tokens=chosen.gen_len,
        prompts=chosen.prompts,
        tokenizer=chosen.tokenizer,
        seed=chosen.seed,
        warmup=chosen.warmup,
        temperature=chosen.temperature,
        ignores_eos=chosen.ignore_eos,
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


def write_files(chosen: argparse.Namespace, runs: Sequence[LoadReport]) -> None:
    """Writes the figures: one load as a flat object, several as `runs`, with `comparison` beside peers."""
    if chosen.json is not None:
        documents = [as_json(report) for report in runs]
        document = documents[0] if len(documents) == 1 else {"runs": documents, "comparison": compare(runs)}
        chosen.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if chosen.plot is not None:
        chosen.plot.write_text(draw(runs), encoding="utf-8")
