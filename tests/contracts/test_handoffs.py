"""What every handoff protocol has to keep to, over all of them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.handoff import HANDOFFS, Handoff

quick = settings(deadline=None, max_examples=50)
handoffs = st.sampled_from(sorted(HANDOFFS))

# Bodies as clients send them, with every member that makes trouble on a prefill leg.
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "東京 🚀?"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 500,
    "max_completion_tokens": 400,
    "min_tokens": 16,
    "stop": ["\n"],
    "stop_token_ids": [7],
    "logprobs": True,
    "top_logprobs": 5,
    "temperature": 0.7,
    "seed": 3,
    "cache_salt": "tenant",
    "chat_template_kwargs": {"enable_thinking": False},
    "response_format": {"type": "json_object"},
    "made_up": {"by": ["the", "client"]},
}
COMPLETION: dict[str, Any] = {
    "model": "m",
    "prompt": "Once upon a time",
    "stream": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "echo": False,
    "suffix": None,
    "made_up": 1,
}
KEPT = (
    *("model", "messages", "prompt", "tools", "tool_choice", "temperature", "seed", "cache_salt"),
    *("chat_template_kwargs", "response_format", "made_up", "suffix"),
)
PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"new_member":{"a":null}}'


@pytest.fixture(params=sorted(HANDOFFS))
def handoff(request) -> Handoff:
    return HANDOFFS[request.param]


@pytest.fixture(params=["chat", "completion"])
def call(request) -> tuple[dict[str, Any], bool]:
    chat = request.param == "chat"
    return copy.deepcopy(CHAT if chat else COMPLETION), chat


def test_prefill_asks_for_one_token_in_one_piece(handoff, call):
    body, chat = call
    leg = json.loads(handoff.prefill(body, chat))
    assert leg["max_tokens"] == 1
    assert leg.get("max_completion_tokens", 1) == 1
    assert leg["stream"] is False
    assert "stream_options" not in leg
    assert "min_tokens" not in leg
    assert leg.get("n", 1) == 1


def test_a_chat_limits_both_spellings_and_a_completion_only_its_own(handoff):
    assert json.loads(handoff.prefill(CHAT, True))["max_completion_tokens"] == 1
    bare = json.loads(handoff.prefill({"model": "m", "messages": []}, True))
    assert (bare["max_tokens"], bare["max_completion_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in json.loads(handoff.prefill(COMPLETION, False))


def test_nothing_ends_the_prefill_leg_at_its_token(handoff, call):
    body, chat = call
    leg = json.loads(handoff.prefill(body, chat))
    assert "stop" not in leg
    assert "stop_token_ids" not in leg
    assert leg["ignore_eos"] is True


def test_what_decides_the_prompt_survives_on_every_leg(handoff, call):
    body, chat = call
    legs = [handoff.prefill(body, chat), handoff.release(body, chat, PARAMS)]
    for leg in map(json.loads, legs):
        for member in KEPT:
            assert leg.get(member) == body.get(member), member
            assert (member in leg) is (member in body), member


def test_inputs_stay_as_they_are(handoff, call):
    body, chat = call
    before = copy.deepcopy(body)
    reply = {"kv_transfer_params": {"remote_block_ids": [[1]]}}
    handoff.prefill(body, chat)
    handoff.release(body, chat, PARAMS)
    handoff.transfer_params(reply)
    assert body == before
    assert reply == {"kv_transfer_params": {"remote_block_ids": [[1]]}}


def test_equal_inputs_give_equal_legs(handoff, call):
    body, chat = call
    assert handoff.prefill(body, chat) == handoff.prefill(copy.deepcopy(body), chat)


def test_decode_is_the_clients_bytes_and_the_params_behind_them(handoff):
    raw = b'{ "model" : "m" ,\n "n": 1.0, "x": 1e2, "y": "\\u0041 }" }\n'
    leg = handoff.decode(raw, PARAMS)
    kept = raw[: raw.rindex(b"}")]
    assert leg.startswith(kept)
    assert json.loads(leg[len(kept) :].lstrip(b",").join([b"{", b""])) == {
        "kv_transfer_params": json.loads(PARAMS)
    }
    assert json.loads(leg) == json.loads(raw) | {"kv_transfer_params": json.loads(PARAMS)}


@quick
@given(
    handoffs,
    st.dictionaries(st.text(max_size=6), st.text(max_size=6) | st.integers(0, 9), min_size=1),
    st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}]),
)
def test_decode_adds_one_member_to_any_body(name, body, spelling):
    raw = json.dumps(body, **spelling).encode("utf-8", "surrogatepass")
    leg = HANDOFFS[name].decode(raw, PARAMS)
    members = json.loads(leg, object_pairs_hook=list)
    assert members[:-1] == list(body.items())
    assert members[-1][0] == "kv_transfer_params"


@pytest.mark.parametrize("reply", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}])
def test_a_reply_without_params_says_so(handoff, reply):
    assert handoff.transfer_params(reply) is None


def test_params_are_passed_on_whole(handoff):
    reply = {"kv_transfer_params": json.loads(PARAMS), "choices": []}
    params = handoff.transfer_params(reply)
    assert params is not None
    assert json.loads(params) == json.loads(PARAMS)


def test_release_takes_the_kv_over_and_makes_no_more_than_a_token(handoff, call):
    body, chat = call
    leg = json.loads(handoff.release(body, chat, PARAMS))
    assert leg["kv_transfer_params"] == json.loads(PARAMS)
    assert leg["max_tokens"] == 1
    assert leg["stream"] is False


def test_odd_bodies_are_shaped_too(handoff):
    odd = {"model": "m", "messages": ["\ud800", 10**30], "max_tokens": "many", "stream": "yes"}
    leg = json.loads(handoff.prefill(odd, True))
    assert leg["messages"] == odd["messages"]
    assert (leg["max_tokens"], leg["stream"]) == (1, False)
