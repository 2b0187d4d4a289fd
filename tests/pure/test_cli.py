"""The command line: what it accepts, what it refuses and with which words and exit codes."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glint import cli, flags
from glint.conversation import plain_delta, stream_answer
from glint.engine.args import EngineArgs
from glint.engine.request import FinishReason, StepOutput
from glint.errors import RequestError
from glint.native import library
from glint.sampling import SamplingParams
from tests.pure.checkpoint_files import small_folder

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    ["serve"],
    ["generate"],
    ["chat"],
    ["check"],
    ["download"],
    ["sample-model"],
    ["bench", "cpu"],
    ["bench", "serve"],
    ["bench", "scheduler"],
    ["bench", "rank"],
    ["bench", "kernels"],
    ["smoke"],
]
HEAVY = ("numpy", "transformers", "huggingface_hub", "torch", "rich", "jinja2")
NOT_ON_THE_COMMAND_LINE = {"include_stop_str_in_output", "skip_special_tokens", "stop_token_sequences"}


def step(text: str, tokens: int, finish_reason: FinishReason | None = None, failure: str | None = None) -> StepOutput:
    """What one step would add to a streamed answer."""
    return StepOutput(
        request_id=0,
        text=text,
        token_ids=tuple(range(tokens)),
        logprobs=None,
        prompt_logprobs=None,
        cached_tokens=0,
        finish_reason=finish_reason,
        failure=failure,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: glint " + " ".join(command) in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom glint import cli\ncli.make_parser().format_help()\nprint(' '.join(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "glint.cli" in ended.stdout.split()
    assert not set(HEAVY) & set(ended.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sing"], "invalid choice: 'sing'"),
        (["generate", "hi", "--temprature", "1"], "--temprature"),
        (["generate", "hi", "--temp", "1"], "--temp"),
        (["generate", "hi", "--kernels", "fast"], "invalid choice: 'fast'"),
        (["generate", "hi", "--threads", "two"], "--threads"),
        (["generate", "hi", "--logit-bias", "42"], "is not ID=X"),
        (["generate", "hi", "--logit-bias", "x=1"], "is not ID=X"),
        (["check"], "give a MODEL to inspect"),
        (["sample-model", "--dtype", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_sampling_flags_become_sampling_parameters() -> None:
    line = (
        "generate hi --max-tokens 7 --min-tokens 3 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.2 --frequency-penalty 0.3 --presence-penalty -0.4 --seed 11 "
        "--stop a --stop b --stop-token 5 --stop-token 6 --thinking-budget 0 --thinking-closing-text so "
        "--logit-bias 3=-100 --logit-bias 4=1.5 --ignore-eos --n 2 --logprobs 4 --prompt-logprobs 1"
    )
    changes = flags.sampling_changes(cli.make_parser().parse_args(line.split()))
    assert SamplingParams(**changes) == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        logit_bias={3: -100.0, 4: 1.5},
        seed=11,
        max_tokens=7,
        min_tokens=3,
        thinking_budget=0,
        thinking_closing_text="so",
        logprobs=4,
        prompt_logprobs=1,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
    )
    assert set(changes) == {field.name for field in dataclasses.fields(SamplingParams)} - NOT_ON_THE_COMMAND_LINE


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_flags_that_are_left_out_follow_the_model(command: str) -> None:
    changes = flags.sampling_changes(cli.make_parser().parse_args([command]))
    assert set(changes) == {"max_tokens"}


@pytest.mark.parametrize(
    "command", [["serve"], ["generate"], ["chat"], ["bench", "cpu"], ["bench", "serve"], ["smoke"]]
)
def test_engine_flags_are_settings_of_the_engine(command: list[str]) -> None:
    parser = cli.make_parser()
    given = ["--threads", "3", "--kernels", "plain", "--tp", "2", "--expert-layout", "ep", "--row-slices", "4"]
    given += ["--sequence-parallel", "on", "--all-reduce", "nccl", "--kv-cache-dtype", "fp8"]
    expected: dict[str, Any] = {
        "device": "cpu",
        "threads": 3,
        "kernels": "plain",
        "kv_cache_dtype": "fp8",
        "tp": 2,
        "expert_layout": "ep",
        "row_slices": 4,
        "sequence_parallel": "on",
        "all_reduce": "nccl",
    }
    if command != ["bench", "cpu"]:
        given += ["--max-model-len", "900", "--max-num-seqs", "7", "--gpu-memory-utilization", "0.8"]
        expected |= {"max_model_len": 900, "max_num_seqs": 7, "gpu_memory_utilization": 0.8}
    assert flags.engine_args(parser.parse_args([*command, *given])) == EngineArgs(**expected)
    assert flags.engine_args(parser.parse_args(command)) == EngineArgs()


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["bench", "cpu"], ["smoke"]])
def test_ranks_that_a_model_cannot_have_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_folder(tmp_path, max_position_embeddings=1024)
    assert cli.main([*command, "--model", str(folder), "--tp", "7"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("glint: tp 7 and row_slices 7 do not go with this model:\n")
    assert "num_attention_heads 8 cannot be split over 7 ranks; choose another --tp" in said and said.count("\n") > 3


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["smoke"]])
def test_a_share_of_gpu_memory_is_refused_on_the_cpu(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_folder(tmp_path, max_position_embeddings=1024)
    assert cli.main([*command, "--model", str(folder), "--gpu-memory-utilization", "0.5"]) == 1
    assert "gpu_memory_utilization is 0.5, but device is 'cpu'" in capsys.readouterr().err


def test_a_gpu_without_its_library_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GLINT_ENGINE", raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "glint" / "native" / "library.py"))
    folder = small_folder(tmp_path, max_position_embeddings=1024)
    assert cli.main(["generate", "hi", "--model", str(folder), "--device", "cuda"]) == 1
    assert "scripts/build.sh --cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cpu", "--device", "cuda"], "'glint bench rank' for one rank of GLM-4.7"),
        (["kernels", "--device", "cpu"], "'glint bench cpu' measures the CPU engine"),
        (["kernels", "--build-dir", "nowhere"], "nowhere/libglint_cuda_test.so is not there; build it with scripts/"),
        (["rank", "--model", "glm-9"], "--model glm-9 is neither a known model nor a folder"),
        (["rank", "--tp", "7"], "--tp is 7, which does not divide num_attention_heads 96"),
        (["rank", "--context", "300000"], "the model knows 202752; lower the largest"),
        (["rank", "--json", "/nowhere/rank.json"], "--json /nowhere/rank.json cannot be written"),
    ],
)
def test_a_bench_on_the_wrong_device_or_shape_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_the_kernels_are_timed_with_the_library_of_the_build_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "libglint_cuda_test.so").touch()
    assert cli.main(["bench", "kernels", "--build-dir", str(tmp_path)]) == 1
    assert capfd.readouterr().err.startswith(f"glint: {tmp_path / 'libglint_cuda_test.so'}: ")


def test_a_bench_beyond_the_models_positions_names_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "cpu", "--model", str(small_folder(tmp_path))]) == 1
    assert "--prompt-tokens 512 and --decode-tokens 64 need 513 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens is 0; give 1 or more"),
        (["--decode-tokens", "1"], "--decode-tokens is 1; give 2 or more"),
        (["--peer-python", "python3"], "add --peer llama.cpp"),
        (["--peer", "llama.cpp", "--model", "folder"], "leave --model out"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json cannot be written"),
    ],
)
def test_a_bench_that_cannot_be_run_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "cpu", *flags]) == 1
    assert said in capsys.readouterr().err


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = cli.make_parser()
    assert parser.parse_args(["sample-model", "--cache-dir", "~/kept"]).cache_dir == tmp_path / "kept"
    assert parser.parse_args(["smoke", "--model", "~/model"]).model == tmp_path / "model"
    with pytest.raises(SystemExit):
        parser.parse_args(["check", "~no-such-user-of-this-machine/model"])


@pytest.mark.parametrize(
    "arguments", [["generate", "hi", "--model"], ["chat", "--model"], ["smoke", "--model"], ["check"]]
)
def test_a_model_that_is_not_there_is_one_message(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nowhere"
    assert cli.main([*arguments, str(folder)]) == 1
    captured = capsys.readouterr()
    assert str(folder) in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_the_prompt_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file, ö\n", encoding="utf-8")
    parser = cli.make_parser()
    assert cli.read_prompt(parser.parse_args(["generate", "given"])) == "given"
    assert cli.read_prompt(parser.parse_args(["generate", "--prompt-file", str(file)])) == "from a file, ö\n"
    for piped, text in (("piped", "piped"), ("piped\n", "piped"), ("two\n\n", "two\n")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert cli.read_prompt(parser.parse_args(["generate"])) == text
    with pytest.raises(RequestError, match="both given"):
        cli.read_prompt(parser.parse_args(["generate", "given", "--prompt-file", str(file)]))


def test_a_prompt_file_that_cannot_be_read_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path / "nowhere.txt"):
        assert cli.main(["generate", "--prompt-file", str(path)]) == 1
        error = capsys.readouterr().err
        assert str(path) in error and "UTF-8" in error and error.count("\n") == 1


def test_logprobs_without_json_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--logprobs", "2"]) == 1
    assert "--json" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(model_dir: Path, tp: int, expert_layout: str, name: str | None) -> tuple[str, bool]:
        raise KeyboardInterrupt

    monkeypatch.setattr("glint.checkpoint.report.run_check", interrupt)
    assert cli.main(["check", str(tmp_path)]) == 130


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "glint", "check", str(tmp_path)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert ended.returncode == 1
    assert ended.stderr == ""


def test_a_streamed_answer_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    answer = stream_answer(map(plain_delta, [step("Hel", 1), step("", 1), step("lo", 2, "stop")]))
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert captured.err.startswith("[4 tokens, the first after ") and captured.err.endswith("stop]\n")
    assert (answer.text, answer.num_tokens, answer.exit_code) == ("Hello", 4, 0)


def test_a_failed_answer_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    answer = stream_answer(map(plain_delta, [step("Hel", 1), step("", 0, "failed", "the logits held a NaN")]))
    assert answer.exit_code == 1
    assert "the answer failed: the logits held a NaN" in capsys.readouterr().err


def test_an_interrupted_answer_keeps_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    def outputs() -> Iterator[StepOutput]:
        yield step("Hel", 1)
        raise KeyboardInterrupt

    answer = stream_answer(map(plain_delta, outputs()))
    assert (answer.text, answer.exit_code) == ("Hel", 130)
    assert capsys.readouterr().out == "Hel\n"
