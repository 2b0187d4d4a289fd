"""The bench of a server beside its engine alone on real weights; the server of random weights as far as a CPU goes.

The CPU library has no random weights, so that their server ends with its refusal: the seed came through the supervisor
and the server to the engine.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import call, glint
from tests.e2e.served import free_port
from tests.e2e.small_glm import write_small_glm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_small_glm(tmp_path_factory.mktemp("model") / "glm")


def test_a_server_is_measured_beside_its_engine_alone(folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    load = ("--concurrency", "1,4", "--num-prompts", "8", "--prompt-len", "40", "--gen-len", "12")
    ended = glint("bench", "serve", "--model", folder, "--engine-alone", *load, "--json", figures)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the server beside its engine alone, all measured" in ended.stdout
    assert "the engine alone, 4 at once" in ended.stderr
    for count, run in zip((1, 4), json.loads(figures.read_text())["runs"], strict=True):
        assert (run["completed"], run["failed"], run["total_output_tokens"]) == (8, 0, 96)
        alone = run["engine_alone"]
        assert (alone["requests"], alone["decode_steps"]) == (count, 11)
        seconds = alone["prefill_seconds"] + alone["decode_seconds"]
        assert alone["output_throughput"] == pytest.approx(count * 12 / seconds)
        assert run["share_of_engine_alone"] == pytest.approx(run["output_throughput"] / alone["output_throughput"])


def test_the_seed_of_random_weights_reaches_the_library(folder: Path, tmp_path: Path) -> None:
    shapes, text = tmp_path / "shapes", tmp_path / "text"
    for made, names in ((shapes, ("config.json",)), (text, ("tokenizer.json", "tokenizer_config.json"))):
        made.mkdir()
        for name in names:
            shutil.copy(folder / name, made)
    ended = call(sys.executable, "-m", "glint.synthetic_server", shapes, "--model", text, "--port", str(free_port()))
    assert ended.returncode == 1
    assert f"cannot serve {text}" in ended.stderr
    assert "synthetic_seed is 1: the CPU library computes with the weights of a checkpoint" in ended.stderr
    refused = glint("serve", "--model", shapes, "--port", str(free_port()))
    assert refused.returncode == 1
    assert "has neither model.safetensors.index.json nor model.safetensors" in refused.stderr
