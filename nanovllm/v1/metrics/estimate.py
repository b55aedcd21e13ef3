"""An estimate: everything that perf.py can say about a model, with the formula beside each result.

    Estimate(PUBLISHED["qwen3-0.6b"], HARDWARE["h200"], batch_size=32).section("kv_cache")

A formula is text over a section's symbols, for people: the results do not come from it but from
perf.py, and a test evaluates every formula and compares. `nanovllm estimate` prints all of it.

No counterpart upstream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm.v1.metrics import perf
from nanovllm.v1.metrics.hardware import HARDWARE, Hardware
from nanovllm.v1.metrics.perf import DTYPE_BYTES, RECOMPUTE, ModelShape


@dataclass
class Line:
    """One result and how it comes about."""

    name: str
    formula: str  # "2 × L × kv": names of the section's symbols, numbers, + - × / // ( )
    value: float
    unit: str  # see `show`


@dataclass
class Section:
    """Lines over the same symbols."""

    key: str  # in the JSON
    title: str
    symbols: dict[str, float]
    lines: list[Line] = field(default_factory=list)
    note: str = ""

    def add(self, name: str, formula: str, value: float, unit: str) -> None:
        self.lines.append(Line(name, formula, value, unit))


@dataclass
class Estimate:
    """A model on a device, under a load. None: see the property or comment of that name.

    Raises:
        VLLMValidationError: a dtype or `recompute` is unknown.
    """

    shape: ModelShape
    hardware: Hardware
    batch_size: int = 1
    prompt_len: int = 512  # prefill: tokens of each prompt
    context_len: int | None = None  # decode and training; None: 2048, or the model's longest
    dtype: str | None = None  # of the weights; None: the checkpoint's
    kv_cache_dtype: str | None = None  # None: the activations'
    group_size: int = perf.DEFAULT_GROUP_SIZE
    gpu_memory_utilization: float = 0.92
    block_size: int = 16
    # What vLLM's server takes on a GPU of 70 GiB or more.
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    training: bool = False
    train_tokens: int | None = None  # None: 20 a parameter (Hoffmann et al. 2022)
    recompute: str = "none"
    mfu: float = 0.4  # in training

    def __post_init__(self) -> None:
        shape = self.shape
        self.seq_len: int = self.context_len or min(2048, shape.max_position_embeddings)
        self.metrics = perf.ModelMetrics(shape, self.dtype, self.kv_cache_dtype, self.group_size)
        self.prefill = perf.ExecutionContext()
        for _ in range(self.batch_size):
            self.prefill.add(self.prompt_len, self.prompt_len, is_prefill=True)
        self.decode = self.decode_at(self.batch_size)
        self.weights = sum(self.metrics.weights.values())
        self.activations = perf.activation_bytes(
            shape, self.metrics.weight_dtype, self.max_num_batched_tokens, self.max_num_seqs
        )
        self.kv_bytes_per_token = perf.kv_bytes_per_token(shape, self.metrics.cache_dtype)
        self.sections = [
            _parameters(shape),
            _weights(shape, self.group_size),
            _kv_cache(self),
            *_step(self, "prefill", f"{self.batch_size} × {self.prompt_len} tokens", self.prefill),
            *_step(
                self, "decode", f"{self.batch_size} × 1 token after {self.seq_len - 1}", self.decode
            ),
        ]
        if self.training:
            self.sections += _training(self)

    def section(self, key: str) -> Section:
        return {section.key: section for section in self.sections}[key]

    def decode_at(self, batch_size: int) -> perf.ExecutionContext:
        """A step in which so many requests compute the last token of their context."""
        return perf.ExecutionContext.from_lens([1] * batch_size, [self.seq_len] * batch_size)

    def capacity(self, hardware: Hardware) -> perf.KVCacheCapacity:
        return perf.kv_cache_capacity(
            self.block_size * self.kv_bytes_per_token,
            self.block_size,
            int(hardware.memory_bytes * self.gpu_memory_utilization),
            self.weights,
            self.activations,
        )

    def seconds(self, ctx: perf.ExecutionContext, hardware: Hardware) -> float:
        """A step's time at best."""
        return sum(kernel.seconds for kernel in perf.roofline(self.metrics, ctx, hardware))

    def all_hardware(self) -> list[Hardware]:
        """The one asked for, then the others."""
        named = [one for one in HARDWARE.values() if one.name != self.hardware.name]
        return [self.hardware, *named]

    def to_dict(self) -> dict[str, Any]:
        """For machines: results by section and line, times by kernel and by hardware."""
        return {
            "model": asdict(self.shape),
            "dtype": self.metrics.weight_dtype,
            "kv_cache_dtype": self.metrics.cache_dtype,
            "batch_size": self.batch_size,
            "prompt_len": self.prompt_len,
            "context_len": self.seq_len,
            "sections": {
                section.key: {line.name: line.value for line in section.lines}
                for section in self.sections
            },
            "roofline": {
                phase: [
                    asdict(kernel) | {"intensity": kernel.intensity}
                    for kernel in perf.roofline(self.metrics, ctx, self.hardware)
                ]
                for phase, ctx in (("prefill", self.prefill), ("decode", self.decode))
            },
            "hardware": {one.name: self._on(one) for one in self.all_hardware()},
        }

    def _on(self, hardware: Hardware) -> dict[str, Any]:
        prefill, decode = self.seconds(self.prefill, hardware), self.seconds(self.decode, hardware)
        return {
            "source": hardware.source,
            "memory_bytes": hardware.memory_bytes,
            "bandwidth": hardware.bandwidth,
            "flops": hardware.rate(self.metrics.weight_dtype),
            "kv_cache": asdict(self.capacity(hardware)),
            "prefill_seconds": prefill,
            "prefill_tokens_per_s": self.prefill.total_num_tokens() / prefill,
            "decode_seconds": decode,
            "decode_tokens_per_s": self.batch_size / decode,
        }


