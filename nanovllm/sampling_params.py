"""What a user may ask of one request's sampling, checked when it is written down.

`SamplingParams(...)` refuses values that could never work (`VLLMValidationError`, one sentence).
What depends on the model is checked when the request arrives: `verify` (vocabulary,
`max_logprobs`), then `update_from_generation_config` (end-of-sequence ids) and
`update_from_tokenizer` (bad words to token ids). Nothing here imports torch, so `from nanovllm
import SamplingParams` is instant.

Upstream: vllm/sampling_params.py (0.23.0). Checked beyond upstream: NaN and infinities, wrong
types, the seed's range, stop token ids against the vocabulary, and `allowed_token_ids` that
`min_tokens` would leave empty; each of them would otherwise fail (or emit nonsense) in the middle
of a batch.
Left out: structured outputs, thinking budget, repetition detection, logprob_token_ids,
flat_logprobs, extra_args, routed experts, beam search, and the VLLM_MAX_N_SEQUENCES environment
variable (a constant here).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from nanovllm.config import ModelConfig

logger = logging.getLogger(__name__)

SAMPLING_EPS = 1e-5  # below this temperature a row is greedy
MIN_TEMPERATURE = 1e-2  # what a smaller temperature above 0 is raised to (upstream: _MAX_TEMP)
MAX_N_SEQUENCES = 16384
FLOAT32_MAX = 3.4028234663852886e38
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class SamplingType(IntEnum):
    """How a request's next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(Enum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # nothing until the request has finished


