"""Loading the tokenizer and turning ids back into text.

Upstream: vllm/tokenizers/ (0.23.0), a package there: `registry.get_tokenizer`,
`detokenizer_utils.convert_ids_list_to_tokens`.
Left out: Mistral's, DeepSeek's and other tokenizers of their own make, the TokenizerLike protocol
(a tokenizer here is a transformers tokenizer), revisions and remote code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What a decoder shows for bytes that are no character, or not yet one.
REPLACEMENT_CHARACTER = "\ufffd"


def get_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local checkpoint folder.

    Raises:
        VLLMValidationError: the folder holds none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:
        reason = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise VLLMValidationError(
            f"the tokenizer in {folder!r} cannot be loaded: {reason}",
            parameter="tokenizer",
            value=folder,
        ) from e


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """The text of `token_ids` taken together, exactly as the tokenizer's decoder gives it.

    Bytes that form no character become U+FFFD, as do those of a character whose end is missing. The
    fast tokenizer's Rust object is called directly: detokenizing is done twice a token, and
    transformers' wrapper costs four times as much as the decoding itself.
    """
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )
    text = tokenizer.decode(
        list(token_ids),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return str(text)  # a str it is already: one sequence was given


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What `decode` leaves out with skip_special_tokens.

    `all_special_ids` has only the tokens with a role (EOS, padding ...); chat models mark further
    ones as special, such as Llama 3's <|eot_id|>.
    """
    marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(marked.union(tokenizer.all_special_ids))


def convert_ids_list_to_tokens(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]
) -> list[str]:
    """The text of each id on its own, special tokens included."""
    return [decode(tokenizer, [token_id]) for token_id in token_ids]


def remove_common_prefix(text: str, shown: str) -> str:
    """What `text` goes on with where it and `shown` begin to differ."""
    length = 0
    for a, b in zip(text, shown, strict=False):
        if a != b:
            break
        length += 1
    return text[length:]
