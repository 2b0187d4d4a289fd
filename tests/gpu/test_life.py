"""Long runs and failures on the GPU: memory and pages return, and a failure stays where it belongs."""

import random
import shutil
from pathlib import Path

import pytest

from glint import SamplingParams
from glint.checkpoint.table import open_checkpoint
from glint.engine.args import Kernels
from glint.native import abi
from glint.native.library import InvalidArgument, OutOfMemory, Unsupported, load_library, plan_engine
from tests.cpu.small_engine import VOCAB_SIZE, Session, answer_all, engine_options, make_ask, small_model
from tests.cpu.testing_library import load_testing_library
from tests.gpu.cases import CaseStore, cuda_engine
from tests.gpu.sessions import CUDA_OPTIONS, kernels_of, open_cuda

LEAK_STEPS = 10_000


def free_bytes() -> int:
    """Memory of the GPU that nobody holds."""
    library = load_library(Path(load_testing_library("cuda")._name))
    return int(plan_engine(library, engine_options(small_model(), **CUDA_OPTIONS)).memory_free)


def test_ten_thousand_steps_leave_nothing_behind(kernels: Kernels) -> None:
    source = random.Random(1)
    control = make_ask(range(30), 12)
    with open_cuda(small_model(), num_pages=64, kernels=kernels_of(kernels)) as engine:
        (expected,) = answer_all(engine, [control])
        session = Session(engine)
        before = free_bytes()
        while engine.stats().steps_done < LEAK_STEPS:
            while len(session.answers) < 16:
                prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 50))]
                session.add(make_ask(prompt, source.randint(1, 60), temperature=1.0, seed=source.randrange(2**32)))
            if source.random() < 0.02 and session.running:
                session.free(source.choice(session.running))
            if session.running:
                session.step([(request_id, 16) for request_id in session.running])
            for request_id in session.answers.keys() - set(session.running):
                session.free(request_id)
        for request_id in list(session.answers):
            session.free(request_id)
        assert free_bytes() == before
        stats = engine.stats()
        assert (stats.num_requests, stats.steps_in_flight, stats.pages_held) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == stats.num_pages
        engine.check()
        assert answer_all(engine, [control]) == [expected]


def test_engines_give_their_memory_back(kernels: Kernels) -> None:
    def use() -> None:
        with open_cuda(small_model(), kernels=kernels_of(kernels)) as engine:
            answer_all(engine, [make_ask(range(100), 4)])

    use()
    before = free_bytes()
    for _ in range(10):
        use()
    assert abs(free_bytes() - before) < 64 * 2**20


def test_too_many_pages_are_refused_and_nothing_is_left() -> None:
    before = free_bytes()
    with pytest.raises(OutOfMemory, match="GiB of pages"):
        open_cuda(small_model(), num_pages=2**25)
    assert abs(free_bytes() - before) < 64 * 2**20
    with open_cuda(small_model()) as engine:
        assert answer_all(engine, [make_ask(range(10), 3)])[0].finish_reason == abi.FINISH_LENGTH


def test_options_of_the_cpu_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="a page has 64 tokens"):
        open_cuda(small_model(), page_tokens=16)
    with pytest.raises(Unsupported, match="kernels"):
        open_cuda(small_model(), kernels=abi.KERNELS_EXACT)
    with pytest.raises(Unsupported, match="row_slices"):
        open_cuda(small_model(), row_slices=2)


def test_an_fp8_nan_in_the_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(Path(small_model().files[0].path).parent, folder)
    checkpoint = open_checkpoint(folder)
    table = checkpoint.tensor_array()
    row = next(row for row in table if row["dtype"] == abi.DTYPE_F8_E4M3)
    with Path(checkpoint.files[int(row["file_index"])].path).open("r+b") as file:
        file.seek(int(row["file_offset"]))
        file.write(b"\x7f")
    with pytest.raises(InvalidArgument, match="FP8 NaN"):
        open_cuda(open_checkpoint(folder))


def test_a_poisoned_row_fails_alone(cases: CaseStore, kernels: Kernels) -> None:
    case = cases.case(("air", "fp8_tensor"))
    prompts = [list(range(3, 200)), list(range(5, 150))]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with cuda_engine(case.folder, kernels) as engine:
        first, other = engine.llm.generate(prompt_token_ids=prompts, sampling_params=params)
        engine.poison_pages()
        fresh = [900 - token for token in prompts[1]]
        again, healthy = engine.llm.generate(prompt_token_ids=[prompts[0], fresh], sampling_params=params)
        assert first.finish_reason == other.finish_reason == "length"
        assert again.cached_tokens > 0 and again.finish_reason == "failed"
        assert healthy.finish_reason == "length"
        engine.llm.engine.check()
