"""The flags of `glint bench serve`."""

import argparse
from pathlib import Path
from typing import NamedTuple

from glint.bench.rank_shapes import KNOWN_MODELS
from glint.flags import add_engine_flags

KEY_VARIABLE = "OPENAI_API_KEY"
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
SYNTHETIC_WAVES = 4


class LoadDefaults(NamedTuple):
    """What is left out of a load: requests in flight, tokens of a prompt and an answer, and its seconds.

    A load without seconds ends once each of the requests in flight was followed by `SYNTHETIC_WAVES` - 1 more.
    """

    concurrency: tuple[int, ...]
    prompt_len: int
    gen_len: int
    duration: float | None


DEFAULTS = LoadDefaults(concurrency=(64,), prompt_len=256, gen_len=256, duration=60.0)
CPU_DEFAULTS = LoadDefaults(concurrency=(4,), prompt_len=64, gen_len=64, duration=30.0)
SYNTHETIC_DEFAULTS = DEFAULTS._replace(concurrency=(1, 8, 64, 128, 256), duration=None)
LOAD = """\
A server that the bench starts on the CPU gets a small load by default, which ends within a minute or two with the
sample model. The table says what the load was."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of the command; the engine's own are for the server that the bench starts itself."""
    where = parser.add_argument_group("server")
    where.add_argument(
        "--base-url",
        metavar="URL",
        help="the server to measure, such as http://127.0.0.1:8000 (default: one that is started for the bench)",
    )
    where.add_argument("--api-key", metavar="KEY", help=f"key of the server (default: ${KEY_VARIABLE}, if set)")
    where.add_argument(
        "--served-model-name", metavar="NAME", help="name the model is served under (default: the server's first)"
    )
    where.add_argument(
        "--endpoint", choices=["completions", "chat"], default="completions", help="route (default: completions)"
    )
    where.add_argument(
        "--peer-url",
        metavar="URL",
        action="append",
        default=[],
        help="also measure this server, in turns with the first, and print the ratios; may be repeated",
    )
    where.add_argument("--peer-api-key", metavar="KEY", help="key of the peers (default: none)")
    where.add_argument(
        "--synthetic",
        metavar="NAME",
        help="start the server on random weights in the shapes of a model, with --device cuda: "
        f"{', '.join(KNOWN_MODELS)}, or a folder whose config.json has the shapes; its speed is that of the model, its "
        "text means nothing; turns --engine-alone on",
    )
    where.add_argument(
        "--engine-alone",
        action="store_true",
        help="before the server starts, measure the same load on the engine alone, as steps of prefill and decode "
        "without scheduler, HTTP and text, and print the share of its tok/s that the server reaches",
    )
    where.add_argument(
        "--without-speculation",
        action="store_true",
        help="also start the same server with --num-speculative-tokens 0, measure both in turns and print the ratios",
    )
    _add_load_flags(parser.add_argument_group("load", LOAD))
    _add_figure_flags(parser.add_argument_group("figures"))
    add_engine_flags(parser)


def _add_figure_flags(out: argparse._ArgumentGroup) -> None:
    out.add_argument(
        "--percentiles",
        metavar="LIST",
        type=_percentiles,
        default=(50.0, 90.0, 99.0),
        help="percentiles of every latency, 0 to 100, between commas (default: 50,90,99)",
    )
    out.add_argument(
        "--goodput",
        metavar="NAME:MS",
        nargs="+",
        type=_limit,
        default=[],
        help="count the requests within these limits in ms, such as ttft:500 tpot:50; ttft is the time to the first "
        "token, tpot the time per later token, e2el that of the whole request",
    )
    out.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file as JSON")
    out.add_argument("--plot", metavar="FILE.svg", type=Path, help="also draw the figures into this file")


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        metavar="N[,N]",
        type=counts,
        help="requests in flight; several numbers are measured one after the other (default: "
        f"{_listed(DEFAULTS)}; {_listed(CPU_DEFAULTS)} on the CPU; {_listed(SYNTHETIC_DEFAULTS)} with --synthetic)",
    )
    group.add_argument(
        "--duration",
        metavar="SECONDS",
        type=positive,
        help=f"length of the load (default: {DEFAULTS.duration:g}; {CPU_DEFAULTS.duration:g} on the CPU; with "
        f"--synthetic until each of the requests in flight was followed by {SYNTHETIC_WAVES - 1} more)",
    )
    group.add_argument(
        "--num-prompts", metavar="N", type=count, help="end after N requests instead of after --duration"
    )
    group.add_argument(
        "--request-rate", metavar="R", type=_rate, help="requests per second, Poisson arrivals (default: inf)"
    )
    for name, what in (("prompt_len", "a prompt"), ("gen_len", "an answer")):
        usual, small = (getattr(defaults, name) for defaults in (DEFAULTS, CPU_DEFAULTS))
        text = f"tokens of {what} (default: {usual}; {small} on the CPU)"
        group.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=count, help=text)
    group.add_argument(
        "--prompts",
        choices=["random", "text", "questions"],
        default="random",
        help="random tokens, English sentences, or short questions in chat, whose answers end where the model ends "
        "them or after --gen-len tokens; without a --prompt-len of their own (default: random)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="model folder to count tokens by (default: the server's /tokenize)",
    )
    group.add_argument("--temperature", metavar="X", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on past the end token, so that every answer has --gen-len tokens (default: on)",
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="another seed, other prompts (default: 0)")
    group.add_argument(
        "--warmup", metavar="N", type=natural, default=1, help="requests before the time starts (default: 1)"
    )
    group.add_argument(
        "--rounds", metavar="N", type=count, default=1, help="measure everything N times, in turns (default: 1)"
    )
    group.add_argument(
        "--timeout", metavar="SECONDS", type=positive, default=600.0, help="longest wait for an answer (default: 600)"
    )


def fill_defaults(chosen: argparse.Namespace) -> None:
    """Sets what the command line leaves out of the load; a number of requests takes the place of its seconds."""
    is_on_cpu = chosen.base_url is None and chosen.synthetic is None and chosen.device == "cpu"
    defaults = CPU_DEFAULTS if is_on_cpu else DEFAULTS if chosen.synthetic is None else SYNTHETIC_DEFAULTS
    for name, value in defaults._asdict().items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    if chosen.num_prompts is not None:
        chosen.duration = None


def _listed(defaults: LoadDefaults) -> str:
    return ",".join(map(str, defaults.concurrency))


def count(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(text, 1)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(text, 0)


def _at_least(text: str, fewest: int) -> int:
    if not text.isdecimal() or int(text) < fewest:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {fewest} on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on between commas, each once."""
    return tuple(dict.fromkeys(count(part.strip()) for part in text.split(",")))


def positive(text: str) -> float:
    """A number over 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number over 0")
    return value


def _rate(text: str) -> float | None:
    return None if text == "inf" else positive(text)


def _percentiles(text: str) -> tuple[float, ...]:
    points = tuple(positive(part) for part in text.split(","))
    if max(points) > 100.0:
        raise argparse.ArgumentTypeError(f"'{text}' goes beyond 100; give percentiles such as 50,90,99")
    return points


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOODPUT_NAMES:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:MS with {', '.join(GOODPUT_NAMES)}, such as ttft:500")
    return name, positive(value)
