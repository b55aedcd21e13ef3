"""What each sampling step has to compute, spelled out row by row in float64 NumPy.

The definitions are vLLM's (v1/sample in 0.23.0); the noise is this project's own. Slow and plain on
purpose: nothing here is shared with the code under test but SamplingParams.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.logits_processor import BatchUpdateBuilder, build_logitsprocs
from nanovllm.v1.sample.metadata import SamplingMetadata, encode_seed

NEG_INF = -np.inf


@dataclass
class Row:
    """One request in a batch."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    bad_words: list[list[int]] | None = None

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def make_metadata(rows: list[Row], vocab_size: int, device: str = "cpu") -> SamplingMetadata:
    """The batch as the model runner describes it to the sampler."""
    with torch.device(device):
        return _make_metadata(rows, vocab_size, torch.device(device))


def _make_metadata(rows: list[Row], vocab_size: int, device: torch.device) -> SamplingMetadata:
    params = [row.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params])
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    seeds = [encode_seed(p.seed) for p in params]
    logprobs = [vocab_size if p.logprobs == -1 else p.logprobs for p in params]
    prompts = torch.full((len(rows), max(len(r.prompt) for r in rows)), vocab_size)
    allowed = None
    if any(p.allowed_token_ids is not None for p in params):
        allowed = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        prompts[i, : len(row.prompt)] = torch.tensor(row.prompt)
        if allowed is not None and row.params.allowed_token_ids is not None:
            allowed[i] = True
            allowed[i, row.params.allowed_token_ids] = False
    logitsprocs = build_logitsprocs(len(rows), device)
    builder = BatchUpdateBuilder()
    builder.added += [(i, row.params, row.prompt, row.output) for i, row in enumerate(rows)]
    update = builder.get_and_reset(len(rows))
    for processor in logitsprocs.all:
        processor.update_state(update)
    greedy = temperature < 1e-5
    return SamplingMetadata(
        temperature=None if greedy.all() else temperature,
        all_greedy=bool(greedy.all()),
        all_random=not greedy.any(),
        top_p=torch.tensor([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None,
        top_k=torch.tensor(top_k, dtype=torch.int32) if min(top_k) < vocab_size else None,
        seeds=torch.tensor(seeds) if any(s != -1 for s in seeds) else None,
        positions=torch.tensor([row.position for row in rows]),
        max_num_logprobs=max((n for n in logprobs if n is not None), default=None),
        no_penalties=all(
            (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0, 0, 1)
            for p in params
        ),
        prompt_token_ids=prompts,
        frequency_penalties=torch.tensor([p.frequency_penalty for p in params]),
        presence_penalties=torch.tensor([p.presence_penalty for p in params]),
        repetition_penalties=torch.tensor([p.repetition_penalty for p in params]),
        output_token_ids=[row.output for row in rows],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={i: row.bad_words for i, row in enumerate(rows) if row.bad_words},
        logitsprocs=logitsprocs,
    )


# ---- the steps, in order, on one row ----


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def apply_masks_and_bias(logits: np.ndarray, row: Row) -> np.ndarray:
    """Allowed ids, bad words, min tokens, logit bias."""
    logits, params = logits.copy(), row.params
    if params.allowed_token_ids is not None:
        for token in range(len(logits)):
            if token not in params.allowed_token_ids:
                logits[token] = NEG_INF
    for *beginning, last in row.bad_words or []:
        generated = row.output[len(row.output) - len(beginning) :]
        if len(row.output) >= len(beginning) and generated == beginning:
            logits[last] = NEG_INF
    if len(row.output) < params.min_tokens:
        for token in params.all_stop_token_ids:
            logits[token] = NEG_INF
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    return logits


def apply_penalties(logits: np.ndarray, row: Row) -> np.ndarray:
    """Repetition counts the prompt, frequency and presence do not; repetition scales away from the
    token (divides a positive logit, multiplies any other), the others subtract."""
    logits, params = logits.copy(), row.params
    for token in set(row.prompt) | set(row.output):
        if logits[token] > 0:
            logits[token] /= params.repetition_penalty
        else:
            logits[token] *= params.repetition_penalty
    for token in set(row.output):
        logits[token] -= params.frequency_penalty * row.output.count(token)
        logits[token] -= params.presence_penalty
    return logits


def apply_filters(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, min-p, top-k, top-p (of what top-k left). Ties with the last kept token stay."""
    logits = logits / params.temperature
    probs = np.exp(log_softmax(logits))
    logits = np.where(probs < params.min_p * probs.max(), NEG_INF, logits)
    if 0 < params.top_k < len(logits):
        kth = np.sort(logits)[::-1][params.top_k - 1]
        logits = np.where(logits < kth, NEG_INF, logits)
    if params.top_p < 1:
        probs = np.exp(log_softmax(logits))
        mass, threshold = 0.0, np.inf
        for token in np.argsort(-logits, kind="stable"):
            if mass >= params.top_p:
                break
            threshold = logits[token]
            mass += probs[token]
        logits = np.where(logits < threshold, NEG_INF, logits)
    return logits


def logprobs_of(raw_logits: np.ndarray, token: int, num: int) -> tuple[list[int], list[float], int]:
    """Token ids and logprobs, the given token first; its rank counts tokens at least as likely."""
    logprobs = log_softmax(raw_logits)
    best = list(np.argsort(-logprobs, kind="stable")[:num])
    ids = [token, *best]
    return ids, [logprobs[i] for i in ids], int((logprobs >= logprobs[token]).sum())


# ---- the noise, in Python integers ----

M32, M64 = 2**32 - 1, 2**64 - 1


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def noise_bits(seed: int, position: int, token: int) -> int:
    golden = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + golden) & M64) + (position + 1) * golden) & M64)
    x = token ^ (key & M32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB & M32
    x = (x ^ (x >> 11)) * 0xAC4C1B51 & M32
    x = (x + (key >> 32)) & M32
    x = (x ^ (x >> 15)) * 0x31848BAB & M32
    return (x ^ (x >> 14)) & (2**31 - 1)


def seeded_draw(filtered_logits: np.ndarray, seed: int, position: int) -> int:
    """argmax of logit + Gumbel noise."""
    bits = [noise_bits(seed, position, token) for token in range(len(filtered_logits))]
    uniform = (np.array(bits, dtype=np.float64) + 0.5) / 2**31
    return int(np.argmax(filtered_logits - np.log(-np.log1p(-uniform))))
