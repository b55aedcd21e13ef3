"""Text comes out as it is decoded as a whole, a piece at a time, and is never taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import EOS, byte_fallback_tokenizer, byte_level_tokenizer, make_request
from transformers import PreTrainedTokenizerFast

from nanovllm.tokenizers import decode
from nanovllm.v1.engine.detokenizer import (
    BaseIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    check_stop_strings,
)

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
TOKENIZERS = [pytest.param(BYTE_LEVEL, id="bytes"), pytest.param(BYTE_FALLBACK, id="fallback")]
EMOJI = "\U0001f600"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TEXTS = st.text(
    st.one_of(
        st.sampled_from("abc ,.\n日本語한\u0301\u200d\U0001f468\U0001f600"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)
# The hundred and more merges of this tokenizer join whole and half characters in every way.
BYTE_LEVEL_IDS = st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=25)


def new_detokenizer(
    tokenizer: PreTrainedTokenizerFast | None, prompt: list[int] | None = None, **params: Any
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer.from_new_request(tokenizer, make_request(prompt, **params))


def deltas(
    detokenizer: IncrementalDetokenizer, token_ids: list[int], last: bool = True
) -> list[str]:
    """What is shown after each token, the request ending with the last one."""
    shown = []
    for i, token_id in enumerate(token_ids):
        detokenizer.update([token_id], stop_terminated=False)
        finished = last and i == len(token_ids) - 1
        shown.append(detokenizer.get_next_output_text(finished, delta=True))
    return shown


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def byte_ids(text: str) -> list[int]:
    """One token a byte, as a model may well choose to write it."""
    return [BYTE_FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


# ---- the text is that of the whole ----


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=TEXTS)
@example(text=FAMILY + "日本語 cafe\u0301")
@example(text="  two spaces, and  two")
def test_pieces_of_a_text_join_to_the_text_as_decoded_at_once(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    """Joined deltas are what the whole decodes to after the prompt; no U+FFFD of our own."""
    prompt = encode(tokenizer, "a cat")
    token_ids = encode(tokenizer, text)
    whole = decode(tokenizer, prompt + token_ids)[len(decode(tokenizer, prompt)) :]
    pieces = deltas(new_detokenizer(tokenizer, prompt), token_ids)
    # A U+FFFD that the text itself ends with cannot be told from half a character.
    assert "".join(pieces) == whole.rstrip("\ufffd") or not whole.endswith("\ufffd")
    if "\ufffd" not in text:
        assert "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)


@given(token_ids=BYTE_LEVEL_IDS, prompt=BYTE_LEVEL_IDS)
@settings(max_examples=300)
def test_any_tokens_whatsoever_decode_to_what_they_decode_to_at_once(
    token_ids: list[int], prompt: list[int]
) -> None:
    """Random bytes: all but a last, perhaps unfinished character is shown as in the whole."""
    prompt = [*prompt, *encode(BYTE_LEVEL, "a cat")]
    whole = decode(BYTE_LEVEL, prompt + token_ids, skip_special_tokens=True)
    whole = whole[len(decode(BYTE_LEVEL, prompt, skip_special_tokens=True)) :]
    shown = "".join(deltas(new_detokenizer(BYTE_LEVEL, prompt), token_ids))
    assert whole.startswith(shown)
    held_back = whole[len(shown) :]
    assert held_back == "" or held_back.endswith("\ufffd")


@given(token_ids=BYTE_LEVEL_IDS)
def test_cumulative_text_only_grows(token_ids: list[int]) -> None:
    detokenizer = new_detokenizer(BYTE_LEVEL)
    before = ""
    for token_id in token_ids:
        detokenizer.update([token_id], stop_terminated=False)
        text = detokenizer.get_next_output_text(finished=False, delta=False)
        assert text.startswith(before)
        before = text


def test_several_tokens_in_one_step_give_the_same_text_as_one_by_one() -> None:
    token_ids = encode(BYTE_LEVEL, f"The cat was {FAMILY}happy.")
    detokenizer = new_detokenizer(BYTE_LEVEL)
    detokenizer.update(token_ids, stop_terminated=False)
    assert detokenizer.get_next_output_text(finished=True, delta=True) == "".join(
        deltas(new_detokenizer(BYTE_LEVEL), token_ids)
    )
    assert detokenizer.output_token_ids == token_ids


# ---- never half a character ----


@pytest.mark.parametrize("text", [EMOJI, "日", "é", FAMILY])
def test_a_character_is_shown_only_when_all_its_bytes_are_there(text: str) -> None:
    """Every byte but a character's last shows nothing; the last shows all of it."""
    pieces = deltas(new_detokenizer(BYTE_FALLBACK, encode(BYTE_FALLBACK, "a")), byte_ids(text))
    expected = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert pieces == expected


