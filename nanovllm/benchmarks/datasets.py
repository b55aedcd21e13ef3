"""The prompts a benchmark sends, made up or read from a file.

Prompts go out as text, so a made-up row of tokens is decoded and encoded again until it has the
length asked for: text that is split differently would be longer or shorter.

Upstream: vllm/benchmarks/datasets/datasets.py and utils.py (0.23.0)
Left out: data sets that are downloaded, images, audio, traces with times of their own, LoRA.
Ours: `prefix_repetition` sends exactly `num_requests` prompts (upstream rounds down to a multiple
of num_prefixes), and `custom` reads text files, too, and can do without a chat template.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import argparse

    from transformers import PreTrainedTokenizerBase


@dataclass
class SampleRequest:
    """A prompt, its length and the number of tokens to ask for."""

    prompt: str
    prompt_len: int
    expected_output_len: int
    request_id: str | None = None


def gen_prompt_decode_to_target_len(
    tokenizer: PreTrainedTokenizerBase,
    token_sequence: list[int],
    target_token_len: int,
    rng: np.random.Generator,
    max_retry: int = 10,
) -> tuple[str, list[int]]:
    """A text that is encoded in `target_token_len` tokens, near to what `token_sequence` says.

    Returns:
        The text and its tokens. After `max_retry` attempts their number may still be another.
    """
    for attempt in range(max_retry + 1):
        prompt = str(tokenizer.decode(token_sequence))
        token_sequence = tokenizer.encode(prompt, add_special_tokens=False)
        num_missing = target_token_len - len(token_sequence)
        if num_missing == 0 or attempt == max_retry:
            break
        if num_missing > 0:
            token_sequence += rng.integers(0, tokenizer.vocab_size, size=num_missing).tolist()
        else:
            token_sequence = token_sequence[:target_token_len]
    return prompt, token_sequence


class RandomDataset:
    """Prompts that make no sense and share nothing but, if asked for, a common prefix.

    A seed gives the prompts and lengths that it gives `vllm bench serve`.
    """

    def __init__(self, random_seed: int = 0) -> None:
        self._rng = np.random.default_rng(random_seed)

    def sample(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_requests: int,
        *,
        input_len: int = 1024,
        output_len: int = 128,
        range_ratio: float = 0.0,
        prefix_len: int = 0,
        request_id_prefix: str = "",
    ) -> list[SampleRequest]:
        """Make prompts of about `input_len` tokens (without the prefix).

        Args:
            range_ratio: lengths are drawn from [len * (1 - ratio), len * (1 + ratio)].
            prefix_len: tokens that all prompts begin with.

        Raises:
            VLLMValidationError: a prompt might be empty, or range_ratio is not in [0, 1).
        """
        if not 0 <= range_ratio < 1:
            _fail("random_range_ratio", range_ratio, "must be in [0, 1)")
        real_input_len = max(input_len - int(tokenizer.num_special_tokens_to_add()), 0)
        input_low = math.floor(real_input_len * (1 - range_ratio))
        if prefix_len + input_low < 1:
            _fail("random_input_len", input_len, "leaves prompts that may be empty")
        input_high = math.ceil(real_input_len * (1 + range_ratio))
        output_low = max(math.floor(output_len * (1 - range_ratio)), 1)
        output_high = max(math.ceil(output_len * (1 + range_ratio)), 1)
        input_lens = self._rng.integers(input_low, input_high + 1, size=num_requests)
        output_lens = self._rng.integers(output_low, output_high + 1, size=num_requests)
        offsets = self._rng.integers(0, tokenizer.vocab_size, size=num_requests)

        allowed_tokens = _ordinary_tokens(tokenizer)
        prefix = self._prefix(tokenizer, allowed_tokens, prefix_len)
        requests = []
        for i in range(num_requests):
            # A row of the vocabulary that begins at random: it differs from prompt to prompt.
            row = (int(offsets[i]) + i + np.arange(int(input_lens[i]))) % len(allowed_tokens)
            prompt, token_ids = gen_prompt_decode_to_target_len(
                tokenizer,
                prefix + allowed_tokens[row].tolist(),
                prefix_len + int(input_lens[i]),
                self._rng,
            )
            request_id = f"{request_id_prefix}{i}"
            requests.append(SampleRequest(prompt, len(token_ids), int(output_lens[i]), request_id))
        return requests

    def _prefix(
        self, tokenizer: PreTrainedTokenizerBase, allowed_tokens: np.ndarray, prefix_len: int
    ) -> list[int]:
        if prefix_len <= 0:
            return []
        drawn = allowed_tokens[self._rng.integers(0, len(allowed_tokens), size=prefix_len)]
        return gen_prompt_decode_to_target_len(tokenizer, drawn.tolist(), prefix_len, self._rng)[1]


class PrefixRepetitionRandomDataset:
    """Prompts that share one of a few long beginnings, in random order: food for a prefix cache."""

    def __init__(self, random_seed: int = 0) -> None:
        self._rng = np.random.default_rng(random_seed)

    def sample(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_requests: int,
        *,
        prefix_len: int = 256,
        suffix_len: int = 256,
        num_prefixes: int = 10,
        output_len: int = 128,
        request_id_prefix: str = "",
    ) -> list[SampleRequest]:
        """Make prompts of prefix_len + suffix_len tokens; prefixes are used equally often.

        Raises:
            VLLMValidationError: there are more prefixes than requests, or none.
        """
        if not 1 <= num_prefixes <= num_requests:
            _fail("prefix_repetition_num_prefixes", num_prefixes, "must be in [1, num_prompts]")
        prefixes = [self._random_tokens(tokenizer, prefix_len) for _ in range(num_prefixes)]
        order = self._rng.permutation(np.arange(num_requests) % num_prefixes)
        requests = []
        for i, prefix_index in enumerate(order):
            token_ids = prefixes[prefix_index] + self._random_tokens(tokenizer, suffix_len)
            prompt = str(tokenizer.decode(token_ids))
            request_id = f"{request_id_prefix}{i}"
            requests.append(SampleRequest(prompt, len(token_ids), output_len, request_id))
        return requests

    def _random_tokens(self, tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
        allowed_tokens = _ordinary_tokens(tokenizer)
        drawn = allowed_tokens[self._rng.integers(0, len(allowed_tokens), size=length)].tolist()
        return gen_prompt_decode_to_target_len(tokenizer, drawn, length, self._rng)[1]


class CustomDataset:
    """Prompts from a file: a JSON object a line (.jsonl), or a prompt a line.

    {"prompt": "What is the capital of India?", "output_tokens": 10}
    """

    def __init__(self, dataset_path: str, random_seed: int = 0, shuffle: bool = True) -> None:
        """Read the file.

        Raises:
            VLLMValidationError: it cannot be read, or a line holds no prompt.
        """
        self._rng = np.random.default_rng(random_seed)
        self.data = _read_items(Path(dataset_path))
        if not self.data:
            _fail("dataset_path", dataset_path, "holds no prompt")
        if shuffle:
            self.data = [self.data[i] for i in self._rng.permutation(len(self.data))]

    def sample(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        num_requests: int,
        *,
        output_len: int | None = None,
        skip_chat_template: bool = False,
        request_id_prefix: str = "",
    ) -> list[SampleRequest]:
        """Take the first prompts; if there are too few, some are drawn a second time.

        Args:
            tokenizer: None: lengths are unknown (1) until the server tells them.
            output_len: None: what the file says, or 256.
            skip_chat_template: send the prompts as they are. Without a tokenizer, or one that has
                no template, they are sent so anyway.
        """
        use_template = not skip_chat_template and tokenizer is not None
        use_template = use_template and bool(getattr(tokenizer, "chat_template", None))
        requests = []
        for i, item in enumerate(self.data[:num_requests]):
            prompt = item["prompt"]
            if use_template and tokenizer is not None:
                messages = [{"role": "user", "content": prompt}]
                prompt = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            prompt_len = 1 if tokenizer is None else len(tokenizer.encode(prompt))
            wanted = int(item.get("output_tokens", 256)) if output_len is None else output_len
            requests.append(SampleRequest(prompt, prompt_len, wanted, f"{request_id_prefix}{i}"))
        for i in range(len(requests), num_requests):
            again = requests[int(self._rng.integers(0, len(self.data)))]
            requests.append(replace(again, request_id=f"{request_id_prefix}{i}"))
        return requests


def get_samples(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None
) -> list[SampleRequest]:
    """The requests that the command line asks for.

    Raises:
        VLLMValidationError: flags do not fit each other.
    """
    if args.dataset_name == "custom":
        if args.dataset_path is None:
            _fail("dataset_path", None, "is needed with --dataset-name custom")
        return CustomDataset(args.dataset_path, args.seed, not args.disable_shuffle).sample(
            tokenizer,
            args.num_prompts,
            output_len=args.output_len or args.custom_output_len,
            skip_chat_template=args.skip_chat_template or args.backend == "openai-chat",
            request_id_prefix=args.request_id_prefix,
        )
    if args.dataset_path is not None:
        _fail("dataset_path", args.dataset_path, "goes with --dataset-name custom")
    if tokenizer is None:
        _fail("skip_tokenizer_init", True, f"leaves nothing to make {args.dataset_name} prompts of")
    if args.dataset_name == "prefix_repetition":
        return PrefixRepetitionRandomDataset(args.seed).sample(
            tokenizer,
            args.num_prompts,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            num_prefixes=args.prefix_repetition_num_prefixes,
            output_len=args.output_len or args.prefix_repetition_output_len,
            request_id_prefix=args.request_id_prefix,
        )
    return RandomDataset(args.seed).sample(
        tokenizer,
        args.num_prompts,
        input_len=args.input_len or args.random_input_len,
        output_len=args.output_len or args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        request_id_prefix=args.request_id_prefix,
    )


def _ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Every token id but the special ones. [num_tokens] int64"""
    token_ids = np.arange(tokenizer.vocab_size)
    return token_ids[~np.isin(token_ids, tokenizer.all_special_ids)]


def _read_items(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        _fail("dataset_path", str(path), f"cannot be read: {getattr(e, 'strerror', None) or e}")
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [{"prompt": line} for _, line in numbered]
    items = []
    for i, line in numbered:
        try:
            item = json.loads(line)
        except ValueError as e:
            _fail("dataset_path", str(path), f"line {i} is not JSON: {e}")
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
            _fail("dataset_path", str(path), f'line {i} is not an object with a "prompt" of text')
        if not isinstance(item.get("output_tokens", 1), int):
            _fail("dataset_path", str(path), f"line {i}: output_tokens must be an integer")
        items.append(item)
    return items


def _fail(parameter: str, value: Any, problem: str) -> NoReturn:
    flag = "--" + parameter.replace("_", "-")
    shown = "" if value is None else f" ({value})"
    raise VLLMValidationError(f"{flag}{shown} {problem}.", parameter=parameter, value=value)
