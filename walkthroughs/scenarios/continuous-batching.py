"""Three requests, served with three settings of the budget.

a      prompt of 4 tokens, 8 output tokens, arrives at step 1
b      prompt of 20 tokens, 3 output tokens, arrives at step 2
c      prompt of 12 tokens, 2 output tokens, arrives at step 2, after b

small       at most 8 tokens a step: b's prompt is computed in chunks
large       at most 64 tokens a step: prompts are computed whole
unchunked   at most 32 tokens a step, chunked prefill off
"""

from __future__ import annotations

from typing import Any

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.inputs import TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine.llm_engine import LLMEngine

# request: arrives before step, prompt, output tokens
REQUESTS = {
    "a": (1, range(300, 304), 8),
    "b": (2, range(400, 420), 3),
    "c": (2, range(500, 512), 2),
}


def make_engine(**settings: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            device="cpu",
            enforce_eager=True,
            block_size=4,
            num_gpu_blocks_override=24,
            max_model_len=32,
            max_num_seqs=4,
            **settings,
        )
    )


ENGINES = {
    "small": make_engine(max_num_batched_tokens=8),
    "large": make_engine(max_num_batched_tokens=64),
    "unchunked": make_engine(max_num_batched_tokens=32, enable_chunked_prefill=False),
}


def serve(engine: LLMEngine) -> tuple[list[dict[str, int]], dict[str, list[int]]]:
    """What each step computed, by request, and the tokens of each."""
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    steps: list[dict[str, int]] = []
    tokens: dict[str, list[int]] = {}
    to_come = dict(REQUESTS)
    while to_come or engine.has_unfinished_requests():
        for req_id in [r for r, (arrives, _, _) in to_come.items() if arrives <= len(steps) + 1]:
            _, prompt, max_tokens = to_come.pop(req_id)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(req_id, TokensPrompt(prompt_token_ids=list(prompt)), params)
        before = {r.request_id: r.num_computed_tokens for r in scheduler.requests.values()}
        requests = list(scheduler.requests.values())
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        computed = {r.request_id: r.num_computed_tokens - before[r.request_id] for r in requests}
        steps.append({req_id: n for req_id, n in computed.items() if n})
    return steps, tokens


def main() -> None:
    results = {name: serve(engine) for name, engine in ENGINES.items()}
    compare(
        {name: steps for name, (steps, _) in results.items()},
        {name: tokens for name, (_, tokens) in results.items()},
    )


def compare(steps: dict[str, Any], tokens: dict[str, Any]) -> None:
    for name in steps:
        print(f"{name:10}", *steps[name], sep="  ")
    print("same tokens:", tokens["small"] == tokens["large"] == tokens["unchunked"])


if __name__ == "__main__":
    main()