def test_half_a_character_at_the_very_end_is_never_shown() -> None:
    """max_tokens may cut an emoji in two: the text ends before it."""
    pieces = deltas(new_detokenizer(BYTE_FALLBACK), [*byte_ids("a"), *byte_ids(EMOJI)[:3]])
    assert pieces == ["a", "", "", ""]


def test_bytes_that_turn_out_to_be_invalid_are_shown_as_the_decoder_shows_them() -> None:
    broken = [*byte_ids(EMOJI)[:2], *encode(BYTE_FALLBACK, " cat")]
    prompt = encode(BYTE_FALLBACK, "a")
    assert "".join(deltas(new_detokenizer(BYTE_FALLBACK, prompt), broken)) == "\ufffd\ufffd cat"


def test_a_character_that_the_decoder_would_take_back_stands() -> None:
    """Byte fallback turns a whole run of bytes into U+FFFD once one of them is invalid."""
    token_ids = [*byte_ids("é"), byte_ids("é")[0], *encode(BYTE_FALLBACK, " cat")]
    assert decode(BYTE_FALLBACK, token_ids) == "\ufffd\ufffd\ufffd cat"
    assert "".join(deltas(new_detokenizer(BYTE_FALLBACK), token_ids)) == "é\ufffd cat"


# ---- the prompt's tail ----


@pytest.mark.parametrize("prompt_text", ["a cat", "a cat ", EMOJI, FAMILY * 3, "", " "])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_no_part_of_the_prompt_is_shown(
    tokenizer: PreTrainedTokenizerFast, prompt_text: str
) -> None:
    prompt = encode(tokenizer, prompt_text) or [tokenizer.eos_token_id]
    token_ids = encode(tokenizer, "x" + EMOJI)[-5:]
    whole = decode(tokenizer, prompt + token_ids, skip_special_tokens=True)
    tail = decode(tokenizer, prompt, skip_special_tokens=True)
    assert "".join(deltas(new_detokenizer(tokenizer, prompt), token_ids)) == whole[len(tail) :]


def test_a_character_that_the_prompt_began_is_shown_alone() -> None:
    """tokenizers' own DecodeStream answers with the whole prompt here."""
    ids = [BYTE_LEVEL.convert_tokens_to_ids(c) for c in "ðŁĺĢ"]  # the four bytes of the emoji
    assert decode(BYTE_LEVEL, ids) == EMOJI
    prompt = encode(BYTE_LEVEL, "The cat was") + ids[:2]
    assert deltas(new_detokenizer(BYTE_LEVEL, prompt), ids[2:]) == ["", EMOJI]


def test_bytes_at_the_prompts_end_that_stay_invalid_are_not_shown() -> None:
    first = BYTE_LEVEL.convert_tokens_to_ids("ð")
    prompt = [*encode(BYTE_LEVEL, "cat"), first]
    assert deltas(new_detokenizer(BYTE_LEVEL, prompt), encode(BYTE_LEVEL, "x")) == ["x"]


def test_the_space_before_a_word_depends_on_whether_something_precedes_it() -> None:
    """Llama 2's decoder drops a leading space; after a prompt it is not leading."""
    token_ids = [BYTE_FALLBACK.convert_tokens_to_ids("▁cat")]
    after_text = new_detokenizer(BYTE_FALLBACK, encode(BYTE_FALLBACK, "a"))
    after_nothing = new_detokenizer(BYTE_FALLBACK, [BYTE_FALLBACK.bos_token_id])
    assert deltas(after_text, token_ids) == [" cat"]
    assert deltas(after_nothing, token_ids) == ["cat"]


def test_special_tokens_at_the_prompts_end_do_not_hide_the_text_before_them() -> None:
    prompt = [*encode(BYTE_FALLBACK, "a"), *[BYTE_FALLBACK.eos_token_id] * 9]
    token_ids = [BYTE_FALLBACK.convert_tokens_to_ids("▁cat")]
    assert deltas(new_detokenizer(BYTE_FALLBACK, prompt), token_ids) == [" cat"]


def test_a_prompt_written_in_bytes_does_not_spoil_the_bytes_that_follow() -> None:
    """A byte-fallback decoder given half of the prompt's last characters would make all U+FFFD."""
    for prompt_text in ("日本", "é日", EMOJI, "aé"):
        pieces = deltas(
            new_detokenizer(BYTE_FALLBACK, byte_ids(prompt_text)), [*byte_ids("語"), *byte_ids("a")]
        )
        assert pieces == ["", "", "語", "a"]


