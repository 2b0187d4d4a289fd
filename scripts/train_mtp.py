"""Trains an MTP layer for the sample model, in minutes on a GPU: python scripts/train_mtp.py --out FILE --seconds 540.

The model writes the texts itself: its chat template up to the user's turn and one of the openings below, then the rest
of the question and an answer, most of them at low temperatures. The layer learns the model's own distribution over the
answers, for the first draft and with half the weight for the second. Its inputs are those of the engine: the embedding
of a token beside the hidden state of the token before it, behind the final norm, then what the layer itself gave behind
its own norm; a draft attends to the entries that the engine has in its pages. The block begins as the model's last
layer, and eh_proj as the least-squares guess at what that layer saw.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from glint.sample.model import make_sample_model

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TURNS = ("<|im_start|>user\n", "<|im_start|>assistant\n")
END = "<|im_end|>"
NUM_DRAFTS = 3
DRAFT_WEIGHTS = (1.0, 0.5)
GREEDY = 0.01
QUESTION_HEAT = 0.9
WRITING_SHARE = 0.4
OPENINGS = (
    "",
    "Explain",
    "Explain the",
    "Explain how",
    "Explain why",
    "Explain in simple words",
    "What is",
    "What is the difference between",
    "What are",
    "What happens when",
    "What does",
    "How do",
    "How does",
    "How can I",
    "How to",
    "Why do",
    "Why does",
    "Why is",
    "Why are",
    "Who was",
    "When did",
    "Where",
    "Which",
    "Write a",
    "Write a poem about",
    "Write a story about",
    "Write a letter to",
    "Write an email",
    "Write two",
    "Write a paragraph about",
    "Write a Python function",
    "Give me",
    "Give an overview of",
    "Give me five",
    "Give me advice",
    "Tell me about",
    "Tell me a story",
    "Describe",
    "Describe how",
    "List",
    "List the",
    "Name",
    "Summarize",
    "Compare",
    "Discuss the importance of",
    "Teach me",
    "Introduce me to",
    "Create a",
    "Plan a",
    "Suggest",
    "Can you",
    "Could you explain",
    "I want to",
    "I need help with",
    "Help me",
    "Is it",
    "Define",
    "Translate",
    "In one sentence,",
)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the sample model in float32 under the names of Llama: scaled, its experts joined into one MLP.

    An MTP layer that the folder has already is left out.
    """
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    stored = load_file(folder / "model.safetensors")
    weights = {
        name: value.float() * stored.get(f"{name}_scale", torch.ones(1))
        for name, value in stored.items()
        if not name.endswith("_scale") and f".layers.{layers}." not in name
    }
    for prefix in {name.split(".experts.0.")[0] for name in weights if ".experts.0." in name}:
        for part in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            routed = sum(name.startswith(f"{prefix}.experts.") and name.endswith(part) for name in weights)
            names = [
                *(f"{prefix}.experts.{expert}.{part}" for expert in range(routed)),
                f"{prefix}.shared_experts.{part}",
            ]
            weights[f"{prefix}.{part}"] = torch.cat([weights.pop(name) for name in names], int(part.startswith("down")))
    return {name: value for name, value in weights.items() if ".mlp.gate." not in name}


