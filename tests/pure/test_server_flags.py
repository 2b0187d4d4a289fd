"""The flags of `glint serve`: both spellings of what everybody types come to the same settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from glint.errors import RequestError
from glint.server.flags import add_flags, read_settings
from glint.server.limits import Limits
from glint.server.settings import ServerSettings


def read(*arguments: str) -> ServerSettings:
    """The settings of a command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read_settings(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys of whoever runs the tests do not count, and there are model folders."""
    monkeypatch.delenv("GLINT_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "m/x", "models/glm"):
        Path(name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("vllm", "sglang", "value", "option", "expected"),
    [
        ("--tensor-parallel-size", "--tp-size", "2", "tp", 2),
        ("--max-model-len", "--context-length", "900", "max_model_len", 900),
        ("--max-num-seqs", "--max-running-requests", "7", "max_num_seqs", 7),
        ("--max-num-batched-tokens", "--chunked-prefill-size", "128", "max_step_tokens", 128),
    ],
)
def test_both_spellings_of_an_engine_flag(vllm: str, sglang: str, value: str, option: str, expected: Any) -> None:
    args = [read("folder", flag, value).engine_args for flag in (vllm, sglang)]
    assert args[0] == args[1] and getattr(args[0], option) == expected


def test_both_spellings_of_the_model_and_of_experts() -> None:
    assert read("--model", "m/x").model_dir == read("--model-path", "m/x").model_dir == read("m/x").model_dir
    for flag in ("--enable-expert-parallel", "--enable-ep-moe"):
        assert read("folder", flag).engine_args.expert_layout == "ep"


def test_scripts_for_other_engines_run_unchanged() -> None:
    accepted = "--tool-call-parser glm47 --reasoning-parser glm45 --enable-auto-tool-choice --kv-cache-dtype auto"
    assert read("folder", *accepted.split(), "--enable-tokenizer-info-endpoint") is not None
    assert read("folder", "--kv-cache-dtype", "fp8").engine_args.kv_cache_dtype == "fp8"
    with pytest.raises(SystemExit):
        read("folder", "--kv-cache-dtype", "int4")
    with pytest.raises(SystemExit):
        read("folder", "--max-model", "900")


def test_messages_make_control_tokens_only_where_that_is_asked_for() -> None:
    assert not read("folder").allows_special_tokens
    assert read("folder", "--allow-special-tokens-in-messages").allows_special_tokens


def test_responses_are_stored_only_where_that_is_asked_for() -> None:
    assert read("folder").stored_responses == 0
    assert read("folder", "--responses-store-size", "50").stored_responses == 50
    for wrong in ("-1", "many", "1.5"):
        with pytest.raises(SystemExit):
            read("folder", "--responses-store-size", wrong)


def test_defaults_are_safe() -> None:
    settings = read("models/glm")
    assert (settings.host, settings.port, settings.model_names) == ("127.0.0.1", 8000, ("glm",))
    assert settings.guards_metrics and not settings.origins and len(settings.keys) == 0
    assert settings.limits == Limits()


def test_names_keys_and_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("b\nc\n")
    monkeypatch.setenv("GLINT_API_KEY", "d,e")
    names = ("--served-model-name", "one", "two")
    settings = read("folder", "--api-key", "a", "--api-key-file", str(file), *names, "--open-metrics")
    assert len(settings.keys) == 5 and settings.model_names == ("one", "two") and not settings.guards_metrics
    assert read("folder", "--allowed-origins", "https://a", "https://b").origins == ("https://a", "https://b")


@pytest.mark.parametrize("flag", ["--max-num-queued-reqs", "--max-queued-requests"])
def test_limits(flag: str) -> None:
    limits = read("folder", flag, "3", "--max-queued-tokens", "50", "--request-timeout", "9").limits
    assert (limits.waiting_requests, limits.waiting_tokens, limits.deadline_seconds) == (3, 50, 9.0)
    longer = read("folder", "--request-timeout", "7200").limits
    assert longer.deadline_seconds == longer.max_deadline_seconds == 7200


def test_the_page_cache_in_tokens() -> None:
    assert read("folder", "--max-total-tokens", "1001").engine_args.num_pages == 63
    assert read("folder", "--max-total-tokens", "64", "--page-size", "32").engine_args.num_pages == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("folder", "--model", "other"), "--model"),
        (("folder", "--port", "70000"), "--port is 70000"),
        (("folder", "--max-total-tokens", "9", "--kv-cache-memory-bytes", "9"), "--max-total-tokens"),
        (("folder", "--max-num-queued-reqs", "0"), "waiting_requests"),
        (("folder", "--request-timeout", "9", "--max-request-timeout", "8"), "max_deadline_seconds"),
        (("folder", "--api-key", ""), "API key is empty"),
        (("folder", "--api-key-file", "no/such/file"), "no/such/file"),
    ],
)
def test_what_contradicts_itself_is_named(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        read(*arguments)
