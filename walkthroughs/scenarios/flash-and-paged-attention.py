"""A prompt by FlashAttention, a decode in pages, and a mixed batch by the engine's kernels.

Triton interprets all kernels here: they are Python, and a debugger stops in them.

The lab's part is 40 random tokens of 4 query heads and 2 key heads, 16 wide. The engine's part is
the embedded model (8 query heads, 2 key heads, 32 wide), whose blocks hold 16 tokens:

    a      prompt of 76 tokens, 3 output tokens
    b      the first 32 tokens of a's prompt and 9 of its own, 1 output token
    c      prompt of 20 tokens, 1 output token

    step   a         b              c
    1      76 new                                 set-up, not recorded
    2      1         9 after 32     20 new
    3      1
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

import torch

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.inputs import TokensPrompt
from nanovllm.lab.flash_attention import FlashAttentionConfig, attention_reference, flash_attention
from nanovllm.lab.memory_traffic import (
    AttentionShape,
    DecodeShape,
    Traffic,
    attention_flash,
    attention_unfused,
    decode_gathered,
    decode_head_by_head,
    decode_paged,
)
from nanovllm.lab.paged_decode import PagedDecodeConfig, paged_decode
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from nanovllm.v1.engine.llm_engine import LLMEngine
from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 40, 4, 2, 16
BLOCK_SIZE, BLOCK_TABLE = 8, [6, 2, 5, 1, 4]  # of the lab's decode
A = list(range(300, 376))
PROMPTS = {"a": A, "b": A[:32] + list(range(500, 509)), "c": list(range(600, 620))}
MAX_TOKENS = {"a": 3, "b": 1, "c": 1}
# Qwen3-0.6B's heads in bfloat16, the sizes of the measurements.
PREFILL = AttentionShape(1, 8192, num_heads=16, num_kv_heads=8, head_size=128, itemsize=2)
DECODE = DecodeShape([1096] * 256, num_heads=16, num_kv_heads=8, head_size=128, itemsize=2)


def make_engine(attention_backend: str) -> LLMEngine:
    """With a's prompt computed and its first token sampled."""
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            device="cpu",
            enforce_eager=True,
            attention_backend=attention_backend,
            block_size=16,
            num_gpu_blocks_override=16,
            max_model_len=192,
            max_num_batched_tokens=192,
            max_num_seqs=4,
        )
    )
    add_request(engine, "a")
    engine.step()
    return engine


def add_request(engine: LLMEngine, req_id: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS[req_id], ignore_eos=True)
    engine.add_request(req_id, TokensPrompt(prompt_token_ids=PROMPTS[req_id]), params)


def finish(engine: LLMEngine) -> dict[str, list[int]]:
    """Let b and c come, and run until all have ended."""
    add_request(engine, "b")
    add_request(engine, "c")
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


def runner_of(engine: LLMEngine) -> GPUModelRunner:
    return engine.engine_core.engine_core.model_executor.model_runner


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def in_pages() -> torch.Tensor:
    """k and v dealt out to the blocks of BLOCK_TABLE; all else in the cache is NaN."""
    kv_cache = torch.full((7, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE), float("nan"))
    for i, block in enumerate(BLOCK_TABLE):
        tokens = slice(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)
        kv_cache[block] = torch.stack((k[0, tokens], v[0, tokens]))
    return kv_cache


def prefill_traffic() -> tuple[Traffic, Traffic]:
    return attention_unfused(PREFILL), attention_flash(PREFILL, block_m=128, block_n=64)


def decode_traffic() -> tuple[Traffic, Traffic, Traffic]:
    return decode_gathered(DECODE), decode_head_by_head(DECODE), decode_paged(DECODE)


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x - expected).norm() / expected.norm()).item()


def padded_to(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer 0's attention on the last batch, in the rows of a CUDA graph of this size."""
    runner = runner_of(engine)
    common = runner._common_attn_metadata(size, size, max_query_len=1)
    metadata = runner.attn_metadata_builder.build_for_cudagraph_capture(common)
    query, key_value = random(size, 8, 32), random(size, 2, 32)
    output = torch.full_like(query, float("nan"))
    impl = TritonAttentionImpl(8, 32, 32**-0.5, 2)
    impl.forward(query, key_value, key_value, runner.kv_caches[0], metadata, output)
    return metadata.query_start_loc, metadata.seq_lens, output


generator = torch.Generator().manual_seed(3)
q = random(1, NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
k = random(1, NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE)
v = random(1, NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE)
kv_cache = in_pages()
expected_tokens = finish(make_engine("CPU_ATTN"))
engine = make_engine("TRITON_ATTN")
# Dense prompts are for GPUs; here torch's CPU attention stands in. A GPU has 2048.
runner_of(engine).attn_metadata_builder.dense_multiple = 16


def main() -> None:
    expected = attention_reference(q, k, v)
    written, tiled = prefill_traffic()
    print(f"prompt: {written.ratio:.0f} and {tiled.ratio:.1f} times the bytes needed")
    out = flash_attention(q, k, v, config=FlashAttentionConfig(16, 16, 4, 1))
    print("FlashAttention is off by", relative_error(out, expected))
    table = torch.tensor([BLOCK_TABLE], dtype=torch.int32)
    seq_lens = torch.tensor([NUM_TOKENS], dtype=torch.int32)
    config = PagedDecodeConfig(block_n=16, num_splits=2, num_warps=4, num_stages=1)
    last = paged_decode(q[:, -1], kv_cache, table, seq_lens, config=config)
    print("and its last row in pages by", relative_error(last, expected[:, -1]))
    copied, by_head, shared = decode_traffic()
    print(f"decode: {copied.ratio:.1f}, {by_head.ratio:.1f}, {shared.ratio:.2f} times the bytes")
    tokens = finish(engine)
    print(f"tokens {tokens}, the same as CPU_ATTN's: {tokens == expected_tokens}")
    query_start_loc, context_lens, output = padded_to(4)
    written_rows = (~output.isnan()).all(-1).all(-1).tolist()
    print(f"padded: {query_start_loc.tolist()}, {context_lens.tolist()}, written {written_rows}")


if __name__ == "__main__":
    main()