def test_an_id_without_text_at_the_prompts_end_does_not_hide_the_text_before_it() -> None:
    prompt = [*encode(BYTE_FALLBACK, "a"), 5000]
    token_ids = [BYTE_FALLBACK.convert_tokens_to_ids("▁cat")]
    assert deltas(new_detokenizer(BYTE_FALLBACK, prompt), token_ids) == [" cat"]


def test_the_window_that_is_decoded_does_not_grow_with_the_text() -> None:
    """Else the cost of a text would grow with the square of its length."""
    detokenizer = new_detokenizer(BYTE_LEVEL)
    deltas(detokenizer, encode(BYTE_LEVEL, f"The cat was {FAMILY}happy. " * 40))
    assert detokenizer.num_output_tokens() > 400
    assert isinstance(detokenizer, SlowIncrementalDetokenizer)
    assert len(detokenizer._window) <= 8


# ---- special tokens ----


def test_special_tokens_are_left_out_or_shown_as_asked() -> None:
    token_ids = encode(BYTE_LEVEL, f"cat{EOS}{EOS}dog")
    assert "".join(deltas(new_detokenizer(BYTE_LEVEL), token_ids)) == "catdog"
    shown = new_detokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert "".join(deltas(shown, token_ids)) == f"cat{EOS}{EOS}dog"