# ---- sections ---------------------------------------------------------------------------------


def _model_symbols(shape: ModelShape) -> dict[str, float]:
    return {
        "L": shape.num_hidden_layers,
        "D": shape.hidden_size,
        "q": shape.num_attention_heads,
        "kv": shape.num_key_value_heads,
        "d": shape.head_dim,
        "DI": shape.intermediate_size,
        "V": shape.vocab_size,
        "P": shape.max_position_embeddings,
    }


def _parameters(shape: ModelShape) -> Section:
    params = perf.num_params(shape)
    mlp = " + L × DI" if shape.mlp_bias else ""
    norm = "2 × D" if shape.norm_bias else "D"
    formulas = {
        "embedding": "V × D",
        "positions": "P × D",
        "q_proj": "L × D × q × d" + (" + L × q × d" if shape.qkv_bias else ""),
        "k_proj": "L × D × kv × d" + (" + L × kv × d" if shape.qkv_bias else ""),
        "v_proj": "L × D × kv × d" + (" + L × kv × d" if shape.qkv_bias else ""),
        "o_proj": "L × q × d × D" + (" + L × D" if shape.o_bias else ""),
        "gate_proj": "L × D × DI" + mlp,
        "up_proj": "L × D × DI" + mlp,
        "down_proj": "L × DI × D" + (" + L × D" if shape.mlp_bias else ""),
        "norms": f"(2 × L + 1) × {norm}" + (" + L × 2 × d" if shape.qk_norm else ""),
        "lm_head": "V × D",
    }
    section = Section("parameters", "Parameters", _model_symbols(shape))
    for name, count in params.items():
        if count:
            section.add(name, formulas[name], count, "params")
    if shape.tie_word_embeddings:
        section.note = "lm_head is the embedding (tied) and counts once."
    section.add("total", " + ".join(_names(params)), sum(params.values()), "params")
    section.symbols |= params
    return section


def _names(parts: Mapping[str, float]) -> Iterable[str]:
    return (name for name, value in parts.items() if value)


def _weights(shape: ModelShape, group_size: int) -> Section:
    total = sum(perf.num_params(shape).values())
    linears = perf.layer_linears(shape)
    layers = shape.num_hidden_layers
    matrices = layers * sum(one.in_features * one.out_features for one in linears)
    symbols: dict[str, float] = {"N": total, "M": matrices, "R": total - matrices}
    for name, dtype in (("channels", "fp8"), ("groups", "int4")):
        symbols[name] = layers * sum(one.num_scales(dtype, group_size) for one in linears)
    section = Section("weights", "Weights by dtype", symbols)
    for title, dtype, formula in (
        ("float32", "float32", "N × 4"),
        ("bfloat16, float16", "bfloat16", "N × 2"),
        ("fp8, int8", "fp8", "M × 1 + R × 2 + channels × 4"),
        ("int4", "int4", "M × 0.5 + R × 2 + groups × 2"),
    ):
        num_bytes = sum(perf.weight_bytes(shape, dtype, group_size).values())
        section.add(title, formula, num_bytes, "bytes")
    section.note = (
        "M: the layers' matrices, which alone are quantized; R: all the rest, in 16 bit. Scales: "
        "float32 for each output channel (fp8, int8), 16 bit for each group of "
        f"{group_size} weights (int4)."
    )
    return section


