"""From a user's prompt and parameters to an EngineCoreRequest.

Everything a user can get wrong about one request is found here, before the core hears of it: what
comes out can be scheduled, and will end.

Upstream: vllm/v1/engine/input_processor.py and vllm/renderers/ (0.23.0)
Left out: multimodal, LoRA, pooling; truncation of prompts. Random suffixes of
request ids: upstream makes the id "x" into "x-1f3b52c8" so that users may use one id twice; here an
id that is in use is refused (`OutputProcessor.add_request`), and a run can be repeated to the
letter. Where the core runs elsewhere the suffix is a count (`assign_request_id`).
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.exceptions import VLLMValidationError
from nanovllm.inputs import PromptType
from nanovllm.sampling_params import INT64_MAX, SamplingParams
from nanovllm.tokenizers import get_tokenizer
from nanovllm.v1.engine import EngineCoreRequest
from nanovllm.v1.engine.prompt_embeds import embeds_cache_salt, process_prompt_embeds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.config import VllmConfig

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "priority")


class InputProcessor:
    """Tokenizes and checks; holds the tokenizer."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """
        Raises:
            VLLMValidationError: the tokenizer cannot be loaded.
        """
        self.model_config = vllm_config.model_config
        self.generation_config_fields = self.model_config.try_get_generation_config()
        self._request_counter = itertools.count()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if not self.model_config.skip_tokenizer_init:
            self.tokenizer = get_tokenizer(self.model_config.tokenizer or self.model_config.model)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            VLLMValidationError: the engine was started with skip_tokenizer_init.
        """
        if self.tokenizer is None:
            raise VLLMValidationError(
                "there is no tokenizer, because skip_tokenizer_init is set.",
                parameter="skip_tokenizer_init",
                value=True,
            )
        return self.tokenizer

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> EngineCoreRequest:
        """Tokenize, check, and fill in what was left open.

        Args:
            prompt: see nanovllm/inputs.py; a `priority` in it goes before the argument.
            params: not changed; the request gets a copy.
            arrival_time: seconds, `time.time()`; None: now.

        Raises:
            VLLMValidationError: the request can never run as given.
        """
        if not isinstance(request_id, str):
            _fail(
                "request_id",
                request_id,
                f"must be a str, but is of type {type(request_id).__name__}",
            )
        if arrival_time is None:
            arrival_time = time.time()
        fields = self._parse_prompt(prompt)
        cache_salt, prompt_embeds = fields.get("cache_salt"), None
        if "prompt_embeds" in fields:
            prompt_embeds = process_prompt_embeds(fields, params, self.model_config)
            prompt_token_ids = [0] * len(prompt_embeds)
            cache_salt = embeds_cache_salt(prompt_embeds, cache_salt)
        else:
            prompt_token_ids = self._tokenize(fields)
        self._validate_prompt(prompt_token_ids)
        priority = fields.get("priority", priority)
        if type(priority) is not int:
            _fail("priority", priority, f"must be an int, but is of type {type(priority).__name__}")
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=self._process_params(params, len(prompt_token_ids)),
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            priority=priority,
            external_req_id=request_id,
            prompt_embeds=prompt_embeds,
        )

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        """Give `request` an id that no other ever had; `external_req_id` stays the user's.

        Needed where a core is steps ahead of what its client has seen: an id that is used again
        right after an abort would get the last outputs of the request before.
        """
        request.request_id = f"{request.external_req_id}-{next(self._request_counter)}"

    def _parse_prompt(self, prompt: PromptType) -> dict[str, Any]:
        """Bring every form of prompt into that of a dict, its options checked."""
        if isinstance(prompt, str):
            return {"prompt": prompt}
        if isinstance(prompt, list):
            return {"prompt_token_ids": prompt}
        if not isinstance(prompt, dict):
            _fail(
                "prompt",
                prompt,
                "must be a str, a list of token ids or a dict with one of them under 'prompt' or "
                f"'prompt_token_ids' or embeddings under 'prompt_embeds', but is of type "
                f"{type(prompt).__name__}",
            )
        fields: dict[str, Any] = dict(prompt)
        unknown = [key for key in fields if key not in PROMPT_KEYS]
        if unknown:
            _fail("prompt", unknown, f"has the key {unknown[0]!r}; known: {', '.join(PROMPT_KEYS)}")
        if fields.keys().isdisjoint(("prompt", "prompt_token_ids", "prompt_embeds")):
            _fail("prompt", prompt, "has neither 'prompt' nor 'prompt_token_ids'")
        cache_salt = fields.get("cache_salt")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            _fail("cache_salt", cache_salt, f"must be a non-empty str, got {cache_salt!r}")
        if cache_salt is not None:
            _check_unicode("cache_salt", cache_salt)
        return fields

    def _tokenize(self, fields: dict[str, Any]) -> list[int]:
        """The prompt's token ids; given ones go before text."""
        if "prompt_token_ids" in fields:
            token_ids = fields["prompt_token_ids"]
            if not isinstance(token_ids, list):
                _fail(
                    "prompt_token_ids",
                    token_ids,
                    f"must be a list of int, but is of type {type(token_ids).__name__}",
                )
            return list(token_ids)
        text = fields["prompt"]
        if not isinstance(text, str):
            _fail("prompt", text, f"must be a str, but is of type {type(text).__name__}")
        return self.encode(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: put what the tokenizer puts around a text, such as a BOS token;
                False for text from a chat template, which has them.

        Raises:
            VLLMValidationError: there is no tokenizer, or `text` holds half of a surrogate pair.
        """
        if self.tokenizer is None:
            _fail("prompt", text, "must be token ids, for skip_tokenizer_init leaves no tokenizer")
        _check_unicode("prompt", text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def _validate_prompt(self, token_ids: list[int]) -> None:
        """At least one id, all in the vocabulary, and room for one more below max_model_len."""
        if not token_ids:
            _fail("prompt", token_ids, "is empty; it must have at least one token")
        max_model_len = self.model_config.max_model_len
        assert max_model_len is not None  # ModelConfig.__post_init__ derives it
        if len(token_ids) >= max_model_len:
            _fail(
                "prompt",
                len(token_ids),
                f"has {len(token_ids)} tokens, but max_model_len {max_model_len} allows at most "
                f"{max_model_len - 1}, so that one can be generated",
            )
        # The tokenizer may know fewer tokens than the model has rows (padding) or more (then the
        # embedding has no row for them): the model's number counts.
        vocab_size = self.model_config.get_vocab_size()
        all_ints = set(map(type, token_ids)) == {int}
        if all_ints and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return  # Nearly always; what follows finds the culprit.
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int:
                _fail(
                    "prompt_token_ids",
                    token_id,
                    f"must hold int only, but position {position} holds {token_id!r} of type "
                    f"{type(token_id).__name__}",
                )
            if not 0 <= token_id < vocab_size:
                _fail(
                    "prompt_token_ids",
                    token_id,
                    f"holds {token_id} at position {position}, outside the model's vocabulary of "
                    f"{vocab_size} tokens (0 to {vocab_size - 1})",
                )

    def _process_params(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """A copy of `params`, checked; with max_tokens, EOS ids and bad words filled in."""
        if not isinstance(params, SamplingParams):
            _fail(
                "sampling_params",
                params,
                f"must be SamplingParams, but is of type {type(params).__name__}",
            )
        params = params.clone()
        params.__post_init__()  # its fields may have been set anew since it was made
        params.verify(self.model_config)
        if params.n > 1 and params.seed is not None:
            # Sample i is drawn with seed + i (ParentRequest); -1 would mean no seed.
            last = params.seed + params.n - 1
            if last > INT64_MAX or params.seed < 0 <= last + 1:
                _fail(
                    "seed",
                    params.seed,
                    f"{params.seed} with n={params.n} leads to seeds up to {last}, which must stay "
                    "within 64 bits and not pass -1",
                )
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    _fail(
                        name,
                        getattr(params, name),
                        "needs a tokenizer, which skip_tokenizer_init leaves out",
                    )
        if params.max_tokens is None:
            assert self.model_config.max_model_len is not None
            params.max_tokens = self.model_config.max_model_len - prompt_len
        params.update_from_generation_config(
            self.generation_config_fields,
            None if self.tokenizer is None else self.tokenizer.eos_token_id,
            self.model_config.get_vocab_size(),
        )
        if self.tokenizer is not None:
            params.update_from_tokenizer(self.tokenizer, self.model_config.get_vocab_size())
        return params


def get_prompt_text(prompt: PromptType) -> str | None:
    """The text of a valid prompt, if it has one."""
    if isinstance(prompt, str):
        return prompt
    return None if isinstance(prompt, list) else prompt.get("prompt")


def _check_unicode(parameter: str, text: str) -> None:
    """Half of a surrogate pair cannot be encoded, neither to tokens nor to bytes for a hash."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        _fail(parameter, text, f"is not valid Unicode at position {e.start}: {text[e.start]!r}")


def _fail(parameter: str, value: Any, problem: str) -> NoReturn:
    name = "The prompt" if parameter == "prompt" else parameter
    raise VLLMValidationError(f"{name} {problem}.", parameter=parameter, value=value)
