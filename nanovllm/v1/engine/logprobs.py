"""From the sampler's arrays to the `Logprob` dicts of a request.

Upstream: vllm/v1/engine/logprobs.py (0.23.0)
Left out: FlatLogprobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.logprobs import (
    PromptLogprobs,
    SampleLogprobs,
    append_logprobs_for_next_position,
)
from nanovllm.tokenizers import (
    REPLACEMENT_CHARACTER,
    convert_ids_list_to_tokens,
    decode,
    remove_common_prefix,
)
from nanovllm.v1.engine.detokenizer import MAX_BYTES_BEFORE_LAST

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from nanovllm.v1.outputs import LogprobsLists, LogprobsTensors


@dataclass
class LogprobsProcessor:
    """One request's logprobs so far. What was not asked for is None and stays None."""

    tokenizer: PreTrainedTokenizerBase | None  # None: tokens are not decoded
    logprobs: SampleLogprobs | None
    prompt_logprobs: PromptLogprobs | None
    cumulative_logprob: float | None
    num_logprobs: int | None  # candidates besides the sampled token; -1: the whole vocabulary
    num_prompt_logprobs: int | None

    @classmethod
    def from_new_request(
        cls, tokenizer: PreTrainedTokenizerBase | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        params = request.sampling_params
        num_logprobs, num_prompt_logprobs = params.logprobs, params.prompt_logprobs
        return cls(
            tokenizer=tokenizer,
            logprobs=None if num_logprobs is None else [],
            # Nothing precedes the first prompt token, so it has no logprob.
            prompt_logprobs=None if num_prompt_logprobs is None else [None],
            cumulative_logprob=None if num_logprobs is None else 0.0,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Take in what one step produced for this request."""
        if output.new_logprobs is not None and self.num_logprobs is not None:
            self._update_sample_logprobs(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None and self.num_prompt_logprobs is not None:
            self._update_prompt_logprobs(output.new_prompt_logprobs_tensors)

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """Hand the prompt's logprobs out once, for DELTA mode; afterwards the list is empty."""
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs:
            self.prompt_logprobs = []
        return prompt_logprobs

    def _update_sample_logprobs(self, lists: LogprobsLists) -> None:
        """One row a generated token, its columns as in LogprobsLists."""
        assert self.logprobs is not None
        assert self.num_logprobs is not None
        assert self.cumulative_logprob is not None
        for token_ids, logprobs, rank in zip(
            lists.logprob_token_ids.tolist(),
            lists.logprobs.tolist(),
            lists.sampled_token_ranks.tolist(),
            strict=True,
        ):
            self.cumulative_logprob += logprobs[0]
            self._append(self.logprobs, token_ids, logprobs, rank, self.num_logprobs)

    def _update_prompt_logprobs(self, tensors: LogprobsTensors) -> None:
        """One row a prompt token from the second on, its columns as in LogprobsTensors."""
        assert self.prompt_logprobs is not None
        assert self.num_prompt_logprobs is not None
        for token_ids, logprobs, rank in zip(
            tensors.logprob_token_ids.tolist(),
            tensors.logprobs.tolist(),
            tensors.selected_token_ranks.tolist(),
            strict=True,
        ):
            self._append(self.prompt_logprobs, token_ids, logprobs, rank, self.num_prompt_logprobs)

    def _append(
        self,
        container: SampleLogprobs | PromptLogprobs,
        token_ids: list[int],
        logprobs: list[float],
        rank: int,
        num_logprobs: int,
    ) -> None:
        """Decode one row's tokens and append it to `container`."""
        if num_logprobs != -1:
            token_ids = token_ids[: num_logprobs + 1]  # decode no more than will be shown
        append_logprobs_for_next_position(
            container,
            token_ids,
            logprobs,
            self._decode_candidates(token_ids, container),
            rank,
            num_logprobs,
        )

    def _decode_candidates(
        self, token_ids: list[int], previous: SampleLogprobs | PromptLogprobs
    ) -> list[str] | list[None]:
        """Text of tokens that compete for one place, `previous` holding the places before it."""
        if self.tokenizer is None:
            return [None] * len(token_ids)
        decoded = convert_ids_list_to_tokens(self.tokenizer, token_ids)
        if any(text.endswith(REPLACEMENT_CHARACTER) for text in decoded):
            context = [next(iter(entry)) for entry in previous[-MAX_BYTES_BEFORE_LAST:] if entry]
            decoded = [
                self._correct_decoded_token(token_id, context)
                if text.endswith(REPLACEMENT_CHARACTER)
                else text
                for token_id, text in zip(token_ids, decoded, strict=True)
            ]
        return decoded

    def _correct_decoded_token(self, token_id: int, context: list[int]) -> str:
        """Text of a token that alone is not whole characters.

        The token that completes a character gets all of it; those that only began it get "", so
        that the decoded tokens of a sequence still join to its text.

        Args:
            token_id: the token.
            context: the sequence's tokens before it, oldest first, at most three.
        """
        assert self.tokenizer is not None
        for first in range(len(context) - 1, -1, -1):
            before = context[first:]
            text = decode(self.tokenizer, [*before, token_id])
            if text.endswith(REPLACEMENT_CHARACTER):
                continue
            # From where it differs from what the tokens before show alone: the character's start.
            return remove_common_prefix(text, decode(self.tokenizer, before))
        return ""
