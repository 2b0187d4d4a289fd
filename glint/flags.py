"""Flags that several commands share, and the options that they set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from glint.checkpoint.hub import MODEL_ID, ModelSource, Say, locate_model, print_line
from glint.engine.args import FLAGS, EngineArgs, Flag, value_types

if TYPE_CHECKING:
    from glint.llm import LLM

RANKS = """\
Several ranks hold a part of the model each and compute every step together. 'glint check MODEL_DIR --tp N' says what
each of them would hold, and why a model cannot be shared by so many."""


def add_engine_flags(parser: argparse.ArgumentParser, has_sizes: bool = True) -> None:
    """Add the flags of the model, the device and the sizes."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model",
        "--model-path",
        metavar="MODEL",
        type=path,
        help=f"checkpoint folder, or model id of the hub, {MODEL_ID} (default: the sample model)",
    )
    group.add_argument("--engine", metavar="FILE", type=path, help="native library (default: the one of --device)")
    add_engine_args(group, "device", "threads", "kernels", "kv_cache_dtype", "num_speculative_tokens")
    if has_sizes:
        add_engine_args(group, "max_model_len", "max_num_seqs", "gpu_memory_utilization")
    ranks = parser.add_argument_group("ranks", RANKS)
    add_engine_args(ranks, "tp", "expert_layout", "row_slices", "sequence_parallel", "all_reduce")


def add_engine_args(parser: argparse._ActionsContainer, *names: str, **defaults: Any) -> None:
    """Add the flags of these options of `EngineArgs`; `defaults` replace those of the class."""
    types = value_types(EngineArgs)
    for name in names:
        flag, kind = FLAGS[name], types[name]
        default = defaults.get(name, getattr(EngineArgs, name))
        if flag.parse is None and not isinstance(kind, type):
            values: dict[str, Any] = {"choices": get_args(kind)}
        else:
            values = {"type": flag_parser(flag) or kind, "metavar": flag.metavar}
        text = f"{flag.help} (default: {default if flag.otherwise is None else flag.otherwise})"
        parser.add_argument(*flag.spellings.split(), dest=name, default=default, help=text, **values)


def flag_parser(flag: Flag) -> Callable[[str], Any] | None:
    """What reads a flag's text and tells argparse why it cannot; None where the type of the option reads it."""
    parse = flag.parse
    if parse is None:
        return None

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(f"'{text}' is not a value of it: {problem}") from None

    return read


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the flags of sampling."""
    group = parser.add_argument_group("sampling", "What is left out follows the model's generation_config.json.")
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=max_tokens,
        help=f"longest answer, in tokens (default: {max_tokens})",
    )
    group.add_argument("--min-tokens", metavar="N", type=int, help="no stop ends the answer before N tokens")
    group.add_argument("--thinking-budget", metavar="N", type=int, help="end the model's thinking after N tokens")
    group.add_argument("--thinking-closing-text", metavar="TEXT", help="text that closes such thinking (default: none)")
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
        type=bias,
        action="append",
        help="add X, -100 to 100, to the logit of a token; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end token")


def path(text: str) -> Path:
    """A path, with ~ for the home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError as problem:
        raise argparse.ArgumentTypeError(f"'{text}' names no folder: {problem}") from None


def bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit."""
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
    "min_tokens",
    "thinking_budget",
    "thinking_closing_text",
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


def sampling_changes(chosen: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the command line sets; the others follow the model."""
    changes = {name: getattr(chosen, name, None) for name in SAMPLING_FLAGS}
    if chosen.logit_bias is not None:
        changes["logit_bias"] = dict(chosen.logit_bias)
    return {name: value for name, value in changes.items() if value is not None}


def model_source(chosen: argparse.Namespace, say: Say = print_line) -> ModelSource:
    """The model that was asked for, fetched if it is an id; or the sample model, which is made if it is not there."""
    if chosen.model is not None:
        return locate_model(chosen.model, say)
    from glint.sample.model import make_sample_model

    folder = make_sample_model()
    print(f"glint: no --model given, using the sample model in {folder}", file=sys.stderr)
    return ModelSource(folder)


def model_folder(chosen: argparse.Namespace) -> Path:
    """The folder of that model."""
    return model_source(chosen).folder


def engine_args(chosen: argparse.Namespace) -> EngineArgs:
    """The options of the engine that the command line sets."""
    return EngineArgs(**{name: getattr(chosen, name) for name in FLAGS if hasattr(chosen, name)})


def open_model(chosen: argparse.Namespace) -> LLM:
    """The model and engine of the shared flags, loaded."""
    from glint.llm import LLM

    return LLM(model_folder(chosen), engine=chosen.engine, progress=True, **vars(engine_args(chosen)))