def load_model(folder: Path, device: str) -> LlamaForCausalLM:
    """The sample model as the Llama model that it computes, in BF16 on a GPU, frozen."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    more = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings")
    config = LlamaConfig(**{name: fields[name] for name in names + more}, attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read_weights(folder), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"train_mtp: {folder} is not the sample model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval().requires_grad_(False)


@dataclass(frozen=True)
class Texts:
    """Conversations of equal length: token ids [count, len], which tokens the model chose in its answers
    [count, len], and the states behind the final norm of all tokens but the last [count, len - 1, hidden]."""

    ids: Tensor
    is_answer: Tensor
    states: Tensor

    def rows(self, chosen: Tensor | slice) -> "Texts":
        """Some of the conversations."""
        return Texts(self.ids[chosen], self.is_answer[chosen], self.states[chosen])

    def parts(self, size: int) -> Iterator["Texts"]:
        """All conversations, `size` at a time."""
        return (self.rows(slice(first, first + size)) for first in range(0, len(self.ids), size))


def join(parts: list[Texts]) -> Texts:
    """One collection of several."""
    return Texts(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "is_answer", "states")))


class Writer:
    """Lets the model write conversations of its own, many at a time."""

    def __init__(self, model: LlamaForCausalLM, folder: Path) -> None:
        self.model = model
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        openings = [encode(opening) for opening in OPENINGS]
        forced = [encode("\n" + TURNS[1])] + [encode("\n" + TURNS[0]) + opening for opening in openings]
        width = max(map(len, forced))
        padded = [[0] * (width - len(tokens)) + tokens for tokens in forced]
        lengths, firsts = list(map(len, forced)), [0, *map(len, openings)]
        self.start, self.forced, self.lengths, self.first_lengths = (
            torch.tensor(numbers, device=model.device)
            for numbers in (encode(SYSTEM + TURNS[0]), padded, lengths, firsts)
        )
        self.end = tokenizer.convert_tokens_to_ids(END)

    @torch.no_grad()
    def write(self, heat: Tensor, length: int) -> Texts:
        """One conversation of `length` tokens behind the start for each element of `heat`, its answers' temperature.

        Row 0 of `forced` begins an answer, each other one a question; of the first question only the opening is forced.
        """
        count, width = len(heat), self.forced.shape[1]
        new = self.start.expand(count, -1)
        cache = DynamicCache()
        in_answer = torch.zeros(count, dtype=torch.bool, device=new.device)
        turn = torch.randint(1, len(self.forced), (count,), device=new.device)
        to_force = self.first_lengths[turn]
        ids, is_answer, states = [new], [torch.zeros_like(new, dtype=torch.bool)], []
        for _ in range(length):
            states.append(self.model.model(new, past_key_values=cache).last_hidden_state)
            logits = self.model.lm_head(states[-1][:, -1]).float()
            heats = torch.where(in_answer, heat, QUESTION_HEAT)
            token = torch.multinomial((logits / heats[:, None]).softmax(-1), 1)[:, 0]
            is_forced = to_force > 0
            token = torch.where(is_forced, self.forced[turn, (width - to_force).clamp(0, width - 1)], token)
            is_answer.append((in_answer & ~is_forced)[:, None])
            ends = ~is_forced & (token == self.end)
            question = torch.randint(1, len(self.forced), (count,), device=new.device)
            turn = torch.where(ends, torch.where(in_answer, question, 0), turn)
            in_answer = torch.where(to_force == 1, turn == 0, in_answer)
            to_force = torch.where(ends, self.lengths[turn], (to_force - 1).clamp(0))
            new = token[:, None]
            ids.append(new)
        return Texts(torch.cat(ids, 1), torch.cat(is_answer, 1), torch.cat(states, 1))


class Mtp(nn.Module):
    """The MTP layer, begun from the model's last layer and norm; `fit_inputs` begins its other weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        width, epsilon = model.config.hidden_size, model.config.rms_norm_eps
        self.enorm, self.hnorm, self.head_norm = (LlamaRMSNorm(width, epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = LlamaDecoderLayer(model.config, 0)
        self.block.load_state_dict(model.model.layers[-1].state_dict())
        self.head_norm.load_state_dict(model.model.norm.state_dict())
        self.rotary = model.model.rotary_emb

    def forward(self, embedded: Tensor, states: list[Tensor]) -> list[Tensor]:
        """What the layer gives behind its norm for each depth; one depth more than it was given states of its own.

        embedded [batch, len, hidden] has the tokens 1 to len, states[0] the model's states of the tokens before them.
        """
        length = embedded.shape[1]
        depths = [self.hnorm(states[0])]
        depths += [self.hnorm(functional.pad(state, (0, 0, 1, -1))) for state in states[1:]]
        inputs = torch.cat([torch.cat([self.enorm(embedded), depth], -1) for depth in depths], 1)
        positions = torch.arange(1, length + 1, device=embedded.device).repeat(len(depths))[None]
        hidden = self.eh_proj(inputs)
        output = self.block(
            hidden,
            attention_mask=draft_mask(length, len(depths), hidden),
            position_embeddings=self.rotary(hidden, positions),
            position_ids=positions,
        )
        return list(self.head_norm(output).chunk(len(depths), 1))


def draft_mask(length: int, num_depths: int, like: Tensor) -> Tensor:
    """What each row sees: at depth k and position q the first rows up to q - k, and the chain that led to it."""
    place = torch.arange(length, device=like.device)
    behind = place[:, None] - place[None, :]
    rows = []
    for depth in range(num_depths):
        seen = [behind >= depth] + [behind == depth - other for other in range(1, depth + 1)]
        seen += [torch.zeros_like(behind, dtype=torch.bool)] * (num_depths - depth - 1)
        rows.append(torch.cat(seen, 1))
    visible = torch.cat(rows)
    visible |= torch.eye(len(visible), dtype=torch.bool, device=like.device)
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)[None, None]


@torch.no_grad()
def fit_inputs(model: LlamaForCausalLM, mtp: Mtp, texts: Texts) -> None:
    """Begin enorm and hnorm with channels of equal size, and eh_proj with the least-squares guess, over these texts,
    at what the model's last layer saw for the token."""
    seen = model.model(texts.ids[:, 1:-1], output_hidden_states=True).hidden_states[-2]
    sources = (model.model.embed_tokens(texts.ids[:, 1:-1]), texts.states[:, :-1])
    columns = []
    for norm, source in zip((mtp.enorm, mtp.hnorm), sources, strict=True):
        norm.weight.copy_(1 / norm(source.float()).square().mean((0, 1)).sqrt().clamp(1e-2))
        columns.append(norm(source.float()).flatten(0, 1).double())
    inputs = torch.cat(columns, 1)
    gram = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(inputs.shape[1], device=inputs.device)
    mtp.eh_proj.weight.copy_(torch.linalg.solve(gram, inputs.T @ seen.flatten(0, 1).double()).T)


def draft_states(model: LlamaForCausalLM, mtp: Mtp, texts: Texts, num_drafts: int) -> list[Tensor]:
    """What the layer gives for each draft for the tokens from 2 on, each [batch, len - 2, hidden]."""
    embedded = model.model.embed_tokens(texts.ids[:, 1:-1]).float()
    states = [texts.states[:, :-1].float()]
    with torch.autocast(embedded.device.type, torch.bfloat16, enabled=embedded.device.type == "cuda"):
        for _ in range(num_drafts):
            states.append(mtp(embedded, states)[-1])
    return states[1:]


def draft_loss(model: LlamaForCausalLM, mtp: Mtp, texts: Texts) -> Tensor:
    """A value with the gradient of the cross-entropy against the model's distribution, over the answers' tokens.

    The gradient at the logits is the difference of both distributions, so it goes straight to the layer's states and
    no logits are kept.
    """
    head = model.lm_head.weight
    chosen = texts.is_answer[:, 2:]
    with torch.no_grad():
        goal = functional.linear(texts.states[:, 1:][chosen], head).softmax(-1, dtype=torch.float32)
    losses = []
    for weight, states in zip(DRAFT_WEIGHTS, draft_states(model, mtp, texts, len(DRAFT_WEIGHTS)), strict=True):
        given = states[chosen]
        with torch.no_grad():
            excess = functional.linear(given.to(head.dtype), head).softmax(-1, dtype=torch.float32) - goal
            gradient = excess.to(head.dtype) @ head
        losses.append(weight * (given.float() * gradient.float()).sum() / len(given))
    return torch.stack(losses).sum()


@torch.no_grad()
def measure(model: LlamaForCausalLM, mtp: Mtp, texts: Texts) -> list[float]:
    """How often the first 1, 2, 3 drafts are all the model's best tokens, inside answers."""
    rights = torch.zeros(NUM_DRAFTS)
    count = 0
    for part in texts.parts(32):
        best = model.lm_head(part.states[:, 1:]).argmax(-1)
        width = best.shape[1] - NUM_DRAFTS + 1
        counted = torch.stack([part.is_answer[:, 2 + depth :][:, :width] for depth in range(NUM_DRAFTS)]).all(0)
        count += int(counted.sum())
        right = counted
        for depth, states in enumerate(draft_states(model, mtp, part, NUM_DRAFTS)):
            hits = model.lm_head(states.to(best.device, model.dtype)).argmax(-1) == best
            right = right & hits[:, depth:][:, :width]
            rights[depth] += int(right.sum())
    return [round(share, 4) for share in (rights / max(1, count)).tolist()]


class Clock:
    """Seconds since the start, and how much of the budget is used; without a budget none is ever used."""

    def __init__(self, budget: float | None) -> None:
        self.started = time.monotonic()
        self.budget = budget

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.started, 1)

    def used(self) -> float:
        return self.seconds / self.budget if self.budget else 0.0


