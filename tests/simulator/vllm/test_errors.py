"""Errors in the engine's words."""

from __future__ import annotations

import orjson

from simulator.vllm.errors import ERROR_EVENT, INTERNAL_ERROR, invalid, refused


def test_an_error_has_the_four_members():
    for error in (INTERNAL_ERROR, refused("n", "No.", 3), invalid("n", "int", "No", "'x'")):
        body = orjson.loads(error.body())
        assert list(body["error"]) == ["message", "type", "param", "code"]
        assert body["error"]["code"] == error.status


def test_the_event_says_what_the_body_says():
    event = orjson.loads(ERROR_EVENT.removeprefix(b"data: "))
    assert event == orjson.loads(INTERNAL_ERROR.body())


def test_who_refuses_shows():
    assert refused("n", "No.", 3).kind == "BadRequestError"
    assert invalid("n", "int", "No", "'x'").kind == "Bad Request"
    assert invalid("n", "int", "No", "'x'").param == "body.n"
