"""Events: the quick way and the general one say the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest

from simulator.text import Answer
from simulator.vllm.replies import Choice, Usage
from simulator.vllm.requests import Call
from simulator.vllm.streams import DONE, Stream

PROMPT = np.arange(3, dtype=np.uint32)


def call(endpoint="chat", **members):
    return Call(endpoint=endpoint, id="id", model="m", prompts=(PROMPT,), stream=True, **members)


def rendered(call, finish="length"):
    choice = Choice(0, Answer(9), PROMPT, finish=finish)
    usage = Usage(3, 0, 0, None)
    stream = Stream(call, 1)
    return [
        orjson.loads(event.removeprefix(b"data: "))
        for event in stream.opening(choice, usage) + stream.tokens(choice, 0, 8, usage)
    ]


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@pytest.mark.parametrize("finish", [None, "length"])
def test_plain_events_have_the_shape_of_special_ones(endpoint, finish):
    plain = rendered(call(endpoint), finish)
    special = rendered(call(endpoint, continuous_usage=True), finish)
    for event in special:
        del event["usage"]
    assert plain == special
    assert [list(a) for a in plain] == [list(b) for b in special]


def test_a_completion_opens_with_its_first_token():
    assert len(rendered(call("completion"))) == 8
    assert len(rendered(call("chat"))) == 9


def test_the_end_carries_usage_only_if_asked():
    usage = Usage(3, 8, 2, 1)
    assert Stream(call(), 1).closing(usage) == [DONE]
    last, done = Stream(replace(call(), include_usage=True), 1).closing(usage)
    assert done == DONE
    told = orjson.loads(last.removeprefix(b"data: "))["usage"]
    assert told["total_tokens"] == 11
    assert told["prompt_tokens_details"] == {"cached_tokens": 2, "created_cache_tokens": 1}
