"""The flags of `glint serve`, under the names that vLLM and SGLang use."""

from __future__ import annotations

import argparse
import logging
import os
import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from glint.engine.args import EngineArgs
from glint.errors import RequestError
from glint.flags import add_engine_args, add_engine_flags, engine_args, model_source, path
from glint.server.limits import Limits

if TYPE_CHECKING:
    from glint.server.settings import ServerSettings

PARSERS = ["glm45", "glm47"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add everything that `read_settings` reads."""
    parser.add_argument("model_dir", metavar="MODEL", nargs="?", type=path, help="the same as --model")
    add_engine_flags(parser)
    _add_sizes(parser.add_argument_group("sizes"))
    server = parser.add_argument_group("server")
    _add_address(server)
    _add_server(server)
    _add_answers(parser.add_argument_group("answers"))
    _add_keys(parser.add_argument_group("keys"))
    _add_limits(parser.add_argument_group("limits"))


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    add_engine_args(group, "max_step_tokens", "kv_cache_bytes")
    group.add_argument("--max-total-tokens", metavar="TOKENS", type=int, help="the same in tokens; give one of the two")
    add_engine_args(group, "page_tokens")
    group.add_argument(
        "--enable-expert-parallel",
        "--enable-ep-moe",
        dest="wants_ep",
        action="store_true",
        help="the same as --expert-layout ep",
    )


def _add_address(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    group.add_argument("--port", metavar="N", type=int, default=8000, help="port to listen on (default: 8000)")
    group.add_argument(
        "--uds", metavar="PATH", type=path, help="Unix socket to listen on, instead of --host and --port"
    )
    group.add_argument(
        "--uds-mode",
        metavar="OCTAL",
        type=_mode,
        default=0o600,
        help="mode of that socket, such as 660 for a group or 666 for all (default: 600, this user)",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", type=path, help="PEM certificate; the server speaks HTTPS")
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", type=path, help="PEM key of the certificate (default: in its file)"
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        action="extend",
        help="names that clients may use; responses carry the first (default: the model id, or the name of the folder)",
    )
    group.add_argument(
        "--no-web",
        dest="serves_web",
        action="store_false",
        help="serve no page: the routes alone (default: a chat page at / and what else is in the package)",
    )
    group.add_argument(
        "--allowed-hosts",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="names besides localhost that clients may ask for, such as chat.internal or *.internal; '*' is any "
        "(default: none with --host on this machine, any with another)",
    )
    group.add_argument(
        "--allowed-origins",
        metavar="ORIGIN",
        nargs="+",
        default=[],
        help="web pages that may call the server from a browser, such as https://chat.internal (default: none)",
    )
    group.add_argument(
        "--log-level",
        choices=["info", "warning"],
        default="info",
        help="info writes one line per request, warning only what went wrong (default: info)",
    )
    group.add_argument("--log-json", action="store_true", help="write every line of the log as one JSON object")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow-special-tokens-in-messages",
        action="store_true",
        help="read control tokens in the text of messages, such as <|user|>, as control tokens: the author of a "
        "message or of a tool result can then forge turns (default: they are text)",
    )
    group.add_argument(
        "--max-thinking-tokens",
        metavar="TOKENS",
        type=int,
        help="most tokens of thinking in one answer, whatever a request asks for (default: no limit)",
    )
    group.add_argument(
        "--thinking-closing-text",
        metavar="TEXT",
        default="",
        help="text at the end of thinking that a budget ends, unless the request has its own (default: none)",
    )
    group.add_argument(
        "--responses-store-size",
        dest="stored_responses",
        metavar="N",
        type=_count,
        default=0,
        help="responses of /v1/responses that are kept in memory for previous_response_id, each for its own key; the "
        "oldest make room for new ones (default: 0, none)",
    )
    parsers = "this engine reads reasoning and tool calls of all GLM-4.x models by itself"
    group.add_argument("--tool-call-parser", choices=PARSERS, help=f"accepted for existing scripts: {parsers}")
    group.add_argument("--reasoning-parser", choices=PARSERS, help="likewise accepted for existing scripts")
    group.add_argument("--enable-auto-tool-choice", action="store_true", help="likewise accepted: it is always on")
    group.add_argument("--enable-tokenizer-info-endpoint", action="store_true", help="accepted: it is always on")


def _add_keys(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="key that clients must send; may be repeated (also: $GLINT_API_KEY, several between commas)",
    )
    group.add_argument("--api-key-file", metavar="FILE", type=path, help="file with one key per line, or KEY weight=N")
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="key that may list and cancel the requests of every key; may be repeated (also: $GLINT_ADMIN_API_KEY)",
    )
    group.add_argument("--open-metrics", action="store_true", help="serve /metrics without a key")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    limits = Limits()
    for flags, name, unit, text in (
        (("--max-num-queued-reqs", "--max-queued-requests"), "waiting_requests", "N", "requests that may wait"),
        (("--max-queued-tokens",), "waiting_tokens", "TOKENS", "prompt tokens of the requests that wait"),
        (("--request-timeout",), "deadline_seconds", "SECONDS", "time that a request may take"),
        (("--max-request-timeout",), "max_deadline_seconds", "SECONDS", "longest deadline that a request may ask for"),
        (("--max-body-bytes",), "body_bytes", "BYTES", "size of a request"),
        (("--max-choices",), "choices", "N", "most answers to one request (field n)"),
    ):
        default = getattr(limits, name)
        kind = type(default)
        group.add_argument(*flags, dest=name, metavar=unit, type=kind, help=f"{text} (default: {int(default):,})")
    group.add_argument(
        "--health-timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="when work makes no step for so long, /health fails and the engine is started anew (default: 60)",
    )
    group.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=5,
        help="restarts of a failed engine without ten minutes of service in between; then the process ends with code 1 "
        "(default: 5)",
    )
    group.add_argument(
        "--no-restart",
        dest="restarts",
        action="store_false",
        help="one process without a supervisor, which ends with code 1 when the engine fails: systemd or another "
        "program starts it anew (default: a supervisor restarts the engine)",
    )
    group.add_argument(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="after SIGTERM requests have so long to end; a second signal stops at once (default: 60)",
    )


def read_settings(chosen: argparse.Namespace) -> ServerSettings:
    """The settings of the command line. Without a model it makes the sample model."""
    from glint.server.auth import ApiKeys
    from glint.server.http.listener import check_port
    from glint.server.http.tls import tls_files
    from glint.server.settings import ServerSettings

    if chosen.model_dir is not None:
        if chosen.model is not None:
            raise RequestError(f"MODEL {chosen.model_dir} and --model {chosen.model} are both given; give one")
        chosen.model = chosen.model_dir
    check_port(chosen.port)
    source = model_source(chosen, logging.getLogger("glint.server").info)
    return ServerSettings(
        model_dir=source.folder,
        repository=source.repository,
        commit=source.commit,
        model_names=tuple(chosen.served_model_name or [source.name]),
        keys=ApiKeys.load(chosen.api_key, chosen.api_key_file, os.environ, chosen.admin_api_key),
        engine_args=_engine_args(chosen),
        library_path=chosen.engine,
        host=chosen.host,
        port=chosen.port,
        limits=_limits(chosen),
        guards_metrics=not chosen.open_metrics,
        serves_web=chosen.serves_web,
        origins=tuple(chosen.allowed_origins),
        hosts=tuple(chosen.allowed_hosts),
        log_level=chosen.log_level,
        logs_json=chosen.log_json,
        health_seconds=chosen.health_timeout,
        drain_seconds=chosen.shutdown_timeout,
        allows_special_tokens=chosen.allow_special_tokens_in_messages,
        max_thinking_tokens=chosen.max_thinking_tokens,
        thinking_closing_text=chosen.thinking_closing_text,
        stored_responses=chosen.stored_responses,
        tls=tls_files(chosen.ssl_certfile, chosen.ssl_keyfile),
        uds=chosen.uds,
        uds_mode=chosen.uds_mode,
    )


def _count(text: str) -> int:
    """A number of things, perhaps none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 0 to 999999999")
    return int(text)


def _mode(text: str) -> int:
    """The mode of a file, in octal digits."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no mode of three octal digits, such as 660")
    return int(text, 8)


def _engine_args(chosen: argparse.Namespace) -> EngineArgs:
    args = engine_args(chosen)
    if chosen.wants_ep:
        args = replace(args, expert_layout="ep")
    if chosen.max_total_tokens is None:
        return args
    if chosen.kv_cache_bytes is not None:
        raise RequestError("--max-total-tokens and --kv-cache-memory-bytes are both given; give one")
    from glint.engine.settings import DEFAULT_PAGE_TOKENS

    page_tokens = chosen.page_tokens or DEFAULT_PAGE_TOKENS[args.device]
    return replace(args, num_pages=-(-chosen.max_total_tokens // page_tokens))


def _limits(chosen: argparse.Namespace) -> Limits:
    asked = {field.name: getattr(chosen, field.name, None) for field in fields(Limits)}
    limits = {name: value for name, value in asked.items() if value is not None}
    deadline = limits.get("deadline_seconds")
    if deadline is not None and "max_deadline_seconds" not in limits:
        limits["max_deadline_seconds"] = max(deadline, Limits().max_deadline_seconds)
    return Limits(**limits)
