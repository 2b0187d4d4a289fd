"""Keys share a whole engine: who yields and who overtakes decides when tokens come, never which."""

from glint import Share
from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of


def test_a_key_with_all_slots_yields_and_every_answer_is_as_alone() -> None:
    with make_engine(max_num_seqs=4, max_step_tokens=24) as engine:
        prompts = [prompt_of(seed, 9 + seed) for seed in range(9)]
        asked = [(prompt, 30) for prompt in prompts[:6]] + [(prompt, 5) for prompt in prompts[6:]]
        ids = [engine.submit(prompt, greedy(count), share=Share("first"))[0] for prompt, count in asked[:6]]
        outputs = {request_id: [] for request_id in ids}
        for _ in range(8):
            for output in engine.step():
                outputs[output.request_id].append(output)
        assert (engine.num_running, engine.num_preemptions) == (4, 0)
        ids += [engine.submit(prompt, greedy(count), share=Share("second"))[0] for prompt, count in asked[6:]]
        gather(engine, outputs)
        assert engine.num_preemptions == 2
        found = [[token for output in outputs[request_id] for token in output.token_ids] for request_id in ids]
        assert found == [alone(prompt, count) for prompt, count in asked]
        assert_idle(engine)


def test_a_short_prompt_of_the_same_key_overtakes_long_ones() -> None:
    with make_engine(max_num_seqs=4, max_step_tokens=12) as engine:
        prompts = [prompt_of(seed, 50) for seed in range(10)] + [prompt_of(10, 5)]
        ids = [engine.submit(prompt, greedy(2))[0] for prompt in prompts[:10]]
        ended = []
        outputs = {request_id: [] for request_id in ids}
        while engine.has_work:
            if len(ids) == 10 and ended:
                ids += engine.submit(prompts[10], greedy(2))
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
                ended += [output.request_id] if output.finish_reason is not None else []
        assert ended.index(ids[10]) <= 2
        found = [[token for output in outputs[request_id] for token in output.token_ids] for request_id in ids]
        assert found == [alone(prompt, 2) for prompt in prompts]
        assert_idle(engine)
