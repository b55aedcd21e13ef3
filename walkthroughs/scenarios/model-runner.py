"""Five steps of the embedded model on the CPU, three requests in and out of two rows.

A block holds 4 tokens, a step computes at most 8.

    a      prompt of 5 tokens, 2 output tokens
    b      prompt of 16 tokens, 3 output tokens
    c      prompt of 2 tokens, 1 output token

    step   a          b           c
    1      5, sample  3
    2      1, sample  7
    3                 6, sample   2, sample
    4                 1, sample
    5                 1, sample

After it, what a GPU does that records CUDA graphs: a runner without a model, whose dispatcher
believes that its graphs have been recorded, prepares 3 requests for the graph of 4.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.inputs import TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.cudagraph_dispatcher import CudagraphDispatcher, get_cudagraph_capture_sizes
from nanovllm.v1.engine.llm_engine import LLMEngine
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner

PROMPTS = {"a": range(300, 305), "b": range(400, 416), "c": range(500, 502)}
MAX_TOKENS = {"a": 2, "b": 3, "c": 1}

engine = LLMEngine.from_engine_args(
    EngineArgs(
        device="cpu",
        enforce_eager=True,
        block_size=4,
        num_gpu_blocks_override=12,
        max_model_len=32,
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
)

graph_config = EngineArgs(
    device="cpu", block_size=4, max_model_len=32, max_num_batched_tokens=64, max_num_seqs=64
).create_engine_config()


def dispatch() -> None:
    """The graph that a batch replays, by its requests and the longest query among them."""
    runner = GPUModelRunner(graph_config, torch.device("cpu"))
    dispatcher = CudagraphDispatcher(get_cudagraph_capture_sizes(runner.max_num_reqs, None))
    dispatcher.entries = dict.fromkeys(dispatcher.capture_sizes)  # type: ignore[assignment]
    for num_reqs, max_query_len in ((1, 1), (13, 1), (64, 1), (13, 7)):
        print(num_reqs, max_query_len, dispatcher.dispatch(num_reqs, max_query_len))

    runner.cudagraph_dispatcher = dispatcher
    for row in range(3):
        runner.input_batch.block_table.add_row([row + 1], row)
        runner.input_batch.num_computed_tokens_cpu[row] = 2
    runner._prepare_inputs(np.ones(3, dtype=np.int32))


def main() -> None:
    for req_id, prompt in PROMPTS.items():
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS[req_id], ignore_eos=True)
        engine.add_request(req_id, TokensPrompt(prompt_token_ids=list(prompt)), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].token_ids)
    dispatch()


if __name__ == "__main__":
    main()
