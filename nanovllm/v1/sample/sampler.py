"""From logits to the next tokens.

Every row of the batch is sampled at once, though each has its own parameters: a step that no row
needs is skipped, and in a step that some rows need the others hold neutral values.

Upstream: vllm/v1/sample/sampler.py (0.23.0). Randomness differs: upstream draws from torch's global
generator and from one torch.Generator per seeded request, which the model runner rewinds for
samples that are discarded; here noise is a hash of (seed, position, token id), see
ops/seeded_noise.py.
Left out: other logprobs modes than raw_logprobs, logprob_token_ids, speculative tokens, the
thinking budget.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.sampling_params import SAMPLING_EPS
from nanovllm.triton_utils import use_triton
from nanovllm.v1.outputs import LogprobsTensors, SamplerOutput
from nanovllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from nanovllm.v1.sample.metadata import UNSEEDED, SamplingMetadata
from nanovllm.v1.sample.ops.bad_words import apply_bad_words
from nanovllm.v1.sample.ops.gumbel import gumbel_sample
from nanovllm.v1.sample.ops.logprobs import batched_count_greater_than
from nanovllm.v1.sample.ops.penalties import apply_all_penalties
from nanovllm.v1.sample.ops.seeded_noise import row_keys, step_keys
from nanovllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from nanovllm.v1.utils import async_tensor_h2d


class Sampler(nn.Module):
    """Samples one token per row.

    1. Logprobs of the raw logits, if any row asks for them.
    2. Allowed token ids.       \\
    3. Bad words.                | these may change which token is the most likely,
    4. Min-tokens, logit bias.   | so greedy rows go through them as well
    5. Penalties.               /
    6. Greedy rows: argmax. If all rows are greedy, that is all.
    7. Temperature.
    8. Min-p.
    9. Top-k, top-p, and a random draw.
    10. The logprobs of the sampled token and of the best ones, from 1.

    On a GPU steps 6 to 9 are a few Triton kernels (ops/gumbel.py, ops/topk_topp_triton.py), and if
    no row needs steps 2 to 5 these read the model's own logits, whatever their dtype. Nothing is
    read back to the host, so a step can be launched before the last one is done.

    Args:
        seed: of the generator that gives rows without a seed of their own a new one each step. The
            same seed and the same sequence of batches give the same tokens.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.topk_topp_sampler = TopKTopPSampler()
        # On the CPU whatever the logits' device: 8 bytes a row, and the same draws everywhere.
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Sample the next token of every row.

        Args:
            logits: [num_reqs, vocab_size] of any float dtype; float32 ones are overwritten.
            sampling_metadata: one row a request.
        """
        num_logprobs = sampling_metadata.max_num_logprobs
        # Before anything is changed in place: users see the model's own probabilities.
        raw_logprobs = None if num_logprobs is None else self.compute_logprobs(logits)

        if self.needs_float32(logits, sampling_metadata):
            logits = self.apply_logits_processors(logits.to(torch.float32), sampling_metadata)
        sampled = self.sample(logits, sampling_metadata)

        logprobs_tensors = None
        if raw_logprobs is not None and num_logprobs is not None:
            logprobs_tensors = self.gather_logprobs(raw_logprobs, num_logprobs, sampled)
        return SamplerOutput(sampled.to(torch.int32).unsqueeze(-1), logprobs_tensors)

    @staticmethod
    def needs_float32(logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> bool:
        """Whether the logits must be converted, since torch operations will change them (the
        kernels convert what they read). Always true without Triton."""
        return not (
            use_triton(logits)
            and sampling_metadata.no_penalties
            and sampling_metadata.allowed_token_ids_mask is None
            and not sampling_metadata.bad_words_token_ids
            and all(p.is_idle() for p in sampling_metadata.logitsprocs.non_argmax_invariant)
        )

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> torch.Tensor:
        """Everything that greedy rows need too (steps 2 to 5), in place: [num_reqs, vocab_size]."""
        if sampling_metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(sampling_metadata.allowed_token_ids_mask, -float("inf"))
        if sampling_metadata.bad_words_token_ids:
            apply_bad_words(
                logits, sampling_metadata.bad_words_token_ids, sampling_metadata.output_token_ids
            )
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        return self.apply_penalties(logits, sampling_metadata)

    @staticmethod
    def apply_penalties(logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor:
        """Repetition, frequency and presence penalties, in place: [num_reqs, vocab_size]."""
        if sampling_metadata.no_penalties:
            return logits
        assert sampling_metadata.prompt_token_ids is not None
        return apply_all_penalties(
            logits,
            sampling_metadata.prompt_token_ids,
            sampling_metadata.presence_penalties,
            sampling_metadata.frequency_penalties,
            sampling_metadata.repetition_penalties,
            (
                sampling_metadata.output_token_ids
                if sampling_metadata.output_token_ids_tensor is None
                else sampling_metadata.output_token_ids_tensor
            ),
            sampling_metadata.last_sampled_token_ids,
        )

    def sample(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor:
        """Steps 6 to 9: [num_reqs] int64 token ids. May overwrite the logits."""
        if use_triton(logits):
            return self.sample_cuda(logits, sampling_metadata)
        greedy_sampled = None
        if not sampling_metadata.all_random:
            greedy_sampled = self.greedy_sample(logits)
            if sampling_metadata.all_greedy:
                return greedy_sampled

        temperature = sampling_metadata.temperature
        assert temperature is not None
        logits = self.apply_temperature(logits, temperature, sampling_metadata.all_random)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        random_sampled = self.topk_topp_sampler(
            logits,
            self.noise_keys(logits, sampling_metadata.seeds, sampling_metadata.positions),
            sampling_metadata.top_k,
            sampling_metadata.top_p,
        )
        if greedy_sampled is None:
            return random_sampled
        return torch.where(temperature < SAMPLING_EPS, greedy_sampled, random_sampled)

    def sample_cuda(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> torch.Tensor:
        """The same by Triton kernels, in which temperature and min-p are included."""
        if sampling_metadata.all_greedy:
            return gumbel_sample(logits)
        temperature, log_min_p = sampling_metadata.temperature, None
        assert temperature is not None
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            # The kernels know this one; there is no other.
            assert isinstance(processor, MinPLogitsProcessor)
            if not processor.is_idle():
                log_min_p = processor.log_min_p.squeeze(1)
        return self.topk_topp_sampler.forward_cuda(
            logits,
            self.noise_keys(logits, sampling_metadata.seeds, sampling_metadata.positions),
            sampling_metadata.top_k,
            sampling_metadata.top_p,
            temperature,
            log_min_p,
        )

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, [num_reqs] int64. Of equal logits the lowest token id
        wins: torch.argmax returns the first maximum, on the CPU and on CUDA."""
        return logits.argmax(dim=-1)

    @staticmethod
    def apply_temperature(
        logits: torch.Tensor, temperature: torch.Tensor, all_random: bool
    ) -> torch.Tensor:
        """Divide in place; greedy rows (0) by 1, as their draw will not be used."""
        if not all_random:
            temperature = torch.where(temperature < SAMPLING_EPS, 1.0, temperature)
        return logits.div_(temperature.unsqueeze(dim=1))

    def noise_keys(
        self, logits: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """The keys of this step's noise, [num_reqs, 2] int32.

        Seeded rows: a function of their seed and position alone. Other rows: of a seed drawn just
        now. One is drawn for every row, needed or not, so that no row's draw depends on its
        neighbours'.
        """
        fresh = torch.empty(logits.shape[0], dtype=torch.int64, device="cpu")
        fresh.random_(generator=self.generator)
        fresh = async_tensor_h2d(fresh, logits.device)
        if use_triton(logits):
            return step_keys(fresh, seeds, positions)
        if seeds is None:
            return row_keys(fresh, torch.zeros_like(fresh))
        assert positions is not None
        unseeded = seeds == UNSEEDED
        return row_keys(torch.where(unseeded, fresh, seeds), positions.masked_fill(unseeded, 0))

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Natural log-softmax of [num_positions, vocab_size] logits, as a new float32 tensor."""
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    @staticmethod
    def gather_logprobs(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """The logprobs of one given token per position and of the best ones.

        Args:
            logprobs: [num_positions, vocab_size] float32.
            num_logprobs: how many of the best; 0 is allowed.
            token_ids: [num_positions] int64, the sampled tokens, or the prompt's own next tokens.

        Returns:
            Column 0 is the given token (which may appear among the best again), then the best in
            descending order. A token's rank is the number of tokens at least as likely.
        """
        token_ids = token_ids.unsqueeze(-1)
        token_logprobs = logprobs.gather(-1, token_ids)
        top_logprobs, top_ids = logprobs.topk(num_logprobs, dim=-1)
        return LogprobsTensors(
            logprob_token_ids=torch.cat((token_ids, top_ids), dim=1).to(torch.int32),
            logprobs=torch.cat((token_logprobs, top_logprobs), dim=1),
            selected_token_ranks=batched_count_greater_than(logprobs, token_logprobs),
        )
