"""A program that tests/spec/test_engine.py found to go wrong, kept as a plain test."""

from __future__ import annotations

from nanovllm.inputs import TokensPrompt
from tests.spec.test_engine import Client, alone, make_engine, make_params


def test_an_id_may_be_used_again_at_once_after_an_abort() -> None:
    """Async: a step planned for the aborted request comes back when its id names another one.

    The new request's answer once began with the old one's token.
    """
    engine = make_engine((("async_scheduling", True),))
    first, second = Client([1, 2, 3], 6), Client([9, 8, 7, 6], 6)
    prompt = TokensPrompt(prompt_token_ids=first.prompt)
    engine.add_request("a", prompt, make_params(first, True))
    engine.step()
    engine.step()
    engine.abort_request(["a"])
    prompt = TokensPrompt(prompt_token_ids=second.prompt)
    engine.add_request("a", prompt, make_params(second, True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    tokens = alone(tuple(second.prompt), second.max_tokens, None).tokens
    assert list(outputs[0].outputs[0].token_ids) == tokens
