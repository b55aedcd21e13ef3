"""Programs that went wrong when an id was used again, kept as plain tests."""

from __future__ import annotations

from nanovllm.inputs import TokensPrompt
from nanovllm.sampling_params import SamplingParams
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


def test_an_id_may_be_used_again_at_once_after_a_stop_token() -> None:
    """Async: when a stop token ends a request, a step planned for it is still under way.

    The new request's answer once began with the token of that step.
    """
    engine = make_engine((("async_scheduling", True),))
    prompt = [1, 2, 3]
    stop = alone(tuple(prompt), 3, None).tokens[-1]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    engine.add_request("a", TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        engine.step()
    second = Client([9, 8, 7, 6], 6)
    engine.add_request("a", TokensPrompt(prompt_token_ids=second.prompt), make_params(second, True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    tokens = alone(tuple(second.prompt), second.max_tokens, None).tokens
    assert list(outputs[0].outputs[0].token_ids) == tokens
