"""Top-k and top-p filtering, then one random draw per row.

Both filters come down to one number a row: the smallest logit that survives. Tokens that tie with
it survive too, all of them, so that the outcome does not depend on how a sort orders equal logits.

Upstream: vllm/v1/sample/ops/topk_topp_sampler.py (0.23.0). Upstream's top-k keeps ties as well (its
Triton kernel does not); its top-p cuts through them wherever the sort put them. Upstream draws
exponential noise for the whole vocabulary from torch generators: ops/seeded_noise.py says what is
done here. On a CPU upstream uses Triton where installed, else torch.topk for top-k alone and a full
sort otherwise; `forward_cpu` here sorts only as many candidates as turn out to be needed, and
`forward_cuda` sorts nothing.
Left out: FlashInfer, aiter and XPU variants, processed logprobs, float64 noise.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.triton_utils import use_triton
from nanovllm.v1.sample.ops.gumbel import gumbel_sample
from nanovllm.v1.sample.ops.seeded_noise import gumbel_noise
from nanovllm.v1.sample.ops.topk_topp_triton import top_k_top_p_sample

# Rows are sampled in blocks of about so many logits on a CPU: noise and scratch stay in its cache.
_CPU_BLOCK_NUMEL = 2**18
_FIRST_NUM_CANDIDATES = 256
_MORE_CANDIDATES = 8  # the factor by which a row that was not done tries again


class TopKTopPSampler(nn.Module):
    """Filters logits and samples a token per row. May overwrite the logits."""

    def forward(
        self,
        logits: torch.Tensor,
        noise_keys: torch.Tensor,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sample from softmax(logits) restricted to the top k and top p.

        Args:
            logits: [num_reqs, vocab_size] float32, temperature applied; -inf = forbidden.
            noise_keys: [num_reqs, 2] int32, from seeded_noise.row_keys.
            k: [num_reqs] int32 in 1..vocab_size (vocab_size: no limit), or None: no row has one.
            p: [num_reqs] float32 in (0, 1] (1: no limit), or None: no row has one.

        Returns:
            [num_reqs] int64 token ids.
        """
        if use_triton(logits):
            return self.forward_cuda(logits, noise_keys, k, p)
        filtered = k is not None or p is not None
        if filtered and logits.device.type == "cpu":
            return self.forward_cpu(logits, noise_keys, k, p)
        return self.forward_native(logits, noise_keys, k, p)

    def forward_native(
        self,
        logits: torch.Tensor,
        noise_keys: torch.Tensor,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Any device: one sort of everything, no value read back to the host."""
        return random_sample(apply_top_k_top_p(logits, k, p), noise_keys)

    def forward_cuda(
        self,
        logits: torch.Tensor,
        noise_keys: torch.Tensor,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
        temperature: torch.Tensor | None = None,
        log_min_p: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Triton kernels: no sort, nothing read back to the host, the logits left as they are.

        The tokens are forward_native's, but for scores that tie up to rounding. Also, which saves
        passes over the logits:

        Args:
            logits: of any float dtype.
            temperature: [num_reqs] float32, not applied to the logits yet; greedy below 1e-5.
            log_min_p: [num_reqs] float32, logarithms of min-p (-inf: none).
        """
        if k is None and p is None and log_min_p is None:
            return gumbel_sample(logits, temperature, noise_keys)
        return top_k_top_p_sample(logits, noise_keys, k, p, temperature, log_min_p)

    def forward_cpu(
        self,
        logits: torch.Tensor,
        noise_keys: torch.Tensor,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same tokens as forward_native, sorting little and drawing noise for candidates only.

        The most likely `size` tokens of a row are enough if the last of them is already below the
        row's threshold; the rows for which they are not try again with eight times as many.
        """
        vocab_size = logits.shape[1]
        limited = _is_limited(k, p, vocab_size)
        sampled = torch.empty(logits.shape[0], dtype=torch.int64)
        free = (~limited).nonzero().squeeze(1)
        if free.numel():
            sampled[free] = random_sample(logits[free], noise_keys[free])
        rows = limited.nonzero().squeeze(1)
        size = _first_num_candidates(k, vocab_size)
        while rows.numel():
            token_ids, done = _sample_among_largest(
                logits[rows],
                noise_keys[rows],
                None if k is None else k[rows],
                None if p is None else p[rows],
                size,
            )
            sampled[rows[done]] = token_ids[done]
            rows, size = rows[~done], min(size * _MORE_CANDIDATES, vocab_size)
        return sampled


def apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Set the logits outside the top k, or outside the top p of those, to -inf, in place.

    Shapes as in TopKTopPSampler.forward.
    """
    if k is None and p is None:
        return logits
    values = logits.sort(dim=-1, descending=True).values
    threshold = top_k_top_p_threshold(values, logits, k, p)
    return logits.masked_fill_(logits < threshold.unsqueeze(1), -float("inf"))


def top_k_top_p_threshold(
    values: torch.Tensor,
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> torch.Tensor:
    """The smallest logit that survives top-k and then top-p, per row; -inf where nothing is cut.

    Top-p keeps a token if the tokens more likely than it have together less than p of the
    probability that top-k left.

    Args:
        values: [num_rows, size], the row's largest logits in descending order. Too few are noticed
            by the caller: the last of them is not below the threshold.
        logits: [num_rows, vocab_size], the whole rows.
        k, p: as in TopKTopPSampler.forward.

    Returns:
        [num_rows] float32.
    """
    size, vocab_size = values.shape[1], logits.shape[1]
    threshold = torch.full_like(values[:, :1], -float("inf"))
    if k is not None:
        has_k = (k < vocab_size).unsqueeze(1)
        kth = values.gather(1, (k.clamp(1, size) - 1).to(torch.int64).unsqueeze(1))
        threshold = torch.where(has_k, kth, threshold)
    if p is not None:
        p = p.unsqueeze(1)
        values = values.masked_fill(values < threshold, -float("inf"))
        # Probabilities in units of the most likely token's.
        weights = (values - values[:, :1]).exp_()
        mass_before = weights.cumsum(dim=-1).sub_(weights)
        # 1 / p_max: far quicker than logsumexp on a CPU.
        total = logits.softmax(dim=-1).amax(dim=-1, keepdim=True).reciprocal_()
        if k is not None:
            total = torch.where(has_k, mass_before[:, -1:] + weights[:, -1:], total)
        num_kept = (mass_before < p * total).sum(dim=-1, keepdim=True).clamp_(min=1)
        # p = 1 must cut nothing, though rounded masses may reach the total early.
        p_threshold = torch.where(p < 1, values.gather(1, num_kept - 1), threshold)
        threshold = torch.maximum(threshold, p_threshold)
    return threshold.squeeze(1)


def random_sample(
    logits: torch.Tensor, noise_keys: torch.Tensor, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw one column per row with probability softmax(logits), by the Gumbel trick.

    Args:
        logits: [num_rows, num_columns] float32.
        noise_keys: [num_rows, 2] int32.
        token_ids: [num_rows, num_columns] int32, the token that each column stands for; None: the
            column's own number. A token's noise does not depend on the column it is in.

    Returns:
        [num_rows] int64 columns.
    """
    num_rows, num_columns = logits.shape
    if token_ids is None:
        columns = torch.arange(num_columns, dtype=torch.int32, device=logits.device)
        token_ids = columns.expand(num_rows, -1)
    block = num_rows
    if logits.device.type == "cpu":
        block = max(1, _CPU_BLOCK_NUMEL // num_columns)
    parts = []
    for start in range(0, num_rows, block):
        rows = slice(start, start + block)
        scores = gumbel_noise(noise_keys[rows], token_ids[rows]).add_(logits[rows])
        parts.append(scores.argmax(dim=-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_limited(k: torch.Tensor | None, p: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """[num_reqs] bool: rows that top-k or top-p may cut."""
    if p is None:
        assert k is not None
        return k < vocab_size
    return p < 1 if k is None else (p < 1) | (k < vocab_size)


def _first_num_candidates(k: torch.Tensor | None, vocab_size: int) -> int:
    """Enough for the largest k in use with room for ties; a guess where only top-p is in use."""
    size = _FIRST_NUM_CANDIDATES
    if k is not None:
        size = max(64, 2 * int(k.masked_fill(k >= vocab_size, 0).max()))
    return min(size, vocab_size)


def _sample_among_largest(
    logits: torch.Tensor,
    noise_keys: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter and sample, looking only at the `size` largest logits of each row.

    Shapes as in TopKTopPSampler.forward.

    Returns:
        [num_rows] int64 token ids, and [num_rows] bool: whether `size` was enough, so that the
        token is the one that a full sort would have given.
    """
    if size < logits.shape[1]:
        values, token_ids = logits.topk(size, dim=-1)
    else:
        values, token_ids = logits.sort(dim=-1, descending=True)
    threshold = top_k_top_p_threshold(values, logits, k, p)
    last = values[:, -1]
    done = (last < threshold) | last.isneginf()
    if size == logits.shape[1]:
        done.fill_(True)
    values.masked_fill_(values < threshold.unsqueeze(1), -float("inf"))
    choice = random_sample(values, noise_keys, token_ids.to(torch.int32))
    return token_ids.gather(1, choice.unsqueeze(1)).squeeze(1), done
