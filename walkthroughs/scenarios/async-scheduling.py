"""The same two requests, served by a synchronous engine core and by one that plans ahead.

    a      prompt of 6 tokens, at most 8 output tokens, but its 4th is a stop token
    b      prompt of 5 tokens, 3 output tokens

The stop token is made irresistible by a logit bias and kept back by min_tokens, so that it is a's
fourth token whatever the model would write.
"""

from __future__ import annotations

from typing import Any

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.inputs import TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine.llm_engine import LLMEngine

STOP = 7
PROMPTS = {"a": range(300, 306), "b": range(400, 405)}
PARAMS = {
    "a": SamplingParams(
        temperature=0, max_tokens=8, min_tokens=3, stop_token_ids=[STOP], logit_bias={STOP: 100.0}
    ),
    "b": SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
}


def make_engine(async_scheduling: bool) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            device="cpu",
            enforce_eager=True,
            block_size=4,
            num_gpu_blocks_override=12,
            max_model_len=32,
            async_scheduling=async_scheduling,
        )
    )


ENGINES = {"sync": make_engine(False), "async": make_engine(True)}


def serve(engine: LLMEngine) -> tuple[list[dict[str, int]], dict[str, list[int]]]:
    """What each call of the core's step handed out, in tokens, and the tokens of each request."""
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    for req_id, prompt in PROMPTS.items():
        engine.add_request(req_id, TokensPrompt(prompt_token_ids=list(prompt)), PARAMS[req_id])
    calls: list[dict[str, int]] = []
    tokens: dict[str, list[int]] = {req_id: [] for req_id in PROMPTS}
    while core.scheduler.has_requests() or core.batch_queue:
        outputs = core.step_fn().outputs
        calls.append({output.request_id: len(output.new_token_ids) for output in outputs})
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
    return calls, tokens


def main() -> None:
    results = {name: serve(engine) for name, engine in ENGINES.items()}
    compare(
        {name: calls for name, (calls, _) in results.items()},
        {name: tokens for name, (_, tokens) in results.items()},
    )


def compare(calls: dict[str, Any], tokens: dict[str, Any]) -> None:
    for name in calls:
        print(f"{name:6}", *calls[name], sep="  ")
    print("same tokens:", tokens["sync"] == tokens["async"])


if __name__ == "__main__":
    main()
