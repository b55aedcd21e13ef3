"""SamplingParams: defaults, what is refused and how, and what the model's files add."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from nanovllm.exceptions import VLLMValidationError
from nanovllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType

NAN, INF = float("nan"), float("inf")


def test_defaults_are_vllms() -> None:
    """As in vLLM 0.23.0."""
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1,
        1,
        0,
        0,
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        0,
        0,
        1,
    )
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, None, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert (params.logit_bias, params.allowed_token_ids) == (None, None)
    assert (params.detokenize, params.skip_special_tokens) == (True, True)
    assert (params.spaces_between_special_tokens, params.include_stop_str_in_output) == (
        True,
        False,
    )
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert (params.skip_clone, params.skip_reading_prefix_cache) == (False, False)


REFUSED = [
    ("n", 0, "must be at least 1"),
    ("n", 16385, "at most 16384"),
    ("n", 1.0, "must be an integer"),
    ("n", True, "must be an integer"),
    ("presence_penalty", 2.1, r"must be in \[-2, 2\]"),
    ("frequency_penalty", -2.1, r"must be in \[-2, 2\]"),
    ("presence_penalty", NAN, "must be a finite"),
    ("repetition_penalty", 0.0, "must be greater than zero"),
    ("repetition_penalty", -INF, "must be a finite"),
    ("temperature", -0.1, "must be non-negative"),
    ("temperature", NAN, "must be a finite"),
    ("temperature", INF, "must be a finite"),
    ("temperature", 1e39, "must be a finite float32"),
    ("temperature", 10**400, "must be a finite float32"),
    ("temperature", "0.5", "must be a number"),
    ("temperature", None, "must be a number"),
    ("top_p", 0.0, r"must be in \(0, 1\]"),
    ("top_p", 1.1, r"must be in \(0, 1\]"),
    ("top_p", NAN, "must be a finite"),
    ("top_k", -2, r"must be 0 \(disable\), or at least 1"),
    ("top_k", 5.0, "must be an integer"),
    ("min_p", -0.1, r"must be in \[0, 1\]"),
    ("min_p", 1.1, r"must be in \[0, 1\]"),
    ("seed", 2**63, "must be in"),
    ("seed", 0.5, "must be an integer"),
    ("max_tokens", 0, "must be at least 1"),
    ("max_tokens", "16", "must be an integer"),
    ("min_tokens", -1, "must be greater than or equal to 0"),
    ("min_tokens", 17, "must be less than or equal to max_tokens=16"),
    ("logprobs", -2, "must be non-negative or -1"),
    ("prompt_logprobs", -2, "must be non-negative or -1"),
    ("stop", "", "cannot contain an empty string"),
    ("stop", ["a", ""], "cannot contain an empty string"),
    ("stop", [1], "must be a list of strings"),
    ("stop_token_ids", ["1"], "must be an integer"),
    ("stop_token_ids", 3, "must be a list of token ids"),
    ("bad_words", [""], "cannot contain an empty string"),
    ("bad_words", "word", "must be a list of strings"),
    ("logit_bias", {"1": 1.0}, "must be an integer"),
    ("logit_bias", {1: NAN}, "must be a finite"),
    ("logit_bias", [1], "must be a dict"),
    ("allowed_token_ids", [], "must name at least one token id"),
    ("allowed_token_ids", [1.5], "must be an integer"),
    ("output_kind", "delta", "must be a RequestOutputKind"),
]


@pytest.mark.parametrize(("name", "value", "limit"), REFUSED, ids=str)
def test_a_wrong_value_is_refused_in_one_sentence(name: str, value: object, limit: str) -> None:
    """The error names the parameter, its limit and the value, and carries both as attributes."""
    with pytest.raises(VLLMValidationError, match=f"^{name} .*{limit}.*, got .*\\.$") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert "\n" not in str(caught.value)


def test_contradictions_are_refused() -> None:
    """Several greedy completions, stop strings without text, and nothing left to generate."""
    with pytest.raises(VLLMValidationError, match="n must be 1 when using greedy sampling"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(VLLMValidationError, match="stop needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(VLLMValidationError, match="allowed_token_ids must name more than stop"):
        SamplingParams(allowed_token_ids=[5], stop_token_ids=[5, 6], min_tokens=1)
    params = SamplingParams(allowed_token_ids=[5], min_tokens=1)
    with pytest.raises(VLLMValidationError, match="allowed_token_ids must name more than stop"):
        params.update_from_generation_config({}, eos_token_id=5)


def test_accepted_extremes() -> None:
    """The ends of every range, NumPy scalars, and no limit on max_tokens."""
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3)
    SamplingParams(top_p=1e-9, top_k=10**9, min_p=1, seed=2**63 - 1, logprobs=-1)
    SamplingParams(min_tokens=16, max_tokens=16, n=16384)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=(1, 2))
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop_token_ids == [1, 2]


def test_values_are_normalised_as_vllm_does() -> None:
    """Tiny temperatures are raised, -1 is no seed, a bare stop string becomes a list, True is 1."""
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(stop=["abc", "x"]).output_text_buffer_length == 2
    assert (
        SamplingParams(stop="abc", include_stop_str_in_output=True).output_text_buffer_length == 0
    )
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True


def test_the_sampling_type_follows_temperature_and_seed() -> None:
    """Greedy drops the filters, which cannot change an argmax."""
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.5, seed=1)
    assert greedy.sampling_type is SamplingType.GREEDY
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED


def test_from_optional_takes_none_for_defaults_and_string_keys() -> None:
    """As OpenAI's API sends them; biases are clamped to [-100, 100]."""
    params = SamplingParams.from_optional(
        n=None,
        presence_penalty=None,
        frequency_penalty=None,
        repetition_penalty=None,
        temperature=None,
        top_p=None,
        logit_bias={"5": 1000.0, "6": -1000.0, "7": 0.5},
        max_tokens=3,
    )
    assert params == SamplingParams(logit_bias={5: 100.0, 6: -100.0, 7: 0.5}, max_tokens=3)
    with pytest.raises(VLLMValidationError, match="logit_bias must be keyed by token ids, got 'x'"):
        SamplingParams.from_optional(logit_bias={"x": 1.0})


