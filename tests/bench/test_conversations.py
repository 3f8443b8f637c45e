import json
from itertools import pairwise

from bench.conversations import conversation


def all_requests(count=300):
    return [request for number in range(count) for request in conversation(number, 7, "m")]


def test_the_same_seed_gives_the_same_calls():
    assert [r.body for r in all_requests(20)] == [r.body for r in all_requests(20)]


def test_turns_extend_each_other():
    for number in range(50):
        turns = [r for r in conversation(number, 1, "m") if "messages" in r.body]
        for earlier, later in pairwise(turns):
            before = earlier.body["messages"]
            assert later.body["messages"][: len(before)] == before


def test_every_variant_occurs():
    requests = all_requests()
    bodies = [request.body for request in requests]
    assert {request.path for request in requests} == {
        "/v1/chat/completions",
        "/v1/completions",
    }
    for key in ("stop", "n", "min_tokens", "tools", "stream_options", "max_completion_tokens"):
        assert any(key in body for body in bodies)
    assert any(isinstance(body.get("prompt"), list) for body in bodies)
    assert any(not json.dumps(body, ensure_ascii=False).isascii() for body in bodies)
    assert max(request.turn for request in requests) == 5
    assert {request.streams for request in requests} == {True, False}


def test_no_call_contradicts_itself():
    for request in all_requests():
        body = request.body
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        assert body.get("min_tokens", 0) <= (limit or 0)
        assert "stream_options" not in body or body["stream"]