def _kv_cache(estimate: Estimate) -> Section:
    shape, hardware = estimate.shape, estimate.hardware
    capacity = estimate.capacity(hardware)
    per_token = estimate.kv_bytes_per_token
    size = DTYPE_BYTES[estimate.metrics.activation_dtype]
    usable = int(hardware.memory_bytes * estimate.gpu_memory_utilization)
    symbols = _model_symbols(shape) | {
        "c": DTYPE_BYTES[estimate.metrics.cache_dtype],
        "a": size,
        "C": estimate.seq_len,
        "token": per_token,
        "memory": hardware.memory_bytes,
        "utilization": estimate.gpu_memory_utilization,
        "usable": usable,
        "weights": estimate.weights,
        "activations": estimate.activations,
        "available": max(capacity.available_bytes, 0),
        "block": estimate.block_size,
        "blocks": capacity.num_blocks,
        "tokens": capacity.num_tokens,
        "T": estimate.max_num_batched_tokens,
        "S": estimate.max_num_seqs,
    }
    section = Section("kv_cache", f"KV cache on {hardware.name}", symbols)
    section.add("a token", "2 × L × kv × d × c", per_token, "bytes")
    if shape.num_key_value_heads != shape.num_attention_heads:
        all_heads = per_token * shape.num_attention_heads // shape.num_key_value_heads
        section.add("a token if kv = q", "2 × L × q × d × c", all_heads, "bytes")
    section.add("a request of C", "C × token", estimate.seq_len * per_token, "bytes")
    section.add("usable", "memory × utilization", usable, "bytes")
    section.add("weights", "weights", estimate.weights, "bytes")
    mlp = (3 if shape.gated_mlp else 2) * shape.intermediate_size
    wide = f"{3 if shape.gated_mlp else 2} × DI"
    if mlp < 3 * (shape.q_size + shape.kv_size):
        wide = "3 × (q + kv) × d"
    in_layer, sampling = f"T × (2 × D + {wide}) × a", "T × D × a + S × V × (a + 8)"
    largest = max(in_layer, sampling, key=lambda formula: evaluate(formula, symbols))
    section.add("activations", largest, estimate.activations, "bytes")
    if capacity.available_bytes > 0:
        section.add(
            "for the cache", "usable - weights - activations", capacity.available_bytes, "bytes"
        )
        section.add("blocks", "available // (block × token)", capacity.num_blocks, "count")
        section.add("tokens", "(blocks - 1) × block", capacity.num_tokens, "count")
        section.add(
            "requests of C", "tokens // C", capacity.num_tokens // estimate.seq_len, "count"
        )
    else:
        missing = show(-capacity.available_bytes, "bytes")
        section.note = f"The model does not fit: {missing} too much before the first token.\n"
    section.note += (
        f"Activations: an allowance for a step of T = {estimate.max_num_batched_tokens} tokens, "
        f"S = {estimate.max_num_seqs} of them sampled; the engine measures its own.\n"
        "One block is the null block and holds nothing."
    )
    return section


