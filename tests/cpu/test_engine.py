"""The whole engine on a random small model: one answer in every batch, clean ends, failures that stay alone."""

import platform
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glint import LLM, Completion, EngineError, RequestError, SamplingParams
from glint.checkpoint.layout import Role
from glint.checkpoint.table import open_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.settings import EngineSettings
from glint.native.library import InvalidArgument, NativeEngine, OutOfPages, UnknownRequest, choose_library
from tests.cpu.sweeps import slow
from tests.reference.checkpoints import make_checkpoint

pytestmark = pytest.mark.sanitize

BF16_NAN = b"\xc0\x7f"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "air", "air", "bf16")


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer=True, **({"num_pages": 64} | options))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder) as opened:
        yield opened


def make_work(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths, one of them the beginning of another, with mixed sampling."""
    source = random.Random(3)
    prompts = [[source.randrange(vocab_size) for _ in range(length)] for length in (1, 16, 17, 40, 55)]
    prompts.append(prompts[-1][:33])
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True, repetition_penalty=1.2)
    sampled = SamplingParams(seed=7, max_tokens=12, logprobs=0, top_p=0.9, prompt_logprobs=2, ignore_eos=True)
    plain = SamplingParams(seed=8, max_tokens=20, temperature=2.0, ignore_eos=True)
    return prompts, [greedy, sampled, plain] * 2


def answers(results: list[Completion]) -> list[Any]:
    return [(entry.token_ids, entry.logprobs, entry.prompt_logprobs, entry.finish_reason) for entry in results]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """Every prompt alone in a fresh engine."""
    collected = []
    for prompt, params in zip(*make_work(open_checkpoint(folder).config.vocab_size), strict=True):
        with make_llm(folder) as llm:
            collected += llm.generate(prompt_token_ids=[prompt], sampling_params=params)
    return answers(collected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"num_pages": 10, "page_tokens": 8, "max_step_tokens": 11},
        {"threads": 3},
        *slow({"max_step_tokens": 1}, {"max_step_tokens": 7}, {"num_pages": 5}, {"threads": 1}),
    ],
)
def test_the_answer_does_not_depend_on_the_company(folder: Path, expected: list[Any], options: dict[str, Any]) -> None:
    prompts, params = make_work(open_checkpoint(folder).config.vocab_size)
    with make_llm(folder, **options) as llm:
        assert answers(llm.generate(prompt_token_ids=prompts, sampling_params=params)) == expected
        again = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        assert answers(again) == expected
        llm.engine.check()
        stats = llm.engine.stats()
        assert (stats.pages_held, stats.num_requests, stats.steps_in_flight) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == stats.num_pages


@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_preempted_requests_end_with_the_same_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_step_tokens: int
) -> None:
    prompts = [list(range(first, first + 16)) for first in (10, 50, 90)]
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    preempted: list[int] = []
    original = NativeEngine.release_pages

    def count(native: NativeEngine, request_id: int) -> None:
        preempted.append(request_id)
        original(native, request_id)

    monkeypatch.setattr(NativeEngine, "release_pages", count)
    with make_llm(folder, num_pages=64) as llm:
        ample = answers(llm.generate(prompt_token_ids=prompts, sampling_params=params))
    assert not preempted
    with make_llm(folder, num_pages=5, max_step_tokens=max_step_tokens) as llm:
        scarce = answers(llm.generate(prompt_token_ids=prompts, sampling_params=params))
        llm.engine.check()
    assert preempted
    assert scarce == ample


def test_a_prefix_seen_before_is_cached(llm: LLM) -> None:
    prompt = list(range(100, 150))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, second = (llm.generate(prompt_token_ids=[prompt], sampling_params=params)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert first.token_ids == second.token_ids


def test_choices_share_the_prompt_and_differ_in_their_tokens(llm: LLM) -> None:
    prompt = list(range(200, 240))
    params = SamplingParams(n=3, seed=11, temperature=2.0, max_tokens=8, ignore_eos=True)
    before = llm.engine.stats().tokens_cached
    (first,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
    assert llm.engine.stats().tokens_cached - before == 2 * 32
    assert len({tuple(choice.token_ids) for choice in first.choices}) == 3
    (second,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
    assert second.choices == first.choices


def test_without_a_seed_every_request_draws_its_own(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    results = llm.generate(prompt_token_ids=[[5, 6]] * 4, sampling_params=params)
    assert len({tuple(entry.token_ids) for entry in results}) == 4


def test_ends(llm: LLM, folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (free,) = llm.generate(prompt_token_ids=[[9, 8, 7]], sampling_params=greedy)
    assert (len(free.token_ids), free.finish_reason) == (6, "length")
    stop = free.token_ids[3]
    stopping = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    (stopped,) = llm.generate(prompt_token_ids=[[9, 8, 7]], sampling_params=stopping)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    with make_llm(folder, max_model_len=20) as short:
        full = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        (filled,) = short.generate(prompt_token_ids=[[9, 8, 7]], sampling_params=full)
        assert (len(filled.token_ids), filled.finish_reason) == (17, "length")
        assert filled.token_ids[:6] == free.token_ids


def test_a_stop_token_sequence_ends_the_answer_where_it_first_completes(llm: LLM) -> None:
    free_params = SamplingParams(seed=5, temperature=2.0, max_tokens=24, ignore_eos=True, logprobs=1)
    prompt = [[9, 8, 7]]
    (free,) = llm.generate(prompt_token_ids=prompt, sampling_params=free_params)
    tokens = free.token_ids
    assert len(set(tokens)) == len(tokens) == 24
    cases = {
        (tuple(tokens[4:7]),): 7,
        (tuple(tokens[6:7]),): 7,
        (tuple(tokens[:24]),): 24,
        (tuple(tokens[10:12]), tuple(tokens[4:7])): 7,
        (tuple(tokens[3:8]), tuple(tokens[4:7])): 7,
        (tuple(tokens[2:5]), tuple(tokens[4:7]), (999,)): 5,
        ((tokens[3], *tokens[3:6]), tuple(tokens[4:7])): 7,
    }
    stopping = [replace(free_params, stop_token_sequences=sequences) for sequences in cases]
    results = llm.generate(prompt_token_ids=prompt * len(cases), sampling_params=stopping)
    for result, count in zip(results, cases.values(), strict=True):
        assert (result.token_ids, result.finish_reason) == (tokens[:count], "stop")
        assert result.logprobs == free.logprobs[:count]
    alone = replace(free_params, stop_token_sequences=[tokens[4:7]])
    assert answers(llm.generate(prompt_token_ids=prompt, sampling_params=alone)) == answers(results[:1])
    both = replace(free_params, stop_token_sequences=[tokens[4:7]], stop_token_ids=[tokens[5]])
    (first,) = llm.generate(prompt_token_ids=prompt, sampling_params=both)
    assert (first.token_ids, first.finish_reason) == (tokens[:6], "stop")


def test_a_repeated_token_completes_a_sequence_that_repeats_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={5: 100.0})
    wanted = {((5, 5, 5),): (3, "stop"), ((5, 5, 5, 6), (5, 5)): (2, "stop"), ((5,) * 7,): (6, "length")}
    asked = [replace(params, stop_token_sequences=sequences) for sequences in wanted]
    results = llm.generate(prompt_token_ids=[[5, 5, 5]] * len(wanted), sampling_params=asked)
    assert [(len(result.token_ids), result.finish_reason) for result in results] == list(wanted.values())


def test_a_stop_token_sequence_that_never_comes_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(seed=5, temperature=2.0, max_tokens=24, ignore_eos=True, logprobs=1)
    (free,) = llm.generate(prompt_token_ids=[[9, 8, 7]], sampling_params=params)
    tokens = free.token_ids
    never = [[7, tokens[0]], tokens[6:3:-1], [tokens[4], tokens[6]], [*tokens, 1]]
    for sequences in (never, [tokens[23:] * 256] * 256):
        asked = replace(params, stop_token_sequences=sequences)
        assert answers(llm.generate(prompt_token_ids=[[9, 8, 7]], sampling_params=asked)) == answers([free])


def test_an_end_of_sequence_token_ends_the_answer_unless_it_is_ignored(llm: LLM, folder: Path) -> None:
    end_tokens = open_checkpoint(folder).eos_token_ids
    assert len(end_tokens) > 1
    for token in end_tokens:
        likely = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={token: 100.0})
        ignoring = replace(likely, ignore_eos=True)
        stopping = replace(ignoring, stop_token_ids=[token])
        ended, ignored, stopped = llm.generate(
            prompt_token_ids=[[9, 8, 7]] * 3, sampling_params=[likely, ignoring, stopping]
        )
        assert (ended.token_ids, ended.finish_reason) == ([token], "stop")
        assert (ignored.token_ids, ignored.finish_reason) == ([token] * 5, "length")
        assert (stopped.token_ids, stopped.finish_reason) == ([token], "stop")


def test_a_stream_gives_what_generate_gives_and_may_be_left(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (whole,) = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=params)
    outputs = list(llm.stream([1, 2, 3], params))
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids
    assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
    stream = llm.stream([1, 2, 3], params)
    next(stream)
    with pytest.raises(RequestError, match="still running"):
        llm.generate(prompt_token_ids=[[1]])
    stream.close()
    assert (llm.engine.has_work, llm.engine.stats().num_requests, llm.engine.stats().pages_held) == (False, 0, 0)


@pytest.mark.parametrize("moment", ["submit_step", "sample_step", "collect_step"])
def test_an_interrupted_step_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (expected_answer,) = llm.generate(prompt_token_ids=[[4, 5, 6]], sampling_params=params)
    original = getattr(NativeEngine, moment)

    def interrupted(*arguments: Any) -> None:
        original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt_token_ids=[[4, 5, 6], [7, 8]], sampling_params=params)
    stats = llm.engine.stats()
    assert (stats.steps_in_flight, stats.num_requests, stats.pages_held) == (0, 0, 0)
    (answer,) = llm.generate(prompt_token_ids=[[4, 5, 6]], sampling_params=params)
    assert answer.token_ids == expected_answer.token_ids


def test_a_request_that_fails_harms_no_other(folder: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    checkpoint = open_checkpoint(damaged)
    (embedding,) = [entry for entry in checkpoint.tensors if entry.role is Role.EMBEDDING]
    with checkpoint.files[embedding.file_index].path.open("r+b") as file:
        file.seek(embedding.file_offset + 7 * embedding.cols * len(BF16_NAN))
        file.write(BF16_NAN * embedding.cols)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={7: -100.0})
    with make_llm(damaged) as llm:
        (alone,) = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=params)
        healthy, failed = llm.generate(prompt_token_ids=[[1, 2, 3], [1, 7, 3]], sampling_params=params)
        assert healthy.token_ids == alone.token_ids
        assert (failed.finish_reason, failed.token_ids) == ("failed", [])
        assert "NaN" in failed.failure
        assert llm.engine.stats().num_requests == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either prompts or prompt_token_ids"),
        ({"prompts": ["a"], "prompt_token_ids": [[1]]}, "either prompts or prompt_token_ids"),
        ({"prompts": "text"}, "skip_tokenizer"),
        ({"prompt_token_ids": [[1], []]}, "prompt 1: the prompt has no tokens"),
        ({"prompt_token_ids": [[1, -1]]}, "prompt 0: prompt holds token id -1; ids go from 0 to 999"),
        ({"prompt_token_ids": [[1000]]}, "token id 1000"),
        ({"prompt_token_ids": [[1.5]]}, "not a token id"),
        ({"prompt_token_ids": [3]}, "each of its entries is a list"),
        ({"prompt_token_ids": [[1] * 1024]}, "has 1024 tokens, but at most 1023 fit"),
        ({"prompt_token_ids": [[1]], "sampling_params": []}, "0 sampling_params for 1 prompts"),
        ({"prompt_token_ids": [[1]], "sampling_params": SamplingParams(stop="x")}, "stop strings need the tokenizer"),
        ({"prompt_token_ids": [[1]], "sampling_params": SamplingParams(stop_token_ids=[1000])}, "stop_token_ids holds"),
        (
            {"prompt_token_ids": [[1]], "sampling_params": SamplingParams(stop_token_sequences=[[1], [2, 1000]])},
            "stop_token_sequences holds token id 1000; ids go from 0 to 999",
        ),
        ({"prompt_token_ids": [[1]], "sampling_params": SamplingParams(logit_bias={1000: 1})}, "logit_bias holds"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    steps = llm.engine.stats().steps_done
    with pytest.raises(RequestError, match=message):
        llm.generate(**arguments)
    assert not llm.engine.has_work
    assert llm.engine.stats().steps_done == steps


def test_a_salt_is_below_two_to_the_63(llm: LLM) -> None:
    for salt in (-1, 2**63):
        with pytest.raises(RequestError, match=f"cache_salt is {salt}"):
            llm.engine.submit([1], SamplingParams(), cache_salt=salt)
    assert not llm.engine.has_work
    llm.engine.submit([1], SamplingParams(max_tokens=1), cache_salt=2**63 - 1)
    while llm.engine.has_work:
        assert all(output.failure is None for output in llm.engine.step())


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate(prompt_token_ids=[]) == []


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = make_llm(folder)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate(prompt_token_ids=[[1]])
    assert not llm.engine.has_work


def test_device_and_library_must_agree(folder: Path) -> None:
    with pytest.raises(EngineError, match="computes on 'cpu', but device is 'cuda'"):
        make_llm(folder, device="cuda", engine=choose_library("cpu"))
    checkpoint = open_checkpoint(folder)
    settings = EngineSettings.resolve(folder, checkpoint.config, EngineArgs())
    object.__setattr__(settings, "device", "cuda")
    with pytest.raises(EngineError, match="computes on 'cpu', but device is 'cuda'"):
        Engine(checkpoint, settings, None, choose_library("cpu"))


def test_kernels_of_another_processor_are_named(folder: Path) -> None:
    foreign = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon"
    with pytest.raises(EngineError, match=f"kernels '{foreign}' need instructions .* --kernels auto"):
        make_llm(folder, kernels=foreign)


@pytest.mark.parametrize(
    "params", [5, "greedy", {"temperature": 0.0}, [{"temperature": 0.0}], [SamplingParams(), None]]
)
def test_what_is_not_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams are needed"):
        llm.generate(prompt_token_ids=[[1], [2]], sampling_params=params)
    with pytest.raises(RequestError, match="SamplingParams are needed"):
        next(llm.stream([1], params))
    assert not llm.engine.has_work


def test_a_status_becomes_the_exception_of_its_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NativeEngine] = []
    original = NativeEngine.__init__

    def remember(native: NativeEngine, *arguments: Any) -> None:
        made.append(native)
        original(native, *arguments)

    monkeypatch.setattr(NativeEngine, "__init__", remember)
    with make_llm(folder, num_pages=3, max_model_len=32) as llm:
        native = made[0]
        with pytest.raises(UnknownRequest, match="99"):
            native.free_request(99)
        with pytest.raises(InvalidArgument, match="0 items"):
            native.submit_step([])
        requests = [llm.engine.submit([1] * 31, SamplingParams())[0] for _ in range(2)]
        ids = [native.add_request(llm.engine._loop.requests[request].to_native()) for request in requests]
        with pytest.raises(OutOfPages) as shortage:
            native.submit_step([(native_id, 31) for native_id in ids])
        assert shortage.value.missing_pages == 1
        assert native.stats().pages_free == 3
