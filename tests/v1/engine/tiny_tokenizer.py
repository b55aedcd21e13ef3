"""Two small tokenizers of the kinds in use, made on the spot, and requests to go with them."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine import EngineCoreRequest

# Repeated, so that BPE merges words, and bytes across the edges of characters too.
TEXT = (
    "Once upon a time there was a little cat. The cat was happy \U0001f600 and so was the dog.\n"
    "日本語の文章 과 한국어 \U0001f468\u200d\U0001f469\u200d\U0001f467 cafe\u0301 nai\u0308ve "
    "\u201cquoted\u201d — done. "
) * 3

EOS = "<|end|>"


@functools.cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's and Qwen's: a token is some bytes, not always whole characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS, "<|user|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, additional_special_tokens=["<|user|>"]
    )


@functools.cache
def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: U+2581 for a space, words keep the one before them, bytes for rare characters.

    Its decoder drops the space at the very beginning, so a token's text depends on where it stands.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted("abcdefghijklmnopqrstuvwxyz.,▁")
    words = ["▁a", "ca", "cat", "▁cat", "do", "dog", "▁dog", "▁▁"]
    merges = [
        ("▁", "a"),
        ("c", "a"),
        ("ca", "t"),
        ("▁", "cat"),
        ("d", "o"),
        ("do", "g"),
        ("▁", "dog"),
        ("▁", "▁"),
    ]
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, *words])}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def make_request(
    prompt_token_ids: list[int] | None = None, request_id: str = "x", **params: Any
) -> EngineCoreRequest:
    """A request as the input processor would make it."""
    params.setdefault("max_tokens", 1000)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[5] if prompt_token_ids is None else prompt_token_ids,
        sampling_params=SamplingParams(**params),
        arrival_time=0.0,
        external_req_id=request_id,
    )
