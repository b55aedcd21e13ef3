"""A request that cannot run is refused in one sentence; what passes is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import EOS, byte_level_tokenizer
from transformers import LlamaConfig

from nanovllm.config import ModelConfig, SchedulerConfig, VllmConfig
from nanovllm.exceptions import VLLMValidationError
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine.input_processor import InputProcessor, get_prompt_text

VOCAB_SIZE = 352  # more than the tokenizer has, as checkpoints often are padded
MAX_MODEL_LEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    path = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save_pretrained(path)
    LlamaConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN, architectures=["X"]
    ).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9], "top_k": 7}))
    return path


def make(folder: Path, **kwargs: Any) -> InputProcessor:
    model_config = ModelConfig(model=str(folder), **kwargs)
    scheduler_config = SchedulerConfig(max_model_len=MAX_MODEL_LEN)
    return InputProcessor(VllmConfig(model_config, scheduler_config=scheduler_config))


@pytest.fixture(scope="module")
def processor(folder: Path) -> InputProcessor:
    return make(folder)


# ---- prompts ----


def test_every_form_of_a_prompt_gives_the_same_request(processor: InputProcessor) -> None:
    text = "The cat was happy"
    token_ids = byte_level_tokenizer().encode(text)
    forms = [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids}]
    requests = [processor.process_inputs("x", form, SamplingParams()) for form in forms]
    assert all(request.prompt_token_ids == token_ids for request in requests)
    assert [get_prompt_text(form) for form in forms] == [text, None, text, None]


def test_token_ids_go_before_text_which_is_then_only_shown(processor: InputProcessor) -> None:
    prompt = {"prompt": "shown", "prompt_token_ids": [5, 6]}
    assert processor.process_inputs("x", prompt, SamplingParams()).prompt_token_ids == [5, 6]
    assert get_prompt_text(prompt) == "shown"


def test_options_of_a_prompt_reach_the_request(processor: InputProcessor) -> None:
    prompt = {"prompt": "cat", "cache_salt": "alice", "priority": 3}
    request = processor.process_inputs("x", prompt, SamplingParams(), arrival_time=7.0, priority=9)
    assert (request.cache_salt, request.priority, request.arrival_time) == ("alice", 3, 7.0)
    assert (request.request_id, request.external_req_id) == ("x", "x")
    request = processor.process_inputs("x", "cat", SamplingParams(), priority=9)
    assert (request.cache_salt, request.priority) == (None, 9)


def test_the_request_does_not_share_the_users_list(processor: InputProcessor) -> None:
    token_ids = [5, 6]
    request = processor.process_inputs("x", token_ids, SamplingParams())
    token_ids.append(7)
    assert request.prompt_token_ids == [5, 6]


BAD_PROMPTS = {
    "empty text": ("", "prompt", "is empty"),
    "empty list": ([], "prompt", "is empty"),
    "as long as the model": ([5] * 32, "prompt", "32 tokens, but max_model_len 32 .* at most 31"),
    "longer than the model": ([5] * 99, "prompt", "99 tokens, but max_model_len 32"),
    "id too large": ([5, 352], "prompt_token_ids", "352 at position 1.* 352 tokens"),
    "negative id": ([-1], "prompt_token_ids", "-1 at position 0"),
    "float id": ([5, 6.0], "prompt_token_ids", "position 1 holds 6.0 of type float"),
    "bool id": ([True], "prompt_token_ids", "True of type bool"),
    "a number": (3, "prompt", "of type int"),
    "None": (None, "prompt", "of type NoneType"),
    "bytes": (b"cat", "prompt", "of type bytes"),
    "ids as text": ({"prompt_token_ids": "5"}, "prompt_token_ids", "of type str"),
    "text as ids": ({"prompt": [5]}, "prompt", "of type list"),
    "nothing in it": ({"cache_salt": "a"}, "prompt", "neither 'prompt' nor 'prompt_token_ids'"),
    "an image": ({"prompt": "a", "multi_modal_data": 1}, "prompt", "key 'multi_modal_data'"),
    "empty salt": ({"prompt": "a", "cache_salt": ""}, "cache_salt", "non-empty str"),
    "numeric salt": ({"prompt": "a", "cache_salt": 3}, "cache_salt", "got 3"),
    "half a surrogate pair": ("cat\ud83d", "prompt", "not valid Unicode at position 3"),
}


@pytest.mark.parametrize(
    ("prompt", "parameter", "message"), BAD_PROMPTS.values(), ids=list(BAD_PROMPTS)
)
def test_a_bad_prompt_is_refused_with_its_value_and_the_limit(
    processor: InputProcessor, prompt: Any, parameter: str, message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message) as error:
        processor.process_inputs("x", prompt, SamplingParams())
    assert error.value.parameter == parameter
    sentence = str(error.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_the_longest_prompt_leaves_room_for_one_token(processor: InputProcessor) -> None:
    request = processor.process_inputs("x", [5] * 31, SamplingParams(max_tokens=None))
    assert request.sampling_params.max_tokens == 1


# ---- parameters ----


def test_max_tokens_left_open_becomes_what_is_left_of_the_model(processor: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None)
    assert processor.process_inputs("x", [5] * 10, params).sampling_params.max_tokens == 22
    assert params.max_tokens is None  # the user's object is not touched


def test_max_tokens_over_the_models_length_is_no_error(processor: InputProcessor) -> None:
    request = processor.process_inputs("x", [5] * 10, SamplingParams(max_tokens=500))
    assert request.sampling_params.max_tokens == 500


def test_eos_comes_from_the_tokenizer_and_from_the_generation_config(
    processor: InputProcessor,
) -> None:
    """The list in generation_config.json counts: a turn may end otherwise than a text."""
    eos_token_id = byte_level_tokenizer().convert_tokens_to_ids(EOS)
    params = processor.process_inputs("x", "cat", SamplingParams()).sampling_params
    assert params.eos_token_id == eos_token_id == 0
    assert params.stop_token_ids == [9]
    ignoring = SamplingParams(ignore_eos=True)
    params = processor.process_inputs("x", "cat", ignoring).sampling_params
    assert params.eos_token_id is None
    assert not params.stop_token_ids


def test_seeds_whose_samples_stay_in_range_are_accepted(processor: InputProcessor) -> None:
    for n, seed in ((2, 2**63 - 2), (1, 2**63 - 1), (2, -3), (1, -2), (5, 0)):
        params = SamplingParams(n=n, seed=seed)
        assert processor.process_inputs("x", "cat", params).sampling_params.seed == seed


def test_bad_words_become_token_ids(processor: InputProcessor) -> None:
    request = processor.process_inputs("x", "cat", SamplingParams(bad_words=["dog"]))
    assert byte_level_tokenizer().encode("dog") in request.sampling_params.bad_words_token_ids


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "must be SamplingParams, but is of type NoneType"),
        ({"max_tokens": 3}, "of type dict"),
        (SamplingParams(logprobs=21), "max_logprobs=20"),
        (SamplingParams(stop_token_ids=[352]), "352"),
        (SamplingParams(logit_bias={400: 1.0}), "400"),
        (SamplingParams(allowed_token_ids=[999]), "999"),
        (SamplingParams(n=2, seed=2**63 - 1), "64 bits"),
        (SamplingParams(n=3, seed=-3), "not pass -1"),
    ],
)
def test_parameters_that_the_model_cannot_serve_are_refused(
    processor: InputProcessor, params: Any, message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        processor.process_inputs("x", "cat", params)


# ---- without a tokenizer; with a broken one ----


def test_without_a_tokenizer_only_token_ids_will_do(folder: Path) -> None:
    processor = make(folder, skip_tokenizer_init=True)
    request = processor.process_inputs("x", [5], SamplingParams())
    assert request.sampling_params.eos_token_id is None
    assert request.sampling_params.stop_token_ids == [0, 9]
    for prompt, params in (
        ("cat", SamplingParams()),
        ([5], SamplingParams(stop="a")),
        ([5], SamplingParams(bad_words=["a"])),
    ):
        with pytest.raises(VLLMValidationError, match="skip_tokenizer_init"):
            processor.process_inputs("x", prompt, params)


def test_a_missing_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VLLMValidationError, match=r"tokenizer in .* cannot be loaded"):
        make(folder, tokenizer=str(tmp_path))
