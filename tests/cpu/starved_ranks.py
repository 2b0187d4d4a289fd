"""An engine one of whose ranks fails and has no memory from then on, in a process of its own.

`python -m tests.cpu.starved_ranks PLACE RANK` prints what the step, and then every further call, is answered.
"""

import sys
from ctypes import c_int32

from glint.errors import EngineError
from tests.cpu.rank_engine import open_testing_engine, rank_asks, rank_model
from tests.cpu.rank_faults import failing_ranks
from tests.cpu.small_engine import Session
from tests.cpu.testing_library import declare

OPTIONS = {"num_ranks": 4, "row_slices": 4, "num_pages": 64, "max_step_tokens": 256, "max_step_items": 8}


def answer_to_a_step(session: Session, request_id: int) -> str:
    """Kind and words of the error that a step of the request ends with."""
    try:
        session.step([(request_id, 8)])
    except EngineError as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def main(place: str, rank: int) -> None:
    """Open an engine, let the rank fail and tell what comes of it."""
    declare("glint_testing_starve_failed_ranks", None, c_int32)(1)
    if place == "load":
        with failing_ranks(place, rank):
            try:
                open_testing_engine(rank_model(), **OPTIONS)
            except EngineError as failure:
                print(f"{type(failure).__name__}: {failure}")
        return
    with open_testing_engine(rank_model(), **OPTIONS) as engine, failing_ranks(place, rank):
        session = Session(engine)
        request_id = session.add(rank_asks(2, seed=3)[0])
        print(answer_to_a_step(session, request_id))
        print(answer_to_a_step(session, request_id))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
