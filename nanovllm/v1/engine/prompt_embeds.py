"""Prompts given by their embeddings: what is checked, and what the prefix cache knows them by.

To the scheduler such a prompt is that many tokens of id 0; the embeddings travel along, and the
runner puts them where those tokens' own would be. What looks at a prompt's ids is refused here.

A block's name in the prefix cache comes from its tokens, which here say nothing. So the content of
the embeddings, all of them, is made part of the salt: only prompts of the very same embeddings (the
samples of n > 1, above all) share blocks.

Upstream: vllm/renderers/base.py, `_process_embeds` (0.23.0)
Left out: hashing block by block, with which prompts share equal beginnings; the switch
enable_prompt_embeds, for here all of a tensor is checked.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import torch

    from nanovllm.config import ModelConfig
    from nanovllm.sampling_params import SamplingParams


def process_prompt_embeds(
    fields: dict[str, Any], params: SamplingParams, model_config: ModelConfig
) -> torch.Tensor:
    """The prompt's embeddings, [num_tokens, hidden_size], on the host, in the model's dtype.

    Args:
        fields: the prompt as a dict, with "prompt_embeds".

    Raises:
        VLLMValidationError: they are not such a tensor, hold NaN or infinity, or the request needs
            token ids.
    """
    import torch

    embeds = fields["prompt_embeds"]
    if "prompt_token_ids" in fields:
        _fail("prompt_embeds", None, "cannot stand beside prompt_token_ids")
    if not isinstance(embeds, torch.Tensor):
        _fail("prompt_embeds", embeds, f"must be a torch.Tensor, but is a {type(embeds).__name__}")
    hidden_size = model_config.get_hidden_size()
    shape = tuple(embeds.shape)
    if embeds.dim() != 2 or shape[1] != hidden_size:
        _fail("prompt_embeds", shape, f"must be of shape (tokens, {hidden_size}), not {shape}")
    if not embeds.is_floating_point():
        _fail("prompt_embeds", embeds.dtype, f"must be of a float dtype, not {embeds.dtype}")
    # A copy: it may go on changing in the user's hands.
    embeds = embeds.detach().to("cpu", model_config.torch_dtype, copy=True).contiguous()
    if not embeds.isfinite().all():
        _fail("prompt_embeds", None, f"must be finite numbers, also as {model_config.torch_dtype}")
    if getattr(params, "prompt_logprobs", None) is not None:
        _fail("prompt_logprobs", params.prompt_logprobs, "needs token ids, not prompt_embeds")
    if getattr(params, "repetition_penalty", 1.0) != 1.0:
        _fail("repetition_penalty", params.repetition_penalty, "needs token ids, not prompt_embeds")
    return embeds


def embeds_cache_salt(prompt_embeds: torch.Tensor, cache_salt: str | None) -> str:
    """A salt that no prompt of tokens and no prompt of other embeddings has."""
    import torch

    content = hashlib.sha256(prompt_embeds.view(torch.uint8).numpy().data).hexdigest()
    return f"{cache_salt or ''}\0prompt_embeds:{content}"


def _fail(parameter: str, value: Any, problem: str) -> NoReturn:
    raise VLLMValidationError(f"{parameter} {problem}.", parameter=parameter, value=value)
