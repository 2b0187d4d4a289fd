"""Measures how often the sample model's drafts are right: python scripts/mtp_acceptance.py.

Each of the 200 questions of the benches is answered greedily with three drafts a step. The training texts are the
model's own, so none of these prompts is among them. The shares are those of the first 1, 2 and 3 drafts that are all
right.
"""

import argparse
import json
from pathlib import Path

from glint.bench.prompts import read_questions
from glint.checkpoint.table import open_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.settings import EngineSettings
from glint.sample.model import make_sample_model
from glint.sampling import SamplingParams
from glint.text.chat import render_prompt
from glint.text.tokenizer import Tokenizer

NUM_DRAFTS = 3
MOST_AT_ONCE = 16


def measure(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[int]:
    """Counts the steps that verified all drafts, and those in which the first 1, 2, 3 drafts were right.

    The prompts are answered together, which changes neither answers nor drafts.
    """
    counts = [0] * (1 + NUM_DRAFTS)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for prompt in prompts:
        engine.submit(prompt, params)
    num_done = 0
    while engine.has_work:
        for output in engine.step():
            if output.draft_tokens == NUM_DRAFTS:
                for place in range(1 + output.accepted_tokens):
                    counts[place] += 1
            if output.finish_reason is not None:
                num_done += 1
                if num_done % 20 == 0:
                    so_far = f"{counts[0]} steps, first draft right {share(counts, 1):.1%}"
                    print(f"{num_done} of {len(prompts)} prompts, {so_far}", flush=True)
    return counts


def share(counts: list[int], place: int) -> float:
    """The share of steps in which the first `place` drafts were right; 0 without steps."""
    return counts[place] / counts[0] if counts[0] else 0.0


def main() -> None:
    """Answer the prompts, print the shares, write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: the FP8 sample model)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    folder = args.model or make_sample_model("fp8")
    checkpoint, tokenizer = open_checkpoint(folder), Tokenizer(folder)
    chats = [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in read_questions()]
    prompts = [tokenizer.encode_prompt(chat) for chat in chats]
    room = max(map(len, prompts)) + args.max_tokens
    sizes = EngineArgs(
        device=args.device, num_speculative_tokens=NUM_DRAFTS, max_model_len=room, max_num_seqs=MOST_AT_ONCE
    )
    settings = EngineSettings.resolve(folder, checkpoint.config, sizes, has_mtp=True)
    with Engine(checkpoint, settings, None) as engine:
        counts = measure(engine, prompts, args.max_tokens)
    shares = [round(share(counts, place), 4) for place in range(1, 1 + NUM_DRAFTS)]
    print(f"{len(prompts)} prompts, {counts[0]} steps: the first 1, 2, 3 drafts right in {shares}")
    if args.json:
        args.json.write_text(json.dumps({"steps": counts[0], "shares": shares}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
