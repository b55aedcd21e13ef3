"""schemathesis makes requests of the OpenAPI description, valid and not: none may be a 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from live_server import LiveServer

from nanovllm.entrypoints.openai.protocol import UNSUPPORTED

schemathesis = pytest.importorskip("schemathesis")

FEW = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# Whatever valid value they have is refused here, and the rest of the request is not looked at.
REFUSED = (*UNSUPPORTED, "model", "priority", "chat_template", "request_id")


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_makes_the_server_fail(live: LiveServer, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    statuses: Counter[int] = Counter()

    def check(case: Any) -> None:
        if mode == "POSITIVE" and isinstance(case.body, dict):
            for name in REFUSED:
                case.body.pop(name, None)
            for name in ("max_tokens", "n"):  # no long answers
                if case.body.get(name, 99) is None or case.body.get(name, 99) > 2:
                    case.body[name] = 2
            if case.body.get("prompt"):
                case.body["prompt"] = "Once upon a time"
            if case.body.get("messages"):
                case.body["messages"] = [{"role": "user", "content": "Hi"}]
        response = case.call()
        statuses[response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == "NEGATIVE" and operation.body.items == []:
            continue  # nothing that could be wrong
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])
        FEW(given(case=strategy)(check))()
    # Both kinds of answer were seen, so the requests were more than noise.
    assert any(400 <= status < 500 for status in statuses)
    if mode == "POSITIVE":
        assert statuses[200] > 20
