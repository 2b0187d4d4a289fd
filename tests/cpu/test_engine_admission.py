"""Which waiting requests a whole engine lets run: pages that only the prefix cache holds are room for them."""

import pytest

from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of

NUM_REQUESTS = 10
PAGES_OF_A_REQUEST = 4


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_full_prefix_cache_lets_as_many_requests_run_as_an_empty_one(is_warm: bool) -> None:
    prompts = [prompt_of(seed, 17) for seed in range(NUM_REQUESTS)]
    num_pages = NUM_REQUESTS * PAGES_OF_A_REQUEST
    with make_engine(num_pages=num_pages) as engine:
        if is_warm:
            for seed in range(NUM_REQUESTS):
                engine.submit(prompt_of(1000 + seed, 33), greedy(1))
                gather(engine, {})
            assert engine.last_step.pages_free < 2 and engine.last_step.pages_held == 0
        ids = [engine.submit(prompt, greedy(3))[0] for prompt in prompts]
        outputs = {output.request_id: [output] for output in engine.step()}
        assert (engine.num_running, engine.num_waiting) == (NUM_REQUESTS, 0)
        assert engine.last_step.num_items == NUM_REQUESTS
        outputs = gather(engine, outputs)
        found = [[token for output in outputs[request_id] for token in output.token_ids] for request_id in ids]
        assert found == [alone(prompt, 3) for prompt in prompts]
        assert engine.num_preemptions == 0
        assert_idle(engine)


def test_a_preempted_request_starts_and_asks_the_prefix_cache_once() -> None:
    prompts = [prompt_of(seed, 16) for seed in range(2)]
    with make_engine(num_pages=8, max_model_len=48) as engine:
        ids = [engine.submit(prompt, greedy(30))[0] for prompt in prompts]
        summaries = []
        while engine.has_work:
            engine.step()
            summaries.append(engine.last_step)
        assert engine.num_preemptions > 0 and engine.stats().tokens_cached > 0
        assert sum(summary.prefix_tokens_queried for summary in summaries) == sum(map(len, prompts))
        assert sum(summary.prefix_tokens_hit for summary in summaries) == 0
        assert [request_id for summary in summaries for request_id in summary.started_ids] == ids


@pytest.mark.parametrize(("missing_pages", "num_waiting"), [(1, 0), (2, 1)])
def test_the_last_request_waits_where_its_prompt_has_no_room(missing_pages: int, num_waiting: int) -> None:
    with make_engine(num_pages=NUM_REQUESTS * PAGES_OF_A_REQUEST - missing_pages) as engine:
        for seed in range(NUM_REQUESTS):
            engine.submit(prompt_of(seed, 17), greedy(3))
        engine.step()
        assert (engine.num_running, engine.num_waiting) == (NUM_REQUESTS - num_waiting, num_waiting)
        gather(engine, {})
        assert_idle(engine)