def test_clones_share_nothing_unless_told_to() -> None:
    """The user's lists are copied on creation, and again by clone; skip_clone shares them."""
    stop = ["a"]
    params = SamplingParams(stop=stop, stop_token_ids=[1], logit_bias={1: 1.0})
    stop.append("b")
    clone = params.clone()
    assert clone == params
    clone.stop_token_ids.append(2)
    clone.all_stop_token_ids.add(2)
    assert (params.stop, params.stop_token_ids, params.all_stop_token_ids) == (["a"], [1], {1})
    shared = SamplingParams(stop_token_ids=[1], skip_clone=True)
    assert shared.clone() is not shared
    assert shared.clone().stop_token_ids is shared.stop_token_ids


@pytest.mark.parametrize(
    ("listed", "eos", "expected_stop", "expected_all"),
    [
        (None, 7, [1], {1, 7}),
        (7, 7, [1], {1, 7}),
        ([7, 8], 7, [1, 8], {1, 7, 8}),
        ([7, 8], None, [1, 7, 8], {1, 7, 8}),
        (9, 7, [1, 9], {1, 7, 9}),
    ],
)
def test_end_of_sequence_tokens_come_from_the_models_files(
    listed: object, eos: int | None, expected_stop: list[int], expected_all: set[int]
) -> None:
    """The tokenizer's EOS is kept apart, others of generation_config.json are stop tokens."""
    config = {} if listed is None else {"eos_token_id": listed}
    params = SamplingParams(stop_token_ids=[1])
    params.update_from_generation_config(config, eos)
    assert params.eos_token_id == eos
    assert sorted(params.stop_token_ids) == expected_stop
    assert params.all_stop_token_ids == expected_all

    ignoring = SamplingParams(stop_token_ids=[1], ignore_eos=True)
    ignoring.update_from_generation_config(config, eos)
    assert (ignoring.eos_token_id, ignoring.stop_token_ids) == (None, [1])
    assert ignoring.all_stop_token_ids == expected_all


class LetterTokenizer:
    """A token per character, but " b..." begins with one token for the space and the b."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        if text.startswith(" b"):
            return [500, *map(ord, text[2:])]
        return [ord(c) for c in text]


def test_bad_words_become_token_ids_with_and_without_a_space() -> None:
    """A spaced form counts if it only begins with another token; a space and the word does not."""
    params = SamplingParams(bad_words=["bad", " mad"])
    assert params.bad_words_token_ids is None
    params.update_from_tokenizer(LetterTokenizer())
    assert params.bad_words_token_ids == [[98, 97, 100], [500, 97, 100], [109, 97, 100]]
    with pytest.raises(VLLMValidationError, match=r"vocabulary of 200 tokens, got \[500\]"):
        params.update_from_tokenizer(LetterTokenizer(), vocab_size=200)
    with pytest.raises(VLLMValidationError, match="at least one token each, got ' '"):
        SamplingParams(bad_words=[" "]).update_from_tokenizer(LetterTokenizer())


@dataclass
class StubModelConfig:
    max_logprobs: int = 20

    def get_vocab_size(self) -> int:
        return 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allowed_token_ids": [1, 100]}, r"allowed_token_ids .* \[100\] .* vocabulary of 100"),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids .* \[-1\]"),
        ({"logit_bias": {100: 1.0}}, r"logit_bias .* \[100\] .* vocabulary of 100"),
        ({"stop_token_ids": [5, 1000]}, r"stop_token_ids .* \[1000\]"),
        ({"logprobs": 21}, "logprobs must be at most max_logprobs=20, got 21"),
        ({"logprobs": -1}, "logprobs must be at most max_logprobs=20, got 100"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most max_logprobs=20, got 21"),
    ],
    ids=str,
)
def test_what_the_model_cannot_do_is_refused_when_the_request_arrives(
    arguments: dict, message: str
) -> None:
    """Token ids beyond the vocabulary and more logprobs than the engine allows."""
    with pytest.raises(VLLMValidationError, match=message):
        SamplingParams(**arguments).verify(StubModelConfig())


def test_max_logprobs_of_minus_one_allows_the_whole_vocabulary() -> None:
    """And everything within the limits passes."""
    SamplingParams(logprobs=-1, prompt_logprobs=-1).verify(StubModelConfig(max_logprobs=-1))
    inside = SamplingParams(logprobs=20, allowed_token_ids=[0, 99], logit_bias={0: 1, 99: 1})
    inside.verify(StubModelConfig())


def test_importing_it_does_not_import_torch() -> None:
    """The params are plain Python."""
    code = "import sys, nanovllm.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
