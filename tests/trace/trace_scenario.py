"""A run worked out by hand: a chunk, a prefix hit, a preemption, evictions, a resumption.

Blocks of 4 tokens, 7 of them; 8 tokens a step. Prompts are token ids, so nothing depends on a
tokenizer, and no decision on what the random weights sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams

BLOCK_SIZE = 4
ENGINE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 8,
    "max_model_len": 28,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
    "device": "cpu",
}
PROMPT_A = list(range(10, 20))
PROMPTS = [{"prompt_token_ids": ids} for ids in (PROMPT_A, [*PROMPT_A[:8], 50, 51])]
ARRIVALS = [0, 2]
MAX_TOKENS = 12

# Step by step: who computes how many tokens, and what becomes of the blocks.
EXPECTED = """\
1: A 8
   allocate A 1 2 (8 tokens)       the first chunk
   store A 1 2 (8 tokens)
2: A 2
   allocate A 3 (2 tokens)         position 8 and 9; the first token is sampled
3: A 1, B 2
   hit B 1 2 (8 tokens)            B has arrived; 8 of its 10 tokens are A's
   allocate B 4 (2 tokens)
4: A 1, B 1
   store A 3 (4 tokens)            position 11 fills it
5: A 1, B 1
   allocate A 5 (1 tokens)
   store B 4 (4 tokens)
6: A 1, B 1
   allocate B 6 (1 tokens)
7: A 1, B 1
8: A 1, B 1
   store A 5 (4 tokens)
9: A 1, B 1
   allocate A 7 (1 tokens)         the last free block
   store B 6 (4 tokens)
10: A 1
   preempt B 1 2 4 6 (16 tokens)   B needs a fifth block and is last in line itself
11: A 1                            B's 4 blocks are cached, yet there is none left for the fifth
12: A 1
   store A 7 (4 tokens)
13: A 1
   evict A 6 (4 tokens)            B's tail goes first
   allocate A 6 (1 tokens)
   finish A 1 2 3 5 7 6 (12 tokens)
14: B 5
   hit B 1 2 4 (12 tokens)         17 tokens less 12
   evict B 7 (4 tokens)
   allocate B 6 7 (5 tokens)
   store B 6 (4 tokens)
15: B 1
16: B 1
17: B 1
   store B 7 (4 tokens)
18: B 1
   evict B 5 (4 tokens)
   allocate B 5 (1 tokens)
   finish B 1 2 4 6 7 5 (12 tokens)
"""


def make_llm(folder: Path, **engine_args: Any) -> LLM:
    return LLM(str(folder), **(ENGINE | engine_args))


def make_params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(
        **({"max_tokens": MAX_TOKENS, "temperature": 0.0} | kwargs), ignore_eos=True
    )


def expected_lines() -> list[str]:
    """EXPECTED without its remarks."""
    return [
        line.split("   ")[0] if line[0] != " " else _event(line) for line in EXPECTED.splitlines()
    ]


def _event(line: str) -> str:
    return line[: line.index(")") + 1]
