"""Incremental detokenization: token ids in, text out, and a watch for stop strings.

Text cannot be had token by token. A byte-level token may hold a third of an emoji; a SentencePiece
token's leading space depends on what stands before it. So new tokens are decoded together with a
few before them, and only what that adds is text (see `SlowIncrementalDetokenizer`). Text once shown
is never taken back, hence two things are held back:

    output_text  |........ shown ........|.. stop buffer ..|  half a character (not yet text)
                 0                       ^                 ^
                      _last_output_text_offset      len(output_text)

- the bytes of an unfinished character, until it is whole or turns out to be invalid;
- with stop strings, the last `max(len(stop)) - 1` characters: they may be the beginning of one.

What holds for every request without a stop string: the shown pieces, joined, are what the
tokenizer's decoder makes of all tokens at once, less an unfinished character at the very end.

Upstream: vllm/v1/engine/detokenizer.py and vllm/tokenizers/detokenizer_utils.py (0.23.0)
Left out: FastIncrementalDetokenizer on `tokenizers.decoders.DecodeStream`. It does the same in
Rust, where a debugger cannot follow; when a prompt ends inside a character it shows the whole
prompt again; and at two microseconds a token there is little to gain.
Differs: of several stop strings that one token completes, upstream takes the first in the user's
list; here the one that is complete first in the text, so that the result does not depend on where
tokens are cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.tokenizers import (
    REPLACEMENT_CHARACTER,
    decode,
    remove_common_prefix,
    special_token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.v1.engine import EngineCoreRequest

# Tokens of the prompt that are decoded with the first output tokens. One would do for its effect on
# the next token's leading space; a character may be spread over four. Up to three more are taken if
# the first of them turn out to be the middle of a character.
INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET = 5
MAX_BYTES_BEFORE_LAST = 3


class IncrementalDetokenizer:
    """Collects output tokens and makes no text: for requests with `detokenize=False`."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids

    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take in a step's tokens.

        Args:
            new_token_ids: the tokens, in order.
            stop_terminated: the core ended the request on the last of them (EOS or a stop token).

        Returns:
            The stop string that the text now contains, or None.
        """
        self.token_ids.extend(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text that may be shown: all, or with `delta` what is new since the last call."""
        return ""

    @classmethod
    def from_new_request(
        cls, tokenizer: PreTrainedTokenizerBase | None, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        """The right one for `request`; `tokenizer` is None if it wants no text."""
        if tokenizer is None:
            return IncrementalDetokenizer()
        return SlowIncrementalDetokenizer(tokenizer, request)


class BaseIncrementalDetokenizer(IncrementalDetokenizer, ABC):
    """Stop strings and holding back; how a token becomes text is `decode_next`'s business."""

    def __init__(self, request: EngineCoreRequest) -> None:
        super().__init__()
        params = request.sampling_params
        self.stop: list[str] = [params.stop] if isinstance(params.stop, str) else params.stop or []
        self.min_tokens = params.min_tokens
        self.include_stop_str_in_output = params.include_stop_str_in_output
        # The longest beginning of a stop string that is not yet the whole of it. Nothing needs
        # holding back when the stop string is to be shown anyway.
        self.stop_buffer_length = 0
        if self.stop and not self.include_stop_str_in_output:
            self.stop_buffer_length = max(len(s) for s in self.stop) - 1
        self._last_output_text_offset = 0
        self.output_text = ""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not new_token_ids:
            return None

        # The EOS or stop token that ended the request counts as output but is no part of the text.
        hidden_token_ids: list[int] = []
        if stop_terminated and not self.include_stop_str_in_output:
            new_token_ids, hidden_token_ids = new_token_ids[:-1], new_token_ids[-1:]

        stop_check_offset = len(self.output_text)
        for token_id in new_token_ids:
            self.token_ids.append(token_id)
            self.output_text += self.decode_next(token_id)
            # A stop string may not end within the first min_tokens tokens.
            if self.num_output_tokens() <= self.min_tokens:
                stop_check_offset = len(self.output_text)
        self.token_ids.extend(hidden_token_ids)

        if not self.stop or self.num_output_tokens() <= self.min_tokens:
            return None
        match = check_stop_strings(
            self.output_text,
            len(self.output_text) - stop_check_offset,
            self.stop,
            self.include_stop_str_in_output,
        )
        if match is None:
            return None
        stop_string, truncate_to = match
        self.output_text = self.output_text[:truncate_to]
        return stop_string

    @abstractmethod
    def decode_next(self, next_token_id: int) -> str:
        """The text that the token just appended to `token_ids` adds; "" if there is none yet."""

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        end = len(self.output_text)
        if not finished:
            end = max(end - self.stop_buffer_length, 0)
        if not delta:
            return self.output_text[:end]
        # A shorter text than was shown cannot be: whatever a stop string cuts off was held back.
        start = self._last_output_text_offset
        self._last_output_text_offset = max(start, end)
        return self.output_text[start:end]


class SlowIncrementalDetokenizer(BaseIncrementalDetokenizer):
    """Decodes a sliding window of tokens; works with every tokenizer.

        window     |t t t t t|t t|
                   ^         ^   ^
                   0   _read_offset  end

    `_window[:_read_offset]` has been turned into text already (it starts as the prompt's tail);
    `_window[_read_offset:]` has not. New text is what decoding the whole window has over decoding
    its first part alone. While it ends in U+FFFD a character may be unfinished: wait. Otherwise it
    is shown, and the window moves on: the tokens just shown are the context of the next.

    Special tokens that are to be skipped never enter the window: they have no text, and would only
    push out of it the tokens that matter.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, request: EngineCoreRequest) -> None:
        super().__init__(request)
        self.tokenizer = tokenizer
        params = request.sampling_params
        self._skipped_ids: frozenset[int] = frozenset()
        # Added tokens whose text must not get the space that some decoders put between tokens.
        self._unspaced: dict[int, str] = {}
        if params.skip_special_tokens:
            self._skipped_ids = special_token_ids(tokenizer)
        elif not params.spaces_between_special_tokens:
            self._unspaced = {i: t.content for i, t in tokenizer.added_tokens_decoder.items()}
        self._window = self._prompt_tail(request.prompt_token_ids)
        self._read_offset = len(self._window)
        self._read_text = decode(tokenizer, self._window)

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last few tokens of the prompt that have text, from the start of a character on."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id in self._skipped_ids:
                continue
            tail.insert(0, token_id)
            missing = INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET - len(tail)
            if missing <= -MAX_BYTES_BEFORE_LAST:
                break
            if missing <= 0 and not decode(self.tokenizer, tail).startswith(REPLACEMENT_CHARACTER):
                break
        return tail

    def decode_next(self, next_token_id: int) -> str:
        if next_token_id in self._skipped_ids:
            return ""
        self._window.append(next_token_id)
        window_text = decode(self.tokenizer, self._window)
        if window_text.endswith(REPLACEMENT_CHARACTER):
            return ""

        if window_text.startswith(self._read_text):
            new_text = window_text[len(self._read_text) :]
        elif self._read_text.endswith(REPLACEMENT_CHARACTER):
            # The prompt ended inside a character, which is whole now: it is output.
            new_text = remove_common_prefix(window_text, self._read_text)
        else:
            # A byte-fallback decoder (Llama 2) makes every byte of a run U+FFFD once one is
            # invalid, those of characters already shown too. They stand; the rest is decoded on its
            # own.
            new_text = decode(self.tokenizer, self._window[self._read_offset :])
        if not new_text:
            # A token without text, such as an id beyond the tokenizer's own: no context for the
            # next.
            return ""
        if self._unspaced and all(i in self._unspaced for i in self._window[-2:]):
            new_text = self._unspaced[next_token_id]

        self._window = self._window[self._read_offset :]
        self._read_offset = len(self._window)
        self._read_text = decode(self.tokenizer, self._window)
        return new_text


def check_stop_strings(
    output_text: str, new_char_count: int, stop: list[str], include_in_output: bool
) -> tuple[str, int] | None:
    """Find the stop string that is complete first, looking only at those that end in the new text.

    Args:
        output_text: all text so far.
        new_char_count: how many characters at its end have not been searched yet.
        stop: the stop strings; of two that end at the same place, the first in this list counts.
        include_in_output: whether the text is cut after the stop string or before it.

    Returns:
        (the stop string, the length to cut the text to), or None.
    """
    if new_char_count <= 0:
        return None
    searched = len(output_text) - new_char_count
    found: tuple[str, int] | None = None
    found_end = len(output_text) + 1
    for stop_string in stop:
        start = output_text.find(stop_string, max(searched - len(stop_string) + 1, 0))
        if start != -1 and start + len(stop_string) < found_end:
            found_end = start + len(stop_string)
            found = stop_string, found_end if include_in_output else start
    return found