def write_texts(writer: Writer, clock: Clock, args: argparse.Namespace) -> Texts:
    """Conversations in batches, until there are enough or the writing's share of the time is used."""
    batch = min(args.texts, args.write_batch)
    heat = torch.linspace(0.0, 1.0, batch, device=writer.start.device).square().clamp(GREEDY)
    parts: list[Texts] = []
    while len(parts) * batch < args.texts and (not parts or clock.used() < WRITING_SHARE):
        parts.append(writer.write(heat, args.length))
        share = parts[-1].is_answer.float().mean().item()
        print(f"{clock.seconds} s: wrote {len(parts) * batch} texts, {share:.0%} in answers", flush=True)
    return join(parts)


def train(
    model: LlamaForCausalLM, mtp: Mtp, texts: Texts, held: Texts, clock: Clock, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """AdamW with a cosine over the steps or the time left, whichever ends first; gives the log."""
    is_cuda = model.device.type == "cuda"
    optimiser = torch.optim.AdamW(mtp.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=is_cuda)
    log: list[dict[str, Any]] = []
    begun = clock.used()
    step, progress = 0, 0.0
    while progress < 1:
        if step % args.report == 0:
            rate = optimiser.param_groups[0]["lr"]
            log.append({"step": step, "seconds": clock.seconds, "rate": rate, "greedy": measure(model, mtp, held)})
            print(log[-1], flush=True)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * progress))
        loss = draft_loss(model, mtp, texts.rows(torch.randint(len(texts.ids), (args.batch,), device=model.device)))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(mtp.parameters(), 1.0)
        optimiser.step()
        step += 1
        progress = max(step / args.steps, (clock.used() - begun) / max(1e-9, 1 - begun))
    return log


