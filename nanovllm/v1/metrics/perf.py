"""The back of the envelope: parameters, bytes and operations of a model, from its config alone.

Nothing runs here and nothing is imported that could: a `ModelShape` is a dozen numbers of
config.json, and everything else is arithmetic on it.

    num_params, weight_bytes        what must be stored
    kv_bytes_per_token ...          what a token of context costs, and how many of them fit
    ModelMetrics                    operations and bytes of one step of the engine
    roofline                        how long that takes at best
    utilization                     what share of the ceilings a step that was timed has reached
    training_flops, _memory         the same for training

`nanovllm estimate` prints it with the formulas. Symbols there and in the comments here, upstream's:

    L layers    D hidden size    q, kv query and key-value heads    d head size    DI MLP width
    V vocabulary    T tokens of the step    w, a, c bytes of a weight, an activation, a cached value

Upstream: vllm/v1/metrics/perf.py (0.23.0)
Left out: parallelism (one GPU holds the model), mixtures of experts, sliding windows, Prometheus
and logging. Ours in addition: the causal half of attention, embedding and norms, everything above
and below ModelMetrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from nanovllm.v1.core.sched.output import SchedulerOutput
    from nanovllm.v1.metrics.hardware import Hardware

# Bytes a value. int4: two weights a byte.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}
QUANTIZED = ("fp8", "int8", "int4")
CHANNEL_SCALE_BYTES = 4  # fp8 and int8: a float32 scale for each output channel
GROUP_SCALE_BYTES = 2  # int4: a 16-bit scale for each group of inputs of an output channel
DEFAULT_GROUP_SIZE = 128

# ---- the model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """What config.json says about sizes, for the architectures that run here."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    gated_mlp: bool = True  # gate, up and down instead of up and down
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False  # LayerNorm instead of RMSNorm
    qk_norm: bool = False  # a norm of head_dim weights for queries, one for keys
    learned_positions: bool = False  # a table of max_position_embeddings rows
    dtype: str = "bfloat16"  # of the checkpoint

    @classmethod
    def from_hf_config(cls, config: Any, name: str = "") -> ModelShape:
        """Read a transformers config.

        Raises:
            VLLMValidationError: it is of an architecture that is not supported.
        """
        model_type = config.model_type
        if model_type not in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
            raise VLLMValidationError(
                f"models of type {model_type!r} cannot be estimated; supported are gpt2, llama, "
                "mistral, qwen2 and qwen3.",
                parameter="model_type",
                value=model_type,
            )
        gpt2 = model_type == "gpt2"
        heads = config.num_attention_heads
        attention_bias = bool(getattr(config, "attention_bias", False)) or gpt2
        if gpt2:
            intermediate_size = config.n_inner or 4 * config.hidden_size
        else:
            intermediate_size = config.intermediate_size
        return cls(
            name=name or model_type,
            num_hidden_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=intermediate_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            gated_mlp=not gpt2,
            # Qwen2's config does not mention its bias: it is part of the architecture.
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)) or gpt2,
            norm_bias=gpt2,
            qk_norm=model_type == "qwen3",
            learned_positions=gpt2,
            dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
        )

    @property
    def q_size(self) -> int:
        """q * d: all query heads side by side."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """kv * d: all key heads, or all value heads, side by side."""
        return self.num_key_value_heads * self.head_dim


# Models whose sizes are published, to be estimated without their files. The first four: their
# config.json; GPT-3: Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1, with
# GPT-2's layers and vocabulary, as the paper says.
PUBLISHED: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, False, dtype="float16"),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096, False, dtype="float16"),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 40960, True, qk_norm=True),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, True),
        ModelShape(
            "gpt3-175b",
            num_hidden_layers=96,
            hidden_size=12288,
            num_attention_heads=96,
            num_key_value_heads=96,
            head_dim=128,
            intermediate_size=4 * 12288,
            vocab_size=50257,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            gated_mlp=False,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            norm_bias=True,
            learned_positions=True,
            dtype="float16",
        ),
    )
}


@dataclass(frozen=True)
class Linear:
    """One of a layer's matrices."""

    name: str
    in_features: int
    out_features: int
    bias: bool

    @property
    def num_params(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.bias else 0)

    def num_bytes(self, dtype: str, group_size: int = DEFAULT_GROUP_SIZE) -> int:
        """Stored in `dtype`, with scales if that is a quantized one; biases stay in 16 bit."""
        if dtype not in QUANTIZED:
            return int(self.num_params * DTYPE_BYTES[dtype])
        weights = math.ceil(self.in_features * self.out_features * DTYPE_BYTES[dtype])
        bias = 2 * self.out_features if self.bias else 0
        return weights + self.num_scales(dtype, group_size) * scale_bytes(dtype) + bias

    def num_scales(self, dtype: str, group_size: int = DEFAULT_GROUP_SIZE) -> int:
        """Numbers that the weights are multiplied with to undo their quantization."""
        if dtype not in QUANTIZED:
            return 0
        groups = -(-self.in_features // group_size) if dtype == "int4" else 1
        return groups * self.out_features


def scale_bytes(dtype: str) -> int:
    return GROUP_SCALE_BYTES if dtype == "int4" else CHANNEL_SCALE_BYTES


def layer_linears(shape: ModelShape) -> list[Linear]:
    """The matrices of one layer, as checkpoints store them (the engine merges some)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    mlp = [Linear("up_proj", hidden, inner, shape.mlp_bias)]
    if shape.gated_mlp:
        mlp.insert(0, Linear("gate_proj", hidden, inner, shape.mlp_bias))
    return [
        Linear("q_proj", hidden, shape.q_size, shape.qkv_bias),
        Linear("k_proj", hidden, shape.kv_size, shape.qkv_bias),
        Linear("v_proj", hidden, shape.kv_size, shape.qkv_bias),
        Linear("o_proj", shape.q_size, hidden, shape.o_bias),
        *mlp,
        Linear("down_proj", inner, hidden, shape.mlp_bias),
    ]


def num_params(shape: ModelShape) -> dict[str, int]:
    """Parameters by part, all layers together. A tied lm_head counts 0: it is the embedding.

    Their sum is the number that a checkpoint holds, to the last one.
    """
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    table = shape.vocab_size * hidden
    norm = hidden * (2 if shape.norm_bias else 1)
    qk_norm = 2 * shape.head_dim if shape.qk_norm else 0
    return {
        "embedding": table,
        "positions": shape.max_position_embeddings * hidden if shape.learned_positions else 0,
        **{linear.name: layers * linear.num_params for linear in layer_linears(shape)},
        "norms": layers * (2 * norm + qk_norm) + norm,
        "lm_head": 0 if shape.tie_word_embeddings else table,
    }


def num_matmul_params(shape: ModelShape) -> int:
    """Weights that every token is multiplied with: the layers' matrices and the head, tied or not.

    A token's row of the embedding is looked up, not multiplied.
    """
    matrices = sum(one.in_features * one.out_features for one in layer_linears(shape))
    return shape.num_hidden_layers * matrices + shape.vocab_size * shape.hidden_size


def weight_bytes(
    shape: ModelShape, dtype: str, group_size: int = DEFAULT_GROUP_SIZE
) -> dict[str, int]:
    """Bytes by part, under `num_params`' names.

    A quantized dtype is that of the layers' matrices; embedding, norms, biases and head stay in 16
    bit, as quantized checkpoints for vLLM have them. int4 is symmetric: scales, no zero points.

    Raises:
        VLLMValidationError: the dtype is unknown.
    """
    verify_dtype(dtype)
    other = 2 if dtype in QUANTIZED else int(DTYPE_BYTES[dtype])
    parts = {name: n * other for name, n in num_params(shape).items()}
    for linear in layer_linears(shape):
        parts[linear.name] = shape.num_hidden_layers * linear.num_bytes(dtype, group_size)
    return parts


def verify_dtype(dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise VLLMValidationError(
            f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPE_BYTES)}.",
            parameter="dtype",
            value=dtype,
        )


def activation_dtype(weight_dtype: str) -> str:
    """What hidden states are in: the weights' dtype, bfloat16 beside quantized ones."""
    return "bfloat16" if weight_dtype in QUANTIZED else weight_dtype


# ---- the KV cache -----------------------------------------------------------------------------


def kv_bytes_per_token(shape: ModelShape, cache_dtype: str) -> int:
    """2 L kv d c: a key and a value of every key-value head in every layer."""
    per_layer = 2 * shape.kv_size * DTYPE_BYTES[cache_dtype]
    return int(shape.num_hidden_layers * per_layer)


def activation_bytes(shape: ModelShape, dtype: str, num_tokens: int, num_seqs: int) -> int:
    """An allowance for what the largest step holds beside weights and KV cache, in bytes.

    The larger of two moments:
        inside a layer    the residual stream and its normed copy, and either the MLP's gate, up and
                          product or queries, keys and values before and after the rotation with the
                          attention's output
        sampling          the last hidden states, and the logits with a float32 copy of them and
                          their log-softmax

    The engine itself does not guess: it runs such a step and reads off the peak
    (Worker.determine_available_memory).
    """
    size = int(DTYPE_BYTES[activation_dtype(dtype)])
    mlp = (3 if shape.gated_mlp else 2) * shape.intermediate_size
    attention = 3 * shape.q_size + 3 * shape.kv_size
    in_layer = num_tokens * (2 * shape.hidden_size + max(mlp, attention)) * size
    sampling = num_tokens * shape.hidden_size * size + num_seqs * shape.vocab_size * (size + 4 + 4)
    return max(in_layer, sampling)


@dataclass(frozen=True)
class KVCacheCapacity:
    """How much context a device holds."""

    available_bytes: int  # for the KV cache; negative: weights and activations do not fit
    num_blocks: int  # the null block included
    num_tokens: int  # without the null block, which never holds any


def kv_cache_capacity(
    block_bytes: int, block_size: int, usable_bytes: int, weights: int, activations: int
) -> KVCacheCapacity:
    """What is left for the KV cache, in blocks and tokens.

    Args:
        block_bytes: of one block in all layers: block_size * kv_bytes_per_token.
        usable_bytes: the device's memory times gpu_memory_utilization.
    """
    available = usable_bytes - weights - activations
    num_blocks = max(available, 0) // block_bytes
    return KVCacheCapacity(available, num_blocks, max(num_blocks - 1, 0) * block_size)


# ---- one step ---------------------------------------------------------------------------------


@dataclass
class ExecutionContext:
    """The shape of one step: sums over its requests.

    A request computes `num_tokens` and then has `context_len` tokens, these included. Prefill and
    decode are kept apart for show only: the formulas below treat them alike.
    """

    num_prefill_requests: int = 0
    prefill_num_tokens: int = 0
    prefill_context_len: int = 0
    prefill_token_context_product: int = 0
    num_decode_requests: int = 0
    decode_num_tokens: int = 0
    decode_context_len: int = 0
    decode_token_context_product: int = 0
    # (query, key) pairs that the causal mask leaves: a token sees itself and those before it.
    causal_pairs: int = 0

    def add(self, num_tokens: int, context_len: int, is_prefill: bool) -> None:
        """Count one request."""
        # The last token sees all of the context, the one before it one token less, and so on.
        self.causal_pairs += num_tokens * context_len - num_tokens * (num_tokens - 1) // 2
        if is_prefill:
            self.num_prefill_requests += 1
            self.prefill_num_tokens += num_tokens
            self.prefill_context_len += context_len
            self.prefill_token_context_product += num_tokens * context_len
        else:
            self.num_decode_requests += 1
            self.decode_num_tokens += num_tokens
            self.decode_context_len += context_len
            self.decode_token_context_product += num_tokens * context_len

    @classmethod
    def from_lens(cls, query_lens: Iterable[int], seq_lens: Iterable[int]) -> ExecutionContext:
        """A packed batch: the differences of its query_start_loc, and its seq_lens."""
        context = cls()
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
            context.add(query_len, seq_len, is_prefill=query_len > 1)
        return context

    @classmethod
    def from_scheduler_output(cls, scheduler_output: SchedulerOutput) -> ExecutionContext:
        """A step as the scheduler has planned it."""
        context = cls()
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            num_tokens = num_scheduled_tokens[new.req_id]
            context.add(num_tokens, new.num_computed_tokens + num_tokens, is_prefill=True)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            num_tokens = num_scheduled_tokens[req_id]
            context.add(num_tokens, num_computed + num_tokens, is_prefill=num_tokens > 1)
        return context

    @property
    def num_reqs(self) -> int:
        return self.num_prefill_requests + self.num_decode_requests

    def total_num_tokens(self) -> int:
        return self.prefill_num_tokens + self.decode_num_tokens

    def total_context_len(self) -> int:
        return self.prefill_context_len + self.decode_context_len

    def total_token_context_product(self) -> int:
        """(query, key) pairs without a mask."""
        return self.prefill_token_context_product + self.decode_token_context_product

    def num_logits_tokens(self) -> int:
        """Rows that go through the head: the last token of every request, chunks included.

        Upstream counts all tokens of a decode, of which speculation may check several.
        """
        return self.num_reqs


@dataclass(frozen=True)
class PerfStats:
    """What one step computes and moves."""

    num_flops_per_gpu: int = 0
    num_read_bytes_per_gpu: int = 0
    num_write_bytes_per_gpu: int = 0

    @property
    def num_bytes_per_gpu(self) -> int:
        return self.num_read_bytes_per_gpu + self.num_write_bytes_per_gpu


class ModelMetrics:
    """Operations and bytes of a step, kernel by kernel. All three breakdowns have the same keys.

    A product of [T, n] with [n, m] takes 2 T n m operations, a multiplication and an addition for
    each of its terms; nothing else is counted as an operation. Bytes are the least that separate
    kernels can do with: each reads its inputs once and writes its outputs once, weights are read
    once a step however many tokens there are, and attention keeps its scores on the chip. A cache
    that holds an output until its reader comes makes it less, tiles that are read again more.
    Rotation and the norms of queries and keys are left out: they can be done in passing.

    Args:
        weight_dtype: of the layers' matrices; see `weight_bytes`.
        cache_dtype: of keys and values; None: the activations'.
        causal: count only (query, key) pairs that the mask leaves, which is what has to be
            computed. False: all pairs, as upstream counts and as a kernel computes that builds the
            whole score matrix (torch's SDPBackend.MATH): up to twice as many for a prompt, the same
            for a decode.
    """

    def __init__(
        self,
        shape: ModelShape,
        weight_dtype: str | None = None,
        cache_dtype: str | None = None,
        group_size: int = DEFAULT_GROUP_SIZE,
        causal: bool = True,
    ) -> None:
        self.shape = shape
        self.weight_dtype = weight_dtype or shape.dtype
        self.activation_dtype = activation_dtype(self.weight_dtype)
        self.cache_dtype = cache_dtype or self.activation_dtype
        verify_dtype(self.cache_dtype)
        self.causal = causal
        self._activation_size = int(DTYPE_BYTES[self.activation_dtype])
        self._kv_bytes_per_token = kv_bytes_per_token(shape, self.cache_dtype)
        self.weights = weight_bytes(shape, self.weight_dtype, group_size)

    def get_num_flops_breakdown(self, ctx: ExecutionContext) -> dict[str, int]:
        shape, tokens = self.shape, ctx.total_num_tokens()
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        pairs = ctx.causal_pairs if self.causal else ctx.total_token_context_product()
        num_up = 2 if shape.gated_mlp else 1
        return {
            "embedding": 0,
            "norms": 0,
            "qkv_proj": 2 * tokens * hidden * (shape.q_size + 2 * shape.kv_size) * layers,
            # Query times key, and probability times value.
            "attn": 2 * 2 * pairs * shape.q_size * layers,
            "o_proj": 2 * tokens * shape.q_size * hidden * layers,
            "gate_up_proj": 2 * tokens * hidden * num_up * inner * layers,
            "act_fn": 0,
            "down_proj": 2 * tokens * inner * hidden * layers,
            "lm_head": 2 * ctx.num_logits_tokens() * hidden * shape.vocab_size,
        }

    def get_read_bytes_breakdown(self, ctx: ExecutionContext) -> dict[str, int]:
        shape, w, tokens = self.shape, self.weights, ctx.total_num_tokens()
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        num_up = 2 if shape.gated_mlp else 1
        value = tokens * self._activation_size  # bytes of one number a token
        return {
            # A row of each table for every token.
            "embedding": value * hidden * (2 if shape.learned_positions else 1),
            # Each adds its input to the residual stream first, and reads both.
            "norms": (2 * layers + 1) * value * 2 * hidden + w["norms"],
            "qkv_proj": layers * value * hidden + w["q_proj"] + w["k_proj"] + w["v_proj"],
            # Queries, keys and values of this step's tokens; then all keys and values once.
            "attn": layers * value * (shape.q_size + 2 * shape.kv_size)
            + ctx.total_context_len() * self._kv_bytes_per_token,
            "o_proj": layers * value * shape.q_size + w["o_proj"],
            "gate_up_proj": layers * value * hidden + w.get("gate_proj", 0) + w["up_proj"],
            "act_fn": layers * value * num_up * inner,
            "down_proj": layers * value * inner + w["down_proj"],
            "lm_head": ctx.num_logits_tokens() * hidden * self._activation_size + self._head_bytes,
        }

    def get_write_bytes_breakdown(self, ctx: ExecutionContext) -> dict[str, int]:
        shape, tokens = self.shape, ctx.total_num_tokens()
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        num_up = 2 if shape.gated_mlp else 1
        value = tokens * self._activation_size
        return {
            "embedding": value * hidden,
            "norms": (2 * layers + 1) * value * 2 * hidden,
            "qkv_proj": layers * value * (shape.q_size + 2 * shape.kv_size),
            # The output, and the new keys and values into the cache.
            "attn": layers * value * shape.q_size + tokens * self._kv_bytes_per_token,
            "o_proj": layers * value * hidden,
            "gate_up_proj": layers * value * num_up * inner,
            "act_fn": layers * value * inner,
            "down_proj": layers * value * hidden,
            "lm_head": ctx.num_logits_tokens() * shape.vocab_size * self._activation_size,
        }

    @property
    def _head_bytes(self) -> int:
        tied = self.shape.tie_word_embeddings
        return self.weights["embedding" if tied else "lm_head"]

    def get_num_flops(self, ctx: ExecutionContext) -> int:
        return sum(self.get_num_flops_breakdown(ctx).values())

    def get_read_bytes(self, ctx: ExecutionContext) -> int:
        return sum(self.get_read_bytes_breakdown(ctx).values())

    def get_write_bytes(self, ctx: ExecutionContext) -> int:
        return sum(self.get_write_bytes_breakdown(ctx).values())

    def get_step_perf_stats_per_gpu(self, step: ExecutionContext | SchedulerOutput) -> PerfStats:
        """What a step computes and moves."""
        if not isinstance(step, ExecutionContext):
            step = ExecutionContext.from_scheduler_output(step)
        return PerfStats(
            self.get_num_flops(step), self.get_read_bytes(step), self.get_write_bytes(step)
        )

    def kernel_dtype(self, kernel: str) -> str:
        """The dtype whose rate counts: the weights' in the layers' matrices."""
        return self.weight_dtype if kernel.endswith("_proj") else self.activation_dtype


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a step (of all layers) under a roofline."""

    name: str
    flops: int
    num_bytes: int
    seconds: float
    compute_bound: bool

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


def roofline(
    metrics: ModelMetrics, ctx: ExecutionContext, hardware: Hardware
) -> Sequence[KernelTime]:
    """Each kernel's time at best: the longer of its arithmetic and its memory traffic.

    Kernels run one after the other, so their sum is the step's time at best. (Launches, waves that
    do not fill the chip, sampling and the host come on top.)
    """
    flops = metrics.get_num_flops_breakdown(ctx)
    reads, writes = metrics.get_read_bytes_breakdown(ctx), metrics.get_write_bytes_breakdown(ctx)
    times = []
    for name in flops:
        num_bytes = reads[name] + writes[name]
        compute = flops[name] / hardware.rate(metrics.kernel_dtype(name))
        memory = num_bytes / hardware.bandwidth
        times.append(
            KernelTime(name, flops[name], num_bytes, max(compute, memory), compute > memory)
        )
    return times


@dataclass(frozen=True)
class Utilization:
    """A step that was timed."""

    flops_per_s: float
    bytes_per_s: float
    mfu: float  # model FLOPs utilization: share of the hardware's rate
    mbu: float  # model bandwidth utilization: share of its bandwidth


def utilization(stats: PerfStats, seconds: float, hardware: Hardware, dtype: str) -> Utilization:
    """What a step that took `seconds` has reached.

    `dtype` is the one whose rate is the ceiling. The bytes are those that the model needs moved: a
    model that stays in the chip's cache can show an MBU above 1.
    """
    flops_per_s = stats.num_flops_per_gpu / seconds
    bytes_per_s = stats.num_bytes_per_gpu / seconds
    return Utilization(
        flops_per_s,
        bytes_per_s,
        flops_per_s / hardware.rate(dtype),
        bytes_per_s / hardware.bandwidth,
    )


# ---- training ---------------------------------------------------------------------------------

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class TrainingFlops:
    """Operations of forward and backward over all tokens."""

    six_n_d: int  # 6 N D with N all parameters: the rule of thumb
    attention: int  # what it leaves out, with the causal half only
    matmul: int  # 6 (weights that are multiplied) D
    recompute: int  # what is computed again for the backward pass

    @property
    def total(self) -> int:
        """Every product, counted: matmul + attention (+ recompute)."""
        return self.matmul + self.attention + self.recompute


def training_flops(
    shape: ModelShape, num_tokens: int, seq_len: int, recompute: str = "none"
) -> TrainingFlops:
    """Operations of training on `num_tokens` tokens in sequences of `seq_len`.

    Every weight takes part in 2 operations a token forward; the backward pass has two products of
    that size, for the gradient of the input and of the weight. Hence 6 N D (Kaplan et al. 2020,
    "Scaling Laws for Neural Language Models"). Attention adds 12 L q d s a token for s visible
    tokens (Chowdhery et al. 2022, "PaLM", appendix B, counts all of the sequence; under the causal
    mask it is (seq_len + 1) / 2 on average). Full recomputation repeats the layers' forward pass,
    selective only query times key.

    Raises:
        VLLMValidationError: `recompute` is none of RECOMPUTE.
    """
    _verify_recompute(recompute)
    attention = 6 * shape.num_hidden_layers * shape.q_size * (seq_len + 1) * num_tokens
    num_head = shape.vocab_size * shape.hidden_size
    num_layers = num_matmul_params(shape) - num_head
    again = {
        "none": 0,
        "selective": attention // 6,
        "full": attention // 3 + 2 * num_layers * num_tokens,
    }
    return TrainingFlops(
        six_n_d=6 * sum(num_params(shape).values()) * num_tokens,
        attention=attention,
        matmul=6 * (num_layers + num_head) * num_tokens,
        recompute=again[recompute],
    )


def _verify_recompute(recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise VLLMValidationError(
            f"recompute {recompute!r} is unknown; choose one of {', '.join(RECOMPUTE)}.",
            parameter="recompute",
            value=recompute,
        )


def training_state_bytes(shape: ModelShape) -> dict[str, int]:
    """16 bytes a parameter: mixed precision with Adam (Rajbhandari et al. 2020, "ZeRO")."""
    n = sum(num_params(shape).values())
    return {
        "weights": 2 * n,
        "gradients": 2 * n,
        "master weights": 4 * n,
        "first moment": 4 * n,
        "second moment": 4 * n,
    }


def layer_activation_bytes(
    shape: ModelShape, batch_size: int, seq_len: int, recompute: str = "none"
) -> int:
    """Bytes that a layer keeps from the forward for the backward pass, activations in 16 bit.

    The accounting of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", section 4, with this model's own widths. For their GPT (MLP of 4 h, as many
    key as query heads, dropout) it is their formula for one GPU: s b h (34 + 5 a s / h), without
    recomputation; selective leaves the second term out (so does FlashAttention, which keeps no
    scores); full keeps the layer's input, 2 s b h. Models with a gated MLP are trained without
    dropout: no masks, and one copy of the probabilities.
    """
    h, inner = shape.hidden_size, shape.intermediate_size
    if recompute == "full":
        return batch_size * seq_len * 2 * h
    dropout = not shape.gated_mlp
    mask = h if dropout else 0  # a byte each
    attention = 2 * h + 2 * (shape.q_size + 2 * shape.kv_size) + 2 * shape.q_size + mask
    # Plain: what goes into the activation and what comes out. Gated: gate, up and their product.
    mlp = 2 * h + 2 * (3 if shape.gated_mlp else 2) * inner + mask
    norms = 2 * 2 * h
    # Probabilities [heads, seq_len] of every token: before dropout, mask, after.
    scores = (5 if dropout else 2) * shape.num_attention_heads * seq_len
    per_token = attention + mlp + norms + (scores if recompute == "none" else 0)
    return batch_size * seq_len * per_token


def head_activation_bytes(shape: ModelShape, batch_size: int, seq_len: int) -> int:
    """The same outside the layers: the final norm's and the head's input, and float32 logits.

    Korthikanti et al., section 4.3: 4 s b h (1 + v / h). (Their mask of the embedding's dropout, of
    s b h bytes, is left out.)
    """
    return 4 * batch_size * seq_len * (shape.hidden_size + shape.vocab_size)


def training_memory(
    shape: ModelShape, batch_size: int, seq_len: int, recompute: str = "none"
) -> dict[str, int]:
    """Bytes by part for a batch on one GPU: training_state_bytes, then the activations of "layers"
    and "head". With full recomputation one layer at a time is whole.

    Raises:
        VLLMValidationError: `recompute` is none of RECOMPUTE.
    """
    _verify_recompute(recompute)
    layer = layer_activation_bytes(shape, batch_size, seq_len, recompute)
    parts = training_state_bytes(shape)
    parts["layers"] = shape.num_hidden_layers * layer
    if recompute == "full":
        whole = layer_activation_bytes(shape, batch_size, seq_len)
        parts["one whole layer"] = whole
    parts["head"] = head_activation_bytes(shape, batch_size, seq_len)
    return parts
