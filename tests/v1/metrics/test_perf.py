"""The arithmetic of perf.py against what is really allocated, computed and published."""

from __future__ import annotations

import subprocess
import sys
import time
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_backend import DenseBackend, load, make_config, make_prompts
from dense_backend import save_random_checkpoint as save
from hypothesis import given
from hypothesis import strategies as st
from test_models import CONFIGS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, MixtralConfig, PretrainedConfig

from nanovllm import LLM, SamplingParams
from nanovllm.config import load_hf_config
from nanovllm.engine.arg_utils import resolve_model
from nanovllm.exceptions import VLLMValidationError
from nanovllm.model_executor.model_loader.default_loader import initialize_model
from nanovllm.model_executor.models.registry import ModelRegistry
from nanovllm.trace import trace
from nanovllm.v1.metrics import perf
from nanovllm.v1.metrics.hardware import HARDWARE, Hardware, get_hardware, measure_hardware
from nanovllm.v1.metrics.perf import PUBLISHED, ExecutionContext, ModelMetrics, ModelShape
from tests.entrypoints.tiny_checkpoint import save_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("model")))


# ---- parameters: those of the real models ------------------------------------------------------

# Part -> what the engine's parameters of it have in their names.
PARTS = {
    ("embedding",): ("embed_tokens", "wte"),
    ("positions",): ("wpe",),
    ("q_proj", "k_proj", "v_proj"): ("qkv_proj", "c_attn"),
    ("o_proj",): ("o_proj", "attn.c_proj"),
    ("gate_proj", "up_proj"): ("gate_up_proj", "c_fc"),
    ("down_proj",): ("down_proj", "mlp.c_proj"),
    ("norms",): ("norm", "ln_"),
    ("lm_head",): ("lm_head",),
}


def architecture(config: PretrainedConfig) -> str:
    name = type(config).__name__.removesuffix("Config")
    return name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM")


def assert_counts_are_exact(folder: Path | str) -> None:
    config = make_config(Path(folder))
    model = initialize_model(config, DenseBackend, torch.device("meta"))
    real = {name: p.numel() for name, p in model.named_parameters()}
    ours = perf.num_params(ModelShape.from_hf_config(config.model_config.hf_config))
    assert sum(ours.values()) == sum(real.values())
    for parts, names in PARTS.items():
        assert sum(ours.get(part, 0) for part in parts) == sum(
            count for name, count in real.items() if any(n in name for n in names)
        ), parts


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_to_the_last_one(name: str, tmp_path: Path) -> None:
    config = copy(CONFIGS[name])
    config.architectures = [architecture(config)]
    config.save_pretrained(tmp_path)
    assert_counts_are_exact(tmp_path)


def test_parameters_of_the_embedded_model_are_counted_to_the_last_one() -> None:
    assert_counts_are_exact(resolve_model("tiny-stories"))


def test_every_supported_architecture_is_among_those_counted() -> None:
    counted = {architecture(config) for config in CONFIGS.values()}
    assert counted == set(ModelRegistry.get_supported_archs())


def test_another_architecture_is_refused_by_name() -> None:
    with pytest.raises(VLLMValidationError, match="'mixtral' cannot be estimated"):
        ModelShape.from_hf_config(MixtralConfig())


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "qwen3-0.6b", "smollm2-135m"])
def test_a_published_shape_is_the_one_that_transformers_builds(name: str) -> None:
    """Its sizes, given to transformers' own model on the meta device, make as many parameters."""
    from transformers import AutoModelForCausalLM

    shape = PUBLISHED[name]
    config = AutoConfig.for_model(
        "qwen3" if shape.qk_norm else "llama",
        **{
            field: getattr(shape, field)
            for field in (
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "intermediate_size",
                "vocab_size",
                "max_position_embeddings",
                "tie_word_embeddings",
            )
        },
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(perf.num_params(shape).values()) == sum(p.numel() for p in model.parameters())


# ---- bytes: those of a live engine -------------------------------------------------------------


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, checkpoint: str) -> LLM:
    return LLM(
        checkpoint,
        device="cpu",
        dtype=request.param,
        block_size=4,
        kv_cache_memory_bytes=1_000_003,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )


def live_metrics(llm: LLM, **kwargs: Any) -> ModelMetrics:
    model_config = llm.llm_engine.vllm_config.model_config
    dtype = str(model_config.torch_dtype).removeprefix("torch.")
    return ModelMetrics(ModelShape.from_hf_config(model_config.hf_config), dtype, **kwargs)