@torch.no_grad()
def round_as_stored(mtp: Mtp) -> None:
    """Round the weights as the FP8 sample model keeps them: the block's projections in E4M3 by rows, the rest BF16."""
    for name, weight in mtp.named_parameters():
        if name.startswith("block.") and weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(1e-12) / 448
            weight.copy_((weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale)
        else:
            weight.copy_(weight.to(torch.bfloat16))


def save(mtp: Mtp, layer: int, path: Path) -> None:
    """Write the layer in BF16 under GLM's names, its MLP in one piece."""
    prefix = f"model.layers.{layer}"
    parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "head_norm": "shared_head.norm"}
    tensors = {f"{prefix}.{parts[name]}.weight": getattr(mtp, name).weight for name in parts}
    tensors |= {f"{prefix}.{name}": value for name, value in mtp.block.state_dict().items()}
    save_file({name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}, path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of the sample model (default: the FP8 one in the cache)")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write; the log goes beside it")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, help="stop by then, with the rate at its end (default: no limit)")
    parser.add_argument("--texts", type=int, default=49152, help="conversations to write, at most")
    parser.add_argument("--write-batch", type=int, default=3072, help="conversations written at a time")
    parser.add_argument("--length", type=int, default=288, help="tokens of each behind the common start")
    parser.add_argument("--steps", type=int, default=20000, help="training steps, at most")
    parser.add_argument("--batch", type=int, default=32, help="conversations of a step")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--report", type=int, default=500, help="steps from one report to the next")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write texts, train, save, measure what was saved."""
    args = parse_arguments()
    clock = Clock(args.seconds)
    torch.manual_seed(args.seed)
    folder = args.model or make_sample_model("fp8")
    model = load_model(folder, args.device)
    writer = Writer(model, folder)
    texts = write_texts(writer, clock, args)
    heats = {"greedy": GREEDY, "temperature 0.7": 0.7}
    count = min(len(texts.ids), 256)
    held = {
        name: writer.write(torch.full((count,), heat, device=model.device), args.length) for name, heat in heats.items()
    }
    mtp = Mtp(model).to(args.device).float()
    fit_inputs(model, mtp, texts.rows(slice(0, None, max(1, len(texts.ids) // 256))))
    log: dict[str, Any] = {
        "arguments": {
            name: getattr(value, "name", str(value)) for name, value in {**vars(args), "model": folder}.items()
        }
    }
    log["texts"] = len(texts.ids)
    log["training"] = train(model, mtp, texts, held["greedy"], clock, args)
    save(mtp, model.config.num_hidden_layers, args.out)
    log["first drafts right"] = {name: measure(model, mtp, part) for name, part in held.items()}
    round_as_stored(mtp)
    log["first drafts right, FP8"] = {name: measure(model, mtp, part) for name, part in held.items()}
    log["seconds"] = clock.seconds
    print({name: value for name, value in log.items() if name.startswith("first")}, clock.seconds, "s")
    args.out.with_suffix(".json").write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
