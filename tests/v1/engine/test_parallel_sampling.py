"""One request with n samples is n requests for the core and one for the user."""

from __future__ import annotations

from itertools import permutations

import pytest
from tiny_tokenizer import make_request

from nanovllm.outputs import CompletionOutput
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.v1.engine.parallel_sampling import ParentRequest


def finished(index: int) -> CompletionOutput:
    return CompletionOutput(index, f"text {index}", [index], finish_reason="length")


def running(index: int) -> CompletionOutput:
    return CompletionOutput(index, f"text {index}", [index])


def test_children_are_named_by_index_and_ask_for_one_sample() -> None:
    parent = ParentRequest(make_request(n=3, temperature=0.5, top_p=0.9))
    children = [parent.get_child_info(index) for index in range(3)]
    assert [child_id for child_id, _ in children] == ["0_x", "1_x", "2_x"]
    assert all(params.n == 1 for _, params in children)
    assert all(params.top_p == 0.9 for _, params in children)
    assert parent.n == 3


def test_seeded_children_have_seeds_of_their_own_and_unseeded_ones_share_parameters() -> None:
    """The seed plus the index, as upstream: the same seed would give n times the same sample."""
    seeded = ParentRequest(make_request(n=3, seed=40))
    assert [seeded.get_child_info(index)[1].seed for index in range(3)] == [40, 41, 42]
    assert seeded.sampling_params.seed == 40
    unseeded = ParentRequest(make_request(n=2))
    first, second = (unseeded.get_child_info(index)[1] for index in range(2))
    assert first is second
    assert first.seed is None


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_final_outputs_are_gathered_in_order_of_index_whatever_finishes_first(
    order: tuple[int, ...],
) -> None:
    parent = ParentRequest(make_request(n=3, output_kind=RequestOutputKind.FINAL_ONLY))
    ids = [parent.get_child_info(index)[0] for index in range(3)]
    for index in order[:-1]:
        assert parent.get_outputs(ids[index], finished(index)) == ([], False)
    outputs, done = parent.get_outputs(ids[order[-1]], finished(order[-1]))
    assert done
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.text for output in outputs] == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_streamed_outputs_pass_through_until_the_last_child_has_finished(
    kind: RequestOutputKind,
) -> None:
    parent = ParentRequest(make_request(n=2, output_kind=kind))
    ids = [parent.get_child_info(index)[0] for index in range(2)]
    assert parent.get_outputs(ids[0], running(0)) == ([running(0)], False)
    assert parent.get_outputs(ids[0], finished(0)) == ([finished(0)], False)
    assert parent.get_outputs(ids[1], running(1)) == ([running(1)], False)
    assert parent.get_outputs(ids[1], finished(1)) == ([finished(1)], True)
