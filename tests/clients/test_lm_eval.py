"""lm-eval: log-likelihoods and generated texts of a small local task, through both of its OpenAI-compatible models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients import server

TASKS = Path(__file__).parent / "lm_eval_tasks"


def evaluate(
    monkeypatch: pytest.MonkeyPatch, model: str, route: str, task: str, key: str = server.KEY, **settings: Any
) -> dict[str, Any]:
    """The results of a task, with every sample."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    arguments = {"model": server.MODEL, "base_url": f"{server.URL}/{route}", "max_retries": 1}
    results = simple_evaluate(
        model=model,
        model_args=arguments | {"tokenizer_backend": "huggingface", "tokenizer": server.MODEL_FOLDER} | settings,
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=route.startswith("chat"),
        bootstrap_iters=0,
    )
    assert results is not None
    return dict(results)


def loglikelihood(context: str, continuation: str) -> float:
    """The sum of the server's own log-probabilities of a continuation."""
    prompt = server.token_ids(context + continuation)
    answer = server.complete(prompt, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    return float(sum(answer["logprobs"]["token_logprobs"][len(server.token_ids(context)) :]))


@pytest.mark.parametrize("tokenized", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods(monkeypatch: pytest.MonkeyPatch, tokenized: bool, batch_size: int) -> None:
    settings = {"tokenized_requests": tokenized, "batch_size": batch_size}
    results = evaluate(monkeypatch, "local-completions", "completions", "capitals_choice", **settings)
    samples = results["samples"]["capitals_choice"]
    assert len(samples) == 3
    for sample in samples:
        for request, (response,) in zip(sample["arguments"], sample["resps"], strict=True):
            value, _ = response
            assert float(value) == pytest.approx(loglikelihood(*request), abs=1e-6)
    scores = [[float(response[0]) for (response,) in sample["resps"]] for sample in samples]
    right = [row.index(max(row)) == sample["doc"]["answer"] for row, sample in zip(scores, samples, strict=True)]
    assert results["results"]["capitals_choice"]["acc,none"] == pytest.approx(sum(right) / 3)


@pytest.mark.parametrize("tokenized", [True, False])
def test_generated_texts(monkeypatch: pytest.MonkeyPatch, tokenized: bool) -> None:
    settings = {"tokenized_requests": tokenized, "num_concurrent": 3}
    results = evaluate(monkeypatch, "local-completions", "completions", "capitals_text", **settings)
    for sample in results["samples"]["capitals_text"]:
        expected = server.complete(sample["doc"]["question"], max_tokens=12, stop=["."])["choices"][0]["text"]
        assert sample["resps"] == [[expected]]


def test_chat_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    results = evaluate(monkeypatch, "local-chat-completions", "chat/completions", "capitals_text")
    for sample in results["samples"]["capitals_text"]:
        message = {"role": "user", "content": sample["doc"]["question"]}
        assert sample["resps"] == [[server.chat_text(message, max_tokens=12, stop=["."])]]


def test_a_wrong_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="401"):
        evaluate(monkeypatch, "local-completions", "completions", "capitals_text", key="wrong")