def engine_core(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def test_weight_bytes_are_those_the_engine_has_allocated(llm: LLM) -> None:
    model = engine_core(llm).model_executor.model_runner.model
    allocated = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(live_metrics(llm).weights.values()) == allocated


def test_kv_bytes_and_capacity_are_those_the_engine_has_allocated(llm: LLM) -> None:
    """A slot's bytes, the blocks that the budget buys, and the tokens that they hold."""
    metrics = live_metrics(llm)
    cache_config = llm.llm_engine.vllm_config.cache_config
    kv_caches = engine_core(llm).model_executor.model_runner.kv_caches
    per_token = perf.kv_bytes_per_token(metrics.shape, metrics.cache_dtype)
    num_slots = cache_config.num_gpu_blocks * cache_config.block_size
    assert sum(cache.nbytes for cache in kv_caches) == num_slots * per_token

    capacity = perf.kv_cache_capacity(4 * per_token, 4, 1_000_003 + 100 + 20, 100, 20)
    assert capacity.available_bytes == 1_000_003
    assert capacity.num_blocks == cache_config.num_gpu_blocks
    block_pool = engine_core(llm).scheduler.kv_cache_manager.block_pool
    assert capacity.num_tokens == 4 * block_pool.get_num_free_blocks()


def test_nothing_fits_where_weights_do_not() -> None:
    capacity = perf.kv_cache_capacity(64, 4, 1000, 900, 200)
    assert (capacity.available_bytes, capacity.num_blocks, capacity.num_tokens) == (-100, 0, 0)


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_quantized_matrices_take_their_bits_and_their_scales(name: str) -> None:
    shape = PUBLISHED[name]
    parts, fp8, int4 = (perf.weight_bytes(shape, d) for d in ("bfloat16", "fp8", "int4"))
    for linear in perf.layer_linears(shape):
        n, m, layers = linear.in_features, linear.out_features, shape.num_hidden_layers
        bias = 2 * m if linear.bias else 0
        assert fp8[linear.name] == layers * (n * m + 4 * m + bias)
        assert int4[linear.name] == layers * (n * m // 2 + 2 * m * -(-n // 128) + bias)
    for rest in ("embedding", "positions", "norms", "lm_head"):
        assert fp8[rest] == int4[rest] == parts[rest]


# ---- operations: those that torch counts -------------------------------------------------------


def counted(call: Any) -> int:
    """Operations of all matrix products, by torch's own count. Fused attention has none on a CPU,
    so attention is made to multiply whole matrices."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", ["llama", "llama with biases", "mistral", "qwen2", "qwen3", "gpt2", "tiny-stories"]
)
def test_operations_of_a_forward_pass_are_those_that_torch_counts(
    name: str, tmp_path: Path
) -> None:
    """Within 1%, where the whole score matrix is computed. What the causal mask leaves of it is
    half, and half of the diagonal more."""
    folder = Path(resolve_model(name)) if name not in CONFIGS else tmp_path
    if name in CONFIGS:
        save(folder, CONFIGS[name])
    model, prompts = load(folder), make_prompts()
    lens = [len(prompt) for prompt in prompts]
    positions = torch.cat([torch.arange(n) for n in lens])
    last = torch.tensor(lens).cumsum(0) - 1

    @torch.no_grad()
    def forward() -> None:
        hidden = model(torch.cat(prompts), positions, [torch.empty(0)] * 64, lens)
        model.compute_logits(hidden[last])

    shape = ModelShape.from_hf_config(load_hf_config(str(folder)))
    ctx = ExecutionContext.from_lens(lens, lens)
    whole = ModelMetrics(shape, "float32", causal=False).get_num_flops(ctx)
    assert counted(forward) == pytest.approx(whole, rel=0.01)

    causal = ModelMetrics(shape, "float32").get_num_flops(ctx)
    hidden_pairs = sum(n * (n - 1) // 2 for n in lens)
    assert whole - causal == 4 * shape.q_size * shape.num_hidden_layers * hidden_pairs


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 16])
def test_operations_of_a_live_engine_are_those_that_torch_counts(
    llm: LLM, num_prompt_tokens: int
) -> None:
    """A prefill and three decodes over the paged cache."""
    prompt = {"prompt_token_ids": list(range(5, 5 + num_prompt_tokens))}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    metrics = live_metrics(llm, causal=False)
    steps = [(num_prompt_tokens, num_prompt_tokens)]
    steps += [(1, num_prompt_tokens + i) for i in (1, 2, 3)]
    expected = sum(metrics.get_num_flops(ExecutionContext.from_lens([q], [s])) for q, s in steps)
    params.skip_reading_prefix_cache = True
    got = counted(lambda: llm.generate(prompt, params, use_tqdm=False))
    assert got == pytest.approx(expected, rel=0.01)


# ---- steps -------------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda x: (x[0], x[0] + x[1])),
    min_size=1,
    max_size=8,
)


@given(requests)
def test_causal_pairs_are_what_a_mask_leaves(batch: list[tuple[int, int]]) -> None:
    """A query at position p of its request sees p + 1 keys."""
    ctx = ExecutionContext.from_lens(*zip(*batch, strict=True))
    seen = sum(p + 1 for n, context in batch for p in range(context - n, context))
    assert ctx.causal_pairs == seen
    assert ctx.total_num_tokens() == sum(n for n, _ in batch)
    assert ctx.total_context_len() == sum(context for _, context in batch)
    assert ctx.total_token_context_product() == sum(n * context for n, context in batch)
    assert ctx.num_logits_tokens() == ctx.num_reqs == len(batch)


@given(requests)
def test_work_adds_up_but_for_the_weights(batch: list[tuple[int, int]]) -> None:
    """Two batches in one step compute and write what they do apart; only the weights, read once
    instead of twice, are saved. That is why one batches."""
    metrics = ModelMetrics(PUBLISHED["smollm2-135m"])
    one = ExecutionContext.from_lens(*zip(*batch, strict=True))
    both = ExecutionContext.from_lens(*zip(*batch * 2, strict=True))
    assert metrics.get_num_flops(both) == 2 * metrics.get_num_flops(one)
    assert metrics.get_write_bytes(both) == 2 * metrics.get_write_bytes(one)
    saved = 2 * metrics.get_read_bytes(one) - metrics.get_read_bytes(both)
    assert saved == sum(metrics.weights.values())  # the head is the embedding


@pytest.mark.parametrize("name", [*PUBLISHED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int4"])
def test_every_weight_but_the_looked_up_tables_is_read_in_every_step(name: str, dtype: str) -> None:
    metrics = ModelMetrics(PUBLISHED[name], dtype)
    w = metrics.weights
    tables = w["positions"] + (0 if metrics.shape.tie_word_embeddings else w["embedding"])
    assert metrics.get_read_bytes(ExecutionContext()) == sum(w.values()) - tables
    assert metrics.get_write_bytes(ExecutionContext()) == 0


def test_keys_and_values_of_the_context_are_read_once(llm: LLM) -> None:
    """One more token of context costs its key and value, and nothing else."""
    metrics = ModelMetrics(PUBLISHED["llama-2-70b"], "fp8", cache_dtype="fp8")
    short, long = (ExecutionContext.from_lens([1], [n]) for n in (1000, 1001))
    per_token = perf.kv_bytes_per_token(metrics.shape, "fp8")
    assert metrics.get_read_bytes(long) - metrics.get_read_bytes(short) == per_token
    assert metrics.get_write_bytes(long) == metrics.get_write_bytes(short)


def test_a_scheduled_step_counts_as_the_batch_that_the_model_gets(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decodes and new requests in one step: from SchedulerOutput as from the packed
    batch."""
    planned: list[ExecutionContext] = []
    scheduler = engine_core(llm).scheduler
    schedule = scheduler.schedule

    def noted() -> Any:
        output = schedule()
        if output.total_num_scheduled_tokens:
            planned.append(ExecutionContext.from_scheduler_output(output))
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    prompts = [{"prompt_token_ids": list(range(n))} for n in (40, 3, 17)]
    run = trace(llm, prompts, SamplingParams(max_tokens=5, ignore_eos=True), arrivals=[0, 1, 3])
    metrics = live_metrics(llm)
    batches = [step.batch for step in run if step.batch is not None]
    assert any(len(b.req_ids) > 1 and max(b.seq_lens) > 20 for b in batches), "no mixed step"
    for plan, batch in zip(planned, batches, strict=True):
        starts = batch.query_start_loc
        lens = [b - a for a, b in pairwise(starts)]
        packed = ExecutionContext.from_lens(lens, batch.seq_lens)
        assert plan.num_reqs == packed.num_reqs
        assert metrics.get_step_perf_stats_per_gpu(plan) == metrics.get_step_perf_stats_per_gpu(
            packed
        )


# ---- rooflines ---------------------------------------------------------------------------------


def test_each_kernel_waits_for_the_slower_of_arithmetic_and_memory() -> None:
    metrics = ModelMetrics(PUBLISHED["llama-2-7b"], "float16")
    device = Hardware("toy", 1 << 34, 1e9, {"bfloat16": 50e9, "float16": 50e9}, "made up")
    assert device.ridge("float16") == 50
    for tokens, bound in ((4, False), (400, True)):
        kernels = perf.roofline(metrics, ExecutionContext.from_lens([tokens], [tokens]), device)
        mlp = next(kernel for kernel in kernels if kernel.name == "gate_up_proj")
        assert mlp.compute_bound == bound == (mlp.intensity > 50)
        assert mlp.seconds == max(mlp.flops / 50e9, mlp.num_bytes / 1e9)
        assert sum(k.flops for k in kernels) == metrics.get_num_flops(
            ExecutionContext.from_lens([tokens], [tokens])
        )


def test_quantized_weights_are_multiplied_at_the_rate_of_what_they_are_widened_to() -> None:
    h200, a100 = HARDWARE["h200"], HARDWARE["a100"]
    assert h200.rate("fp8") == pytest.approx(2 * h200.rate("bfloat16"), rel=1e-3)
    assert h200.rate("int4") == h200.rate("bfloat16")
    assert a100.rate("fp8") == a100.rate("bfloat16")


def test_utilization_is_work_over_time_over_ceiling() -> None:
    stats = perf.PerfStats(4 * 10**9, 3 * 10**9, 10**9)
    device = Hardware("toy", 1 << 34, 8e9, {"bfloat16": 16e9}, "made up")
    used = perf.utilization(stats, 2.0, device, "bfloat16")
    assert (used.flops_per_s, used.bytes_per_s) == (2e9, 2e9)
    assert (used.mfu, used.mbu) == (0.125, 0.25)


def test_this_machine_is_measured_in_under_five_seconds() -> None:
    torch.ones(1)  # torch is there
    begin = time.perf_counter()
    measured = measure_hardware("cpu", ("float32",))
    assert time.perf_counter() - begin < 5
    # More than any machine of this century lacks, less than any CPU has.
    assert 1e8 < measured.bandwidth < 5e12
    assert 1e8 < measured.rate("float32") < 1e15
    assert measured.memory_bytes > 1 << 28


def test_unknown_hardware_is_refused_by_name() -> None:
    with pytest.raises(VLLMValidationError, match=r"'h900' is unknown; choose one of h200, "):
        get_hardware("h900")


# ---- published figures -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published", "digits"),
    [
        ("llama-2-7b", 6.74e9, 0.005e9),  # Touvron et al. 2023's checkpoints, as Meta counts them
        ("llama-2-70b", 69.0e9, 0.05e9),
        ("gpt3-175b", 174_600e6, 50e6),  # Brown et al. 2020, table D.1
        ("smollm2-135m", 135e6, 0.5e6),
        ("qwen3-0.6b", 0.6e9, 0.05e9),
    ],
)
def test_parameters_of_published_models(name: str, published: float, digits: float) -> None:
    assert sum(perf.num_params(PUBLISHED[name]).values()) == pytest.approx(published, abs=digits)


def test_qwen3_without_its_embedding_has_0_44_billion_parameters() -> None:
    """As its model card says."""
    params = perf.num_params(PUBLISHED["qwen3-0.6b"])
    assert sum(params.values()) - params["embedding"] == pytest.approx(0.44e9, abs=0.005e9)


def test_llama_2_70b_keeps_320_kib_a_token_and_7b_512() -> None:
    """80 layers, 8 of 64 heads, 128 wide, 2 bytes, key and value; 7B keeps all its 32 heads."""
    assert perf.kv_bytes_per_token(PUBLISHED["llama-2-70b"], "float16") == 327_680
    assert perf.kv_bytes_per_token(PUBLISHED["llama-2-7b"], "float16") == 524_288


def test_gpt3_took_3_14e23_operations() -> None:
    """Brown et al. 2020, table D.1: 300 billion tokens, attention not counted."""
    flops = perf.training_flops(PUBLISHED["gpt3-175b"], 300 * 10**9, 2048)
    assert flops.six_n_d == pytest.approx(3.14e23, abs=0.005e23)
    # The tables that are not multiplied and the attention are small against it.
    assert flops.total == pytest.approx(flops.six_n_d, rel=0.02)
    assert 0.01 < flops.attention / flops.matmul < 0.02


def test_training_is_three_forward_passes_and_recomputation_a_fourth() -> None:
    """All tokens go through the head here, and no mask is taken off the context's average."""
    shape, seq_len = PUBLISHED["llama-2-7b"], 512
    metrics = ModelMetrics(shape)
    forward = metrics.get_num_flops_breakdown(ExecutionContext.from_lens([seq_len], [seq_len]))
    forward["lm_head"] *= seq_len
    plain = perf.training_flops(shape, seq_len, seq_len)
    assert plain.total == 3 * sum(forward.values())
    full = perf.training_flops(shape, seq_len, seq_len, "full")
    assert full.recompute == sum(forward.values()) - forward["lm_head"]
    selective = perf.training_flops(shape, seq_len, seq_len, "selective")
    assert 2 * selective.recompute == forward["attn"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_activations_of_gpt3_follow_the_formula_of_korthikanti_et_al(batch_size: int) -> None:
    """s b h (34 + 5 a s / h) a layer; the paper puts 5 a s / h at 80 for GPT-3."""
    shape, s = PUBLISHED["gpt3-175b"], 2048
    h, sbh = shape.hidden_size, s * batch_size * shape.hidden_size
    scores = 5 * shape.num_attention_heads * s / h
    assert scores == 80
    for recompute, a_layer in (("none", 34 + scores), ("selective", 34), ("full", 2)):
        assert perf.layer_activation_bytes(shape, batch_size, s, recompute) == sbh * a_layer
        memory = perf.training_memory(shape, batch_size, s, recompute)
        assert memory["layers"] == 96 * sbh * a_layer
        assert memory["head"] == 4 * sbh * (1 + shape.vocab_size / h)
        assert ("one whole layer" in memory) == (recompute == "full")


def saved_bytes(forward: Any, parameters: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, parameters aside."""
    kept: dict[int, int] = {}
    not_counted = {p.untyped_storage().data_ptr() for p in parameters}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = forward()
    assert output.requires_grad
    return sum(kept.values())


def test_activations_of_a_gated_layer_are_what_autograd_keeps() -> None:
    """One Llama layer written out, in bfloat16: norms that keep their input, a SwiGLU that keeps
    gate and up (the product is kept by down_proj)."""
    shape = ModelShape("toy", 1, 64, 4, 2, 16, 96, 100, 128, False)
    s, d = 32, shape.head_dim
    weights = {
        linear.name: torch.nn.Parameter(
            torch.randn(linear.out_features, linear.in_features, dtype=torch.bfloat16)
        )
        for linear in perf.layer_linears(shape)
    }

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate) * up

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x / x.norm(dim=-1, keepdim=True)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(s, -1, d).transpose(0, 1)

    def layer() -> torch.Tensor:
        x = torch.randn(s, 64, dtype=torch.bfloat16, requires_grad=True) * 1
        y = Norm.apply(x)
        q, k, v = (heads(y @ weights[n].t()) for n in ("q_proj", "k_proj", "v_proj"))
        group = shape.num_attention_heads // shape.num_key_value_heads
        # [kv, group * s, d] against [kv, s, d]: no key is repeated
        probs = (q.reshape(2, group * s, d) @ k.transpose(1, 2)).softmax(-1)
        out = (probs @ v).view(4, s, d).transpose(0, 1).reshape(s, -1)
        x = x + out @ weights["o_proj"].t()
        y = Norm.apply(x)
        hidden = SwiGLU.apply(y @ weights["gate_proj"].t(), y @ weights["up_proj"].t())
        return x + hidden @ weights["down_proj"].t()

    assert saved_bytes(layer, [*weights.values()]) == perf.layer_activation_bytes(shape, 1, s)


def test_mixed_precision_with_adam_takes_16_bytes_a_parameter() -> None:
    """ZeRO's example: 7.5 billion parameters, 120 GB."""
    states = perf.training_state_bytes(PUBLISHED["gpt3-175b"])
    assert sum(states.values()) == 16 * sum(perf.num_params(PUBLISHED["gpt3-175b"]).values())


@pytest.mark.parametrize("call", [perf.training_flops, perf.training_memory])
def test_unknown_recomputation_is_refused(call: Any) -> None:
    with pytest.raises(VLLMValidationError, match="recompute 'some' is unknown"):
        call(PUBLISHED["llama-2-7b"], 1, 1, "some")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="dtype 'fp3' is unknown"):
        perf.weight_bytes(PUBLISHED["llama-2-7b"], "fp3")


def test_nothing_of_it_loads_torch() -> None:
    program = (
        "import sys; from nanovllm.v1.metrics import estimate, hardware, perf\n"
        "estimate.Estimate(perf.PUBLISHED['llama-2-7b'], hardware.HARDWARE['h200'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
