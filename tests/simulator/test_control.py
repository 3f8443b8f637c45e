"""The simulator's own endpoints."""

from __future__ import annotations

import json
from typing import Any

CHAT = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Who? " * 80}]}
PATH = "/v1/chat/completions"


def test_state_tells_what_was_done(serve):
    served = serve("both")
    for _ in range(2):
        served.post(PATH, CHAT)
    state = served.state()
    assert (state["requests_total"], state["output_tokens_total"]) == (2, 10)
    assert (
        state["cached_tokens_total"] + state["computed_tokens_total"]
        == state["prompt_tokens_total"]
    )
    assert state["kv_used_tokens"] == 0
    assert state["kv_cached_tokens"] >= state["cached_tokens_total"] > 0
    assert (state["running"], state["waiting"], state["prefilling"]) == (0, 0, 0)
    assert state["open_connections"] == 1
    assert state["busy_s"] > 0


def test_requests_can_be_recorded(serve):
    served = serve("both")
    served.post(PATH, CHAT)
    assert served.state()["received"] == []
    served.client.put(served.url() + "/sim/record", json={"last": 2})
    for i in range(3):
        served.post(PATH, CHAT | {"user": f"u{i}"}, headers={"x-request-id": f"r{i}"})
    received = served.state()["received"]
    assert [item["headers"]["x-request-id"] for item in received] == ["r1", "r2"]
    assert json.loads(received[1]["body"])["user"] == "u2"
    wrong: list[Any] = [{}, {"last": "x"}, []]
    for bad in wrong:
        assert served.client.put(served.url() + "/sim/record", json=bad).status_code == 400


def test_reset_starts_counting_anew(serve):
    served = serve("both")
    served.post(PATH, CHAT)
    engine_id = served.state()["engine_id"]
    assert served.client.post(served.url() + "/sim/reset").status_code == 200
    state = served.state()
    assert (state["requests_total"], state["kv_cached_tokens"]) == (0, 0)
    assert state["engine_id"] == engine_id
    reply = served.post(PATH, CHAT).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_reset_waits_for_nothing_that_runs(serve):
    served = serve("both", speed=1.0)
    with served.client.stream(
        "POST", served.url() + PATH, json=CHAT | {"max_tokens": 5000, "stream": True}
    ):
        assert served.client.post(served.url() + "/sim/reset").status_code == 409


def test_bad_faults_are_explained(serve):
    served = serve("both")
    for body, said in (({"slow": 0}, "above 0"), ({"melt": True}, "unknown"), ({"die": 1}, "die")):
        reply = served.client.put(served.url() + "/sim/faults", json=body)
        assert reply.status_code == 400
        assert said in reply.json()["detail"]
    assert served.client.get(served.url() + "/sim/faults").json()["slow"] == 1


def test_nothing_else_is_there(serve):
    served = serve("both")
    assert served.get("/sim/nothing").status_code == 404
    assert served.client.post(served.url() + "/sim/state").status_code == 404
