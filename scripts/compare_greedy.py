"""How close greedy tokens in bfloat16 come to transformers': ours, and vLLM's for comparison.

    python scripts/compare_greedy.py --engine nanovllm --model CHECKPOINT --tokens ours.json
    python scripts/compare_greedy.py --engine vllm --model CHECKPOINT --tokens vllm.json
    python scripts/compare_greedy.py --model CHECKPOINT --compare ours.json vllm.json

bfloat16 keeps 8 bits, so the sum of a long dot product depends on its order, and two engines part
sooner or later where two tokens are about equally likely. What can be compared is where they part
from transformers, and by how much: transformers runs over each engine's tokens, and at the first
one that it would not have chosen itself the gap is its own best logit less that token's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from bench_common import OfflineEngine, random_tokens

PROMPT_LEN = 32


def make_prompts(num_prompts: int) -> list[list[int]]:
    rng = random.Random(7)
    return [random_tokens(rng, PROMPT_LEN) for _ in range(num_prompts)]


def generate(args: argparse.Namespace) -> None:
    engine = OfflineEngine(args.engine, args, max_model_len=1024)
    prompts = make_prompts(args.num_prompts)
    tokens = engine.generate(prompts, [args.output_len] * len(prompts), 0.0)
    Path(args.tokens).write_text(json.dumps({"engine": args.engine, "tokens": tokens}))


def compare(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to("cuda").eval()
    for path in args.compare:
        result = json.loads(Path(path).read_text())
        prompts = make_prompts(len(result["tokens"]))
        ids = torch.tensor(
            [p + t for p, t in zip(prompts, result["tokens"], strict=True)], device="cuda"
        )
        with torch.inference_mode():
            logits = model(ids).logits[:, PROMPT_LEN - 1 : -1].float()
        chosen = ids[:, PROMPT_LEN:]
        gaps = logits.amax(-1) - logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        parted = gaps > 0
        firsts = [int(row.nonzero()[0]) if row.any() else None for row in parted]
        gaps_at_first = [float(gaps[i, f]) for i, f in enumerate(firsts) if f is not None]
        print(
            json.dumps(
                {
                    "engine": result["engine"],
                    "tokens": chosen.numel(),
                    "not transformers' choice": int(parted.sum()),
                    "sequences that part": len(gaps_at_first),
                    "first at (median)": statistics.median(
                        f if f is not None else chosen.shape[1] for f in firsts
                    ),
                    "gap there (median, largest)": [
                        round(statistics.median(gaps_at_first or [0.0]), 4),
                        round(max(gaps_at_first, default=0.0), 4),
                    ],
                    "spread of logits (std)": round(float(logits.std()), 3),
                }
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=("nanovllm", "vllm"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", help="file to write an engine's tokens to")
    parser.add_argument("--compare", nargs="+", help="files of tokens to compare")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--engine-args", default="{}", help="JSON, further arguments of LLM(...)")
    args = parser.parse_args()
    if args.engine:
        generate(args)
    if args.compare:
        compare(args)


if __name__ == "__main__":
    main()