class Tokenizer(Protocol):
    """The one method of a tokenizer that SamplingParams needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass
class SamplingParams:
    """Parameters of one request; names and defaults as in vLLM, and OpenAI's where that has them.

    Raises:
        VLLMValidationError: a value of the wrong type or range, or two that contradict each other.
    """

    # Completions to generate for the one prompt.
    n: int = 1
    # Subtracted from the logit of every token already generated, in [-2, 2].
    presence_penalty: float = 0.0
    # The same, once for every time it was generated, in [-2, 2].
    frequency_penalty: float = 0.0
    # Divides positive, multiplies negative logits of tokens in the prompt or the output; above 0.
    repetition_penalty: float = 1.0
    # 0 is greedy. Above 0 but below 0.01 it is raised to 0.01, where float32 still copes.
    temperature: float = 1.0
    # Keep the smallest set of most likely tokens whose probabilities reach top_p, in (0, 1].
    top_p: float = 1.0
    # Keep the top_k most likely tokens; 0 or -1 keeps all.
    top_k: int = 0
    # Drop tokens less likely than min_p times the most likely one, in [0, 1].
    min_p: float = 0.0
    # Makes the request's random draws repeatable; None or -1 leaves them to the engine.
    seed: int | None = None
    # Strings that end the generation once they appear in the text; a single one may be given bare.
    stop: str | list[str] | None = None
    # Tokens that end the generation, beside the end-of-sequence tokens.
    stop_token_ids: list[int] | None = None
    # Do not stop at end-of-sequence tokens.
    ignore_eos: bool = False
    # Tokens to generate at most; None: up to the model's length.
    max_tokens: int | None = 16
    # Neither end-of-sequence nor stop tokens are generated before this many tokens.
    min_tokens: int = 0
    # Log probabilities to return per generated token: the best so many, and the sampled one. 0:
    # only the sampled one. -1: the whole vocabulary. None: nothing.
    logprobs: int | None = None
    # The same for every prompt token but the first.
    prompt_logprobs: int | None = None
    # Produce text; False returns token ids only.
    detokenize: bool = True
    # Leave special tokens out of the text.
    skip_special_tokens: bool = True
    # Put spaces between adjacent special tokens in the text.
    spaces_between_special_tokens: bool = True
    # Keep the stop string at the end of the text.
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # clone() may be shallow: these params belong to one request and nobody changes them.
    skip_clone: bool = False
    # Token id -> number added to its logit.
    logit_bias: dict[int, float] | None = None
    # Only these tokens may be generated.
    allowed_token_ids: list[int] | None = None
    # Strings whose last token is forbidden where it would complete them.
    bad_words: list[str] | None = None
    # Compute the whole prompt though its blocks may be cached. None: if prompt_logprobs need it.
    skip_reading_prefix_cache: bool | None = None

    # Derived; not for the user to give.
    # Characters of text held back until it is clear that no stop string begins in them.
    output_text_buffer_length: int = field(default=0, init=False, repr=False)
    _eos_token_id: int | None = field(default=None, init=False, repr=False)
    _all_stop_token_ids: set[int] = field(default_factory=set, init=False, repr=False)
    _bad_words_token_ids: list[list[int]] | None = field(default=None, init=False, repr=False)

    @staticmethod
    def from_optional(
        n: int | None = 1,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        logit_bias: dict[int, float] | dict[str, float] | None = None,
        **others: Any,
    ) -> SamplingParams:
        """As OpenAI's API sends them: None is the default, logit_bias is keyed by strings and
        clamped to [-100, 100]. `others` are further fields of SamplingParams, passed on as they
        are."""
        given = {
            "n": n,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
        }
        others |= {name: value for name, value in given.items() if value is not None}
        return SamplingParams(logit_bias=_parse_logit_bias(logit_bias), **others)

    def __post_init__(self) -> None:
        self._normalize_numbers()
        self._normalize_lists()
        self._verify_ranges()
        self._verify_combinations()
        if self.sampling_type == SamplingType.GREEDY:
            # These cannot change an argmax: leave nothing for the sampler to do.
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(len(s) for s in self.stop) - 1
        self._all_stop_token_ids.update(self.stop_token_ids or ())
        if self.skip_reading_prefix_cache is None:
            # prompt_logprobs need the logits of every position, and cached positions have none.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    # ---- normalisation: after it, every field has its declared type ----

    def _normalize_numbers(self) -> None:
        """Python numbers of the right kind in every numeric field (NumPy scalars are accepted)."""
        for name in ("n", "top_k", "min_tokens"):
            setattr(self, name, _as_int(name, getattr(self, name)))
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                setattr(self, name, int(getattr(self, name)))  # True asks for one
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, _as_int(name, getattr(self, name)))
        for name in (
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
            "min_p",
        ):
            setattr(self, name, _as_float(name, getattr(self, name)))
        if self.seed == -1:
            self.seed = None
        if 0 < self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %s is below %s, where logits may overflow; %s is used instead.",
                self.temperature,
                MIN_TEMPERATURE,
                MIN_TEMPERATURE,
            )
            self.temperature = MIN_TEMPERATURE

    def _normalize_lists(self) -> None:
        """Own copies of lists and dicts; an absent stop, stop_token_ids or bad_words is empty."""
        self.stop = _as_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.bad_words = _as_strings("bad_words", self.bad_words)
        self.stop_token_ids = _as_token_ids("stop_token_ids", self.stop_token_ids or ())
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                _fail("logit_bias", self.logit_bias, "must be a dict from token id to number")
            self.logit_bias = {
                _as_int("logit_bias", token): _as_float("logit_bias", bias)
                for token, bias in self.logit_bias.items()
            }
        if not isinstance(self.output_kind, RequestOutputKind):
            _fail("output_kind", self.output_kind, "must be a RequestOutputKind")

    # ---- checks that need nothing but the params ----

    def _verify_ranges(self) -> None:
        if not 1 <= self.n <= MAX_N_SEQUENCES:
            _fail("n", self.n, f"must be at least 1 and at most {MAX_N_SEQUENCES}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                _fail(name, getattr(self, name), "must be in [-2, 2]")
        if self.repetition_penalty <= 0.0:
            _fail("repetition_penalty", self.repetition_penalty, "must be greater than zero")
        if self.temperature < 0.0:
            _fail("temperature", self.temperature, "must be non-negative")
        if not 0.0 < self.top_p <= 1.0:
            _fail("top_p", self.top_p, "must be in (0, 1]")
        if self.top_k < -1:
            _fail("top_k", self.top_k, "must be 0 (disable), or at least 1")
        if not 0.0 <= self.min_p <= 1.0:
            _fail("min_p", self.min_p, "must be in [0, 1]")
        if self.max_tokens is not None and self.max_tokens < 1:
            _fail("max_tokens", self.max_tokens, "must be at least 1")
        if self.min_tokens < 0:
            _fail("min_tokens", self.min_tokens, "must be greater than or equal to 0")
        if self.seed is not None and not INT64_MIN <= self.seed <= INT64_MAX:
            _fail("seed", self.seed, f"must be in [{INT64_MIN}, {INT64_MAX}] (64 bits)")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < -1:
                _fail(name, count, "must be non-negative or -1")

    def _verify_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"must be less than or equal to max_tokens={self.max_tokens}"
            _fail("min_tokens", self.min_tokens, limit)
        if self.sampling_type == SamplingType.GREEDY and self.n > 1:
            _fail("n", self.n, "must be 1 when using greedy sampling (temperature 0)")
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "needs detokenize=True, which produces the text to search")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            limit = "must not be False with prompt_logprobs, which cached tokens do not have"
            _fail("skip_reading_prefix_cache", False, limit)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _fail("allowed_token_ids", self.allowed_token_ids, "must name at least one token id")
        self._verify_something_allowed(set(self.stop_token_ids or ()))

    def _verify_something_allowed(self, stop_token_ids: set[int]) -> None:
        """min_tokens forbids stop tokens; together with allowed_token_ids nothing might be left."""
        allowed = self.allowed_token_ids
        if self.min_tokens and allowed is not None and stop_token_ids.issuperset(allowed):
            limit = f"must name more than stop tokens when min_tokens={self.min_tokens}"
            _fail("allowed_token_ids", allowed, limit)

    # ---- what depends on the model: called once when a request arrives ----

    def verify(self, model_config: ModelConfig) -> None:
        """Check token ids against the vocabulary, logprobs against max_logprobs.

        Raises:
            VLLMValidationError: naming the offending ids or number and the limit.
        """
        vocab_size = model_config.get_vocab_size()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [t for t in getattr(self, name) or () if not 0 <= t < vocab_size]
            if outside:
                raise VLLMValidationError(
                    f"{name} contains token ids {outside} outside the model's vocabulary of "
                    f"{vocab_size} tokens.",
                    parameter=name,
                    value=outside,
                )
        max_logprobs = model_config.max_logprobs
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            count = vocab_size if count == -1 else count
            if count is not None and count > limit:
                _fail(name, count, f"must be at most max_logprobs={limit}")

    def update_from_generation_config(
        self,
        generation_config: dict[str, Any],
        eos_token_id: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Learn the end-of-sequence tokens: the tokenizer's, and those of generation_config.json.

        The tokenizer's is kept apart (`eos_token_id`, whose stop_reason is None); the others join
        stop_token_ids. With ignore_eos neither stops the request, but all of them stay in
        all_stop_token_ids, for min_tokens.
        """
        listed = generation_config.get("eos_token_id")
        extra = set() if listed is None else {listed} if isinstance(listed, int) else set(listed)
        extra.discard(eos_token_id)
        self._all_stop_token_ids |= extra
        if eos_token_id is not None:
            self._all_stop_token_ids.add(eos_token_id)
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
            if extra:
                self.stop_token_ids = sorted(extra.union(self.stop_token_ids or ()))
        if vocab_size is not None:
            # A token without a logit is never sampled, and min_tokens cannot forbid it.
            self._all_stop_token_ids = {t for t in self._all_stop_token_ids if t < vocab_size}
        self._verify_something_allowed(self._all_stop_token_ids)

    def update_from_tokenizer(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        """Turn bad_words into token ids: a word may stand at the text's start or after a space.

        The spaced form counts only when it is one more way to write the same word: as many tokens,
        another first one. (" bad" that becomes [" ", "bad"] is covered by "bad" itself.)

        Args:
            tokenizer: with `encode(text, add_special_tokens=False)`.
            vocab_size: the model's; ids beyond it (a tokenizer of another model) are refused.
        """
        if not self.bad_words:
            return
        sequences: list[list[int]] = []
        for word in self.bad_words:
            plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                _fail("bad_words", word, "must give at least one token each")
            sequences.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                sequences.append(spaced)
        if vocab_size is not None:
            outside = [t for ids in sequences for t in ids if not 0 <= t < vocab_size]
            if outside:
                limit = f"must stay within the model's vocabulary of {vocab_size} tokens"
                _fail("bad_words", outside, limit)
        self._bad_words_token_ids = sequences
        forbidden = {ids[0] for ids in sequences if len(ids) == 1}
        if self.min_tokens:
            forbidden |= self._all_stop_token_ids
        if self.allowed_token_ids is not None and forbidden.issuperset(self.allowed_token_ids):
            limit = "must name more than what bad_words and min_tokens forbid"
            _fail("allowed_token_ids", self.allowed_token_ids, limit)

    # ---- what the engine reads ----

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end of sequence; None until the request arrives, and with ignore_eos."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Everything min_tokens forbids: stop_token_ids and every end-of-sequence token."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """bad_words as token ids; None without bad words or before update_from_tokenizer."""
        return self._bad_words_token_ids

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one; with skip_clone a shallow one."""
        clone = copy.copy(self)
        if not self.skip_clone:
            # (copy.deepcopy would look at every number as well, in ten times the time.)
            for name, value in vars(self).items():
                if isinstance(value, (list, dict, set)):
                    setattr(clone, name, copy.deepcopy(value))
        return clone


def _fail(name: str, value: Any, limit: str) -> NoReturn:
    raise VLLMValidationError(f"{name} {limit}, got {value!r}.", parameter=name, value=value)


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        _fail(name, value, "must be an integer")
    return int(value)


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        _fail(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:  # NaN compares false
        _fail(name, value, "must be a finite float32 number")
    return number


def _as_token_ids(name: str, values: Any) -> list[int]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        _fail(name, values, "must be a list of token ids")
    return [_as_int(name, value) for value in values]


def _as_strings(name: str, values: Any) -> list[str]:
    if values is None:
        return []
    if not isinstance(values, (list, tuple)) or not all(isinstance(s, str) for s in values):
        _fail(name, values, "must be a list of strings")
    if "" in values:
        _fail(name, list(values), "cannot contain an empty string")
    if any(0xD800 <= ord(c) <= 0xDFFF for text in values for c in text):
        _fail(name, list(values), "must be valid Unicode (there is half of a surrogate pair)")
    return list(values)


def _parse_logit_bias(
    logit_bias: dict[int, float] | dict[str, float] | None,
) -> dict[int, float] | None:
    """Token ids as integers, biases clamped to OpenAI's [-100, 100]."""
    if logit_bias is None:
        return None
    parsed = {}
    for token, bias in logit_bias.items():
        try:
            token_id = int(token)
        except (TypeError, ValueError):
            _fail("logit_bias", token, "must be keyed by token ids")
        parsed[token_id] = min(100.0, max(-100.0, _as_float("logit_bias", bias)))
    return parsed