def test_a_token_marked_special_is_skipped_even_without_a_role() -> None:
    """Llama 3's <|eot_id|> is such a token."""
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(BYTE_LEVEL.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("<|eot|>", special=True), AddedToken("<tool>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    eot = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert eot not in tokenizer.all_special_ids
    token_ids = encode(tokenizer, "cat<|eot|><tool>")
    assert eot in token_ids
    pieces = deltas(new_detokenizer(tokenizer), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True) == "cat<tool>"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    ids = [BYTE_LEVEL.convert_tokens_to_ids(c) for c in "ðŁĺĢ"]
    token_ids = [*ids[:2], BYTE_LEVEL.eos_token_id, *ids[2:]]
    assert "".join(deltas(new_detokenizer(BYTE_LEVEL), token_ids)) == EMOJI


def test_an_id_that_the_tokenizer_does_not_know_has_no_text_and_does_no_harm() -> None:
    """A model's vocabulary is often padded beyond the tokenizer's."""
    token_ids = [*encode(BYTE_FALLBACK, "a"), 5000, BYTE_FALLBACK.convert_tokens_to_ids("▁cat")]
    pieces = deltas(new_detokenizer(BYTE_FALLBACK, encode(BYTE_FALLBACK, "a")), token_ids)
    assert pieces == [" a", "", " cat"]


def test_adjacent_special_tokens_get_no_space_if_none_is_wanted() -> None:
    """A tokenizer without a decoder joins all tokens with spaces."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"cat": 0, "<a>": 1, "<b>": 2}, unk_token="cat"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<a>", "<b>"]
    )
    token_ids = [0, *tokenizer.convert_tokens_to_ids(["<a>", "<b>"]), 0]
    for wanted, text in ((True, " cat <a> <b> cat"), (False, " cat <a><b> cat")):
        detokenizer = new_detokenizer(
            tokenizer, [0], skip_special_tokens=False, spaces_between_special_tokens=wanted
        )
        assert "".join(deltas(detokenizer, token_ids)) == text


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    detokenizer = new_detokenizer(None)
    assert deltas(detokenizer, [7, 8]) == ["", ""]
    assert detokenizer.output_token_ids == [7, 8]
    assert detokenizer.num_output_tokens() == 2


# ---- stop strings ----

# Few letters, so that stop strings occur, overlap and begin without being completed.
PIECES = ["a", "b", "ab", "ba", "aab", "bb", "abab", "c"]


class PieceDetokenizer(BaseIncrementalDetokenizer):
    """Token i is the text PIECES[i]: stop strings without a tokenizer's own troubles."""

    def decode_next(self, next_token_id: int) -> str:
        return PIECES[next_token_id]


def first_stop(text: str, stop: list[str], from_char: int = 0) -> tuple[str, int, int] | None:
    """Read `text` a character at a time: (stop string, where it starts, where it ends)."""
    for end in range(from_char + 1, len(text) + 1):
        for stop_string in stop:
            if text[:end].endswith(stop_string):
                return stop_string, end - len(stop_string), end
    return None


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    per_step=st.integers(1, 3),
)
@example(token_ids=[6], stop=["abab", "b"], include=False, min_tokens=0, per_step=1)
@example(token_ids=[0, 1], stop=["a"], include=False, min_tokens=1, per_step=2)
@settings(max_examples=500)
def test_text_is_cut_at_the_first_stop_string_wherever_tokens_are_cut(
    token_ids: list[int], stop: list[str], include: bool, min_tokens: int, per_step: int
) -> None:
    """As if text came a character at a time, a token or several a step; what is shown stays."""
    detokenizer = PieceDetokenizer(
        make_request(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    )
    skipped = sum(len(PIECES[i]) for i in token_ids[:min_tokens])
    text, shown, matched = "", "", None
    for start in range(0, len(token_ids), per_step):
        step = token_ids[start : start + per_step]
        text += "".join(PIECES[i] for i in step)
        num_tokens = start + len(step)
        expected = first_stop(text, stop, skipped) if num_tokens > min_tokens else None
        matched = detokenizer.update(step, stop_terminated=False)
        finished = matched is not None or num_tokens == len(token_ids)
        shown += detokenizer.get_next_output_text(finished, delta=True)
        assert matched == (expected and expected[0])
        if expected is not None:
            text = text[: expected[2 if include else 1]]
        if finished:
            break
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.get_next_output_text(finished=True, delta=False) == text


def test_what_may_become_a_stop_string_is_held_back_and_released_at_the_end() -> None:
    """One character less than the longest stop string, as upstream."""
    detokenizer = PieceDetokenizer(make_request(stop=["ccc", "cc"]))
    token_ids = [PIECES.index(piece) for piece in ("ab", "a", "b")]
    assert deltas(detokenizer, token_ids, last=False) == ["", "a", "b"]
    assert detokenizer.get_next_output_text(finished=True, delta=True) == "ab"


def test_nothing_is_held_back_when_the_stop_string_is_to_be_shown() -> None:
    detokenizer = PieceDetokenizer(make_request(stop=["ccc"], include_stop_str_in_output=True))
    assert deltas(detokenizer, [2, 0], last=False) == ["ab", "a"]


def test_a_stop_string_is_found_across_tokens_and_inside_multibyte_text() -> None:
    detokenizer = new_detokenizer(BYTE_LEVEL, stop=[EMOJI + " and"])
    token_ids = encode(BYTE_LEVEL, f"happy {EMOJI} and so")
    matched = [detokenizer.update([token_id], stop_terminated=False) for token_id in token_ids]
    assert EMOJI + " and" in matched
    assert matched.count(None) >= 2
    until = matched.index(EMOJI + " and") + 1
    detokenizer = new_detokenizer(BYTE_LEVEL, stop=[EMOJI + " and"])
    detokenizer.update(token_ids[:until], stop_terminated=False)
    assert detokenizer.get_next_output_text(finished=True, delta=False) == "happy "


def test_a_stop_string_within_min_tokens_does_not_count_even_later() -> None:
    detokenizer = PieceDetokenizer(make_request(stop=["a"], min_tokens=2))
    a, b = PIECES.index("a"), PIECES.index("b")
    assert [detokenizer.update([i], stop_terminated=False) for i in (a, b, b, a)] == [
        None,
        None,
        None,
        "a",
    ]


@pytest.mark.parametrize(("include", "text"), [(False, "cat"), (True, "cat dog")])
def test_the_token_that_ended_the_request_is_output_but_not_text(include: bool, text: str) -> None:
    """A stop token's text is shown only with include_stop_str_in_output."""
    cat, dog = encode(BYTE_LEVEL, "cat"), encode(BYTE_LEVEL, " dog")
    detokenizer = new_detokenizer(BYTE_LEVEL, include_stop_str_in_output=include)
    detokenizer.update(cat, stop_terminated=False)
    detokenizer.update(dog[:-1], stop_terminated=False)
    detokenizer.update(dog[-1:], stop_terminated=True)
    shown = detokenizer.get_next_output_text(finished=True, delta=False)
    assert shown == text if include else shown == "cat" + decode(BYTE_LEVEL, dog[:-1])
    assert detokenizer.output_token_ids == cat + dog


def test_only_new_text_is_searched_for_stop_strings() -> None:
    assert check_stop_strings("xaay", 1, ["a"], include_in_output=False) is None
    assert check_stop_strings("xaay", 2, ["a"], include_in_output=False) == ("a", 2)
    assert check_stop_strings("xaay", 2, ["aay"], include_in_output=True) == ("aay", 4)
    assert check_stop_strings("xaay", 0, ["y"], include_in_output=False) is None