def _step(estimate: Estimate, key: str, what: str, ctx: perf.ExecutionContext) -> list[Section]:
    shape, metrics, w = estimate.shape, estimate.metrics, estimate.metrics.weights
    symbols = _model_symbols(shape) | {
        "a": DTYPE_BYTES[metrics.activation_dtype],
        "B": ctx.num_reqs,
        "T": ctx.total_num_tokens(),
        "C": ctx.total_context_len() // ctx.num_reqs,
        "pairs": ctx.causal_pairs,
        "N": sum(perf.num_params(shape).values()),
        "token": estimate.kv_bytes_per_token,
        "Wqkv": w["q_proj"] + w["k_proj"] + w["v_proj"],
        "Wo": w["o_proj"],
        "Wup": w.get("gate_proj", 0) + w["up_proj"],
        "Wdown": w["down_proj"],
        "Wnorms": w["norms"],
        "Whead": w["embedding" if shape.tie_word_embeddings else "lm_head"],
    }
    up = "2 × DI" if shape.gated_mlp else "DI"
    flops = metrics.get_num_flops_breakdown(ctx)
    title = f"{key.capitalize()}: {what}"
    section = Section(f"{key}_flops", f"{title}, operations", symbols)
    is_prefill = ctx.num_prefill_requests > 0
    pairs = "B × C × (C + 1) / 2" if is_prefill else "B × C"
    section.add("query-key pairs", pairs, ctx.causal_pairs, "count")
    for name, formula in (
        ("qkv_proj", "2 × T × D × (q + 2 × kv) × d × L"),
        ("attn", "2 × 2 × pairs × q × d × L"),
        ("o_proj", "2 × T × q × d × D × L"),
        ("gate_up_proj" if shape.gated_mlp else "up_proj", f"2 × T × D × {up} × L"),
        ("down_proj", "2 × T × DI × D × L"),
        ("lm_head", "2 × B × D × V"),
    ):
        value = flops["gate_up_proj" if name == "up_proj" else name]
        section.add(name, formula, value, "FLOP")
        symbols[name] = value
    parts = " + ".join(line.name for line in section.lines[1:])
    section.add("total", parts, sum(flops.values()), "FLOP")
    section.add("rule of thumb", "2 × N × T", 2 * symbols["N"] * symbols["T"], "FLOP")
    if is_prefill:
        section.note = (
            "Causal: a token attends to itself and those before it, about half of all pairs. A "
            "kernel without that knowledge computes B × C × C of them. lm_head: the last token "
            "of each request only."
        )

    reads, writes = metrics.get_read_bytes_breakdown(ctx), metrics.get_write_bytes_breakdown(ctx)
    moved = Section(f"{key}_bytes", f"{title}, bytes", dict(symbols))
    for name, formula in (
        ("embedding", f"T × {3 if shape.learned_positions else 2} × D × a"),
        ("norms", "Wnorms + (2 × L + 1) × T × 4 × D × a"),
        ("qkv_proj", "Wqkv + L × T × (D + (q + 2 × kv) × d) × a"),
        ("attn", "(B × C + T) × token + L × T × (2 × q + 2 × kv) × d × a"),
        ("o_proj", "Wo + L × T × (q × d + D) × a"),
        ("gate_up_proj", f"Wup + L × T × (D + {up}) × a"),
        ("act_fn", f"L × T × ({up} + DI) × a"),
        ("down_proj", "Wdown + L × T × (DI + D) × a"),
        ("lm_head", "Whead + B × (D + V) × a"),
    ):
        shown = "up_proj" if name == "gate_up_proj" and not shape.gated_mlp else name
        moved.add(shown, formula, reads[name] + writes[name], "traffic")
        moved.symbols[shown] = reads[name] + writes[name]
    parts = " + ".join(line.name for line in moved.lines)
    moved.add("total", parts, metrics.get_step_perf_stats_per_gpu(ctx).num_bytes_per_gpu, "traffic")
    moved.note = (
        "Weights once, every kernel's inputs and outputs once, keys and values of the context once "
        "(read) and those of the new tokens once (written)."
    )
    return [section, moved]


