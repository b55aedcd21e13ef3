"""Three published models on paper, then two requests of the embedded model beside their counts."""

from __future__ import annotations

from nanovllm import LLM, SamplingParams
from nanovllm.inputs import TokensPrompt
from nanovllm.trace import trace
from nanovllm.trace.text import TraceView, make_console
from nanovllm.v1.metrics import perf
from nanovllm.v1.metrics.hardware import HARDWARE, Hardware
from nanovllm.v1.metrics.perf import PUBLISHED, ExecutionContext, ModelMetrics

QWEN, LLAMA = PUBLISHED["qwen3-0.6b"], PUBLISHED["llama-2-7b"]
H200 = HARDWARE["h200"]
PROMPT, CONTEXT, BLOCK_SIZE = 512, 2048, 16
BATCHES = (1, 8, 32, 128, 512)
# Round numbers, made up: what this machine reaches differs from machine to machine.
LAPTOP = Hardware("laptop", 16 << 30, 50e9, {"bfloat16": 500e9, "float32": 500e9}, "made up")

llm = LLM(
    device="cpu",
    dtype="float32",
    enforce_eager=True,
    block_size=4,
    num_gpu_blocks_override=12,
    max_model_len=32,
)
WARM_UP = SamplingParams(temperature=0, max_tokens=1)
llm.generate(TokensPrompt(prompt_token_ids=[1]), WARM_UP, use_tqdm=False)  # the first step is slow


def decode(batch_size: int, context_len: int) -> ExecutionContext:
    """Every request computes the last token of its context."""
    return ExecutionContext.from_lens([1] * batch_size, [context_len] * batch_size)


def memory() -> None:
    print("parameters", perf.num_params(QWEN))
    for dtype in ("bfloat16", "fp8", "int4"):
        weights = sum(perf.weight_bytes(QWEN, dtype).values())
        print(f"{dtype}: {weights:,} bytes of weights")
    for shape in (QWEN, LLAMA, PUBLISHED["llama-2-70b"]):
        print(shape.name, perf.kv_bytes_per_token(shape, "bfloat16"), "bytes a token")
    capacity = perf.kv_cache_capacity(
        BLOCK_SIZE * perf.kv_bytes_per_token(QWEN, "bfloat16"),
        BLOCK_SIZE,
        int(H200.memory_bytes * 0.92),
        sum(perf.weight_bytes(QWEN, "bfloat16").values()),
        perf.activation_bytes(QWEN, "bfloat16", num_tokens=8192, num_seqs=1024),
    )
    print(capacity, "requests of", CONTEXT, "tokens:", capacity.num_tokens // CONTEXT)


def steps() -> None:
    metrics = ModelMetrics(QWEN)
    prompt, token = ExecutionContext.from_lens([PROMPT], [PROMPT]), decode(1, CONTEXT)
    metrics.get_num_flops_breakdown(prompt)
    ModelMetrics(LLAMA).get_num_flops_breakdown(prompt)
    metrics.get_read_bytes_breakdown(token)
    for ctx in (prompt, token):
        seconds = sum(kernel.seconds for kernel in perf.roofline(metrics, ctx, H200))
        print(f"{ctx.total_num_tokens()} tokens: {seconds * 1e6:.1f} us")
    for batch_size in BATCHES:
        kernels = perf.roofline(metrics, decode(batch_size, CONTEXT), H200)
        seconds = sum(kernel.seconds for kernel in kernels)
        print(f"decode, batch {batch_size}: {batch_size / seconds:,.0f} tokens/s")
    print(metrics.get_step_perf_stats_per_gpu(decode(256, 1096)))


def live() -> None:
    prompts = [TokensPrompt(prompt_token_ids=list(range(300, 300 + n))) for n in (12, 3)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    run = trace(llm, prompts, params)
    view = TraceView(make_console())
    view.print_header(run.engine, LAPTOP)
    for step in run:
        view.print_step(step)


def main() -> None:
    memory()
    steps()
    live()
    gpt3 = PUBLISHED["gpt3-175b"]
    print(perf.training_flops(gpt3, num_tokens=300 * 10**9, seq_len=2048))
    print(perf.training_memory(gpt3, batch_size=1, seq_len=2048))


if __name__ == "__main__":
    main()