def _training(estimate: Estimate) -> list[Section]:
    shape, seq_len = estimate.shape, estimate.seq_len
    total = sum(perf.num_params(shape).values())
    tokens = estimate.train_tokens or 20 * total
    flops = perf.training_flops(shape, tokens, seq_len, estimate.recompute)
    rate = estimate.hardware.rate(estimate.metrics.activation_dtype)
    symbols = _model_symbols(shape) | {
        "N": total,
        "M": perf.num_matmul_params(shape),
        "tokens": tokens,
        "s": seq_len,
        "b": estimate.batch_size,
        "matmul": flops.matmul,
        "attention": flops.attention,
        "recompute": flops.recompute,
        "total": flops.total,
        "rate": rate,
        "mfu": estimate.mfu,
    }
    work = Section("training_flops", f"Training on {tokens:.4g} tokens, operations", symbols)
    work.add("6 N D", "6 × N × tokens", flops.six_n_d, "FLOP")
    work.add("matmul", "6 × M × tokens", flops.matmul, "FLOP")
    work.add("attention", "12 × L × q × d × (s + 1) / 2 × tokens", flops.attention, "FLOP")
    if estimate.recompute == "full":
        formula = "attention // 3 + 2 × (M - V × D) × tokens"
        work.add("recompute", formula, flops.recompute, "FLOP")
    elif estimate.recompute == "selective":
        work.add("recompute", "attention // 6", flops.recompute, "FLOP")
    parts = "matmul + attention" + (" + recompute" if flops.recompute else "")
    work.add("total", parts, flops.total, "FLOP")
    seconds = (flops.matmul + flops.attention) / (rate * estimate.mfu)
    name = f"on one {estimate.hardware.name}"
    work.add(name, "(matmul + attention) / (rate × mfu)", seconds, "s")
    work.note = (
        "M: weights that are multiplied (the layers' matrices and the head). Each costs 2 "
        "operations a token forward and 4 backward; attention likewise, over (s + 1) / 2 visible "
        "tokens on average."
    )

    parts_of = perf.training_memory(shape, estimate.batch_size, seq_len, estimate.recompute)
    title = f"Training memory for {estimate.batch_size} × {seq_len} tokens"
    held = Section("training_memory", title, dict(symbols))
    formulas = {
        "weights": "N × 2",
        "gradients": "N × 2",
        "master weights": "N × 4",
        "first moment": "N × 4",
        "second moment": "N × 4",
        "layers": "L × " + _activation_formula(shape, estimate.recompute),
        "one whole layer": _activation_formula(shape, "none"),
        "head": "b × s × 4 × (D + V)",
    }
    for name, value in parts_of.items():
        held.add(name, formulas[name], value, "bytes")
        held.symbols[name] = value
    kept = " + ".join(name for name in ("layers", "head") if name in parts_of)
    if estimate.recompute == "full":
        held.symbols["layer"] = parts_of["one whole layer"]
        kept += " + layer"
    held.add("total", f"16 × N + {kept}", sum(parts_of.values()), "bytes")
    held.note = (
        "Mixed precision with Adam: 16 bytes a parameter. The rest are activations kept for the "
        "backward pass."
    )

    kept_by = Section(
        "training_activations", "Activations of the layers, by what is recomputed", dict(symbols)
    )
    for recompute in RECOMPUTE:
        layer = perf.layer_activation_bytes(shape, estimate.batch_size, seq_len, recompute)
        formula = "L × " + _activation_formula(shape, recompute)
        kept_by.add(recompute, formula, shape.num_hidden_layers * layer, "bytes")
    kept_by.note = (
        "Korthikanti et al. 2022: s b h (34 + 5 a s / h) a layer of GPT; here with this model's "
        "widths.\nSelective leaves out the scores, and so does FlashAttention."
    )
    return [work, held, kept_by]


def _activation_formula(shape: ModelShape, recompute: str) -> str:
    """perf.layer_activation_bytes, term by term."""
    if recompute == "full":
        return "b × s × 2 × D"
    dropout = not shape.gated_mlp
    terms = f"8 × D + (4 × q + 4 × kv) × d + {4 if dropout else 6} × DI"
    terms += " + 2 × D" if dropout else ""
    if recompute == "none":
        terms += f" + {5 if dropout else 2} × q × s"
    return f"b × s × ({terms})"


# ---- formulas and numbers ---------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_]\w*")


def fill(formula: str, symbols: Mapping[str, float]) -> str:
    """The formula with numbers for its names: "L × D" -> "28 × 1,024"."""
    return _NAME.sub(lambda match: _number(symbols[match.group()]), formula)


def _number(value: float) -> str:
    if value >= 1e15:
        return f"{value:.4g}"
    if value >= 1e6 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,}"


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """What the formula comes to."""
    text = _NAME.sub(lambda match: repr(symbols[match.group()]), formula).replace("×", "*")
    assert re.fullmatch(r"[\d\s.e+\-*/()]+", text), text
    return eval(text)  # numbers and operators only


def show(value: float, unit: str) -> str:
    """For people: four digits and a unit.

    "bytes" (held) in powers of 1024, "s" from nanoseconds to years, "count" to the last digit, all
    else ("traffic": bytes moved) in powers of 1000.
    """
    if unit == "bytes":
        for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
            if value >= 1024**power:
                return f"{value / 1024**power:,.4g} {name}"
        return f"{value:,.0f} B"
    if unit == "s":
        for scale, name in ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "h"), (1, "s")):
            if value >= scale:
                return f"{value / scale:,.4g} {name}"
        for scale, name in ((1e-3, "ms"), (1e-6, "µs")):
            if value >= scale:
                return f"{value / scale:.4g} {name}"
        return f"{value / 1e-9:.4g} ns"
    if unit == "count":
        return f"{value:,.0f}"
    name = {"params": "", "traffic": "B"}.get(unit, unit)
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if 10**power <= value < 1e21:
            # A model of a G of parameters is called one of a B.
            prefix = "B" if unit == "params" and prefix == "G" else prefix
            return f"{value / 10**power:.4g} {prefix}{name}"
    return f"{value:,.4g} {name}".strip()
