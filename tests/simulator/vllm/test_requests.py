"""Requests: what is understood, what is refused, and how."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.tokenizer import encode
from simulator.vllm.errors import ApiError
from simulator.vllm.requests import Served, load_body, parse_call, parse_kv_transfer_params

SERVED = Served(("tiny", "small"), 1000)


def parse(endpoint="chat", **members):
    base = {"messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {}
    return parse_call(endpoint, base | members, SERVED, "r")


def refused(endpoint="chat", **members):
    with pytest.raises(ApiError) as caught:
        parse(endpoint, **members)
    return caught.value


def test_max_completion_tokens_wins_on_chat():
    assert parse(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert parse(max_tokens=5).max_tokens == 5
    assert parse().max_tokens is None
    assert parse("completion", prompt="Hi", max_completion_tokens=3).max_tokens == 16


def test_an_answer_that_may_not_stop_fills_the_window():
    call = parse(ignore_eos=True)
    assert call.max_tokens == SERVED.max_model_len - len(call.prompts[0])
    assert parse(ignore_eos=True, max_tokens=3).max_tokens == 3


def test_prompts_of_every_kind():
    hello = encode("Hello").tolist()
    kinds = ["Hello", hello, ["Hello", "Hello"], [hello, hello]]
    calls = [parse("completion", prompt=prompt) for prompt in kinds]
    assert [len(call.prompts) for call in calls] == [1, 1, 2, 2]
    assert all(tokens.tolist() == hello for call in calls for tokens in call.prompts)
    assert parse("completion", prompt=hello, n=3).choices == 3


def test_ids_of_the_handoff_replace_the_prompt():
    params = {"do_remote_decode": True, "prompt_token_ids": [1, 2, 3]}
    assert parse(kv_transfer_params=params).prompts[0].tolist() == [1, 2, 3]
    for bad in ([1, -2], [1.5], ["a"], [], "abc", [2**32], [True]):
        assert refused(kv_transfer_params={"prompt_token_ids": bad}).status == 400


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 1}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1000}, "input_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "body.messages"),
        ({"max_tokens": [1]}, "body.max_tokens"),
        ({"kv_transfer_params": "x"}, "body.kv_transfer_params"),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "input_tokens"),
    ],
)
def test_refusals(members, param):
    error = refused(**members)
    assert (error.status, error.param) == (400, param)
    assert set(orjson.loads(error.body())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("prompt", [[], "", [[]], {"a": 1}, [None], ["a", 3]])
def test_refused_prompts(prompt):
    assert refused("completion", prompt=prompt).status == 400


def test_lenient_integers_are_taken():
    assert parse(max_tokens="5").max_tokens == 5
    assert parse(max_tokens=5.0).max_tokens == 5


def test_unknown_members_and_models():
    assert parse(model="small", anything=[1], temperature="hot").model == "small"
    error = refused(model="other")
    assert (error.status, error.kind) == (404, "NotFoundError")
    assert "tiny, small" in error.message


def test_claims():
    full: dict[str, Any] = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "p",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
    }
    remote, keep = claimed(full)
    assert (remote.engine_id, remote.blocks, remote.cached_tokens, keep) == (
        "p",
        (1, 2),
        None,
        False,
    )
    assert claimed(full | {"remote_block_ids": [1, 2]})[0].blocks == (1, 2)
    empty: list[Any] = [[], [[]], None]
    for nothing in empty:
        assert claimed(full | {"remote_block_ids": nothing})[0] is None
    for missing in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
        assert claimed({k: v for k, v in full.items() if k != missing})[0].engine_id is None
    assert claimed({"do_remote_decode": True}) == (None, True)
    assert claimed(None) == (None, False)


def claimed(params: Any) -> Any:
    return parse_kv_transfer_params(params)


def test_truncation_keeps_the_end():
    assert parse("completion", prompt=[1, 2, 3, 4], truncate_prompt_tokens=2).prompts[
        0
    ].tolist() == [3, 4]


def test_bodies_that_are_no_objects():
    for raw in (b"[1]", b"3", b'"x"', b"\xff\xfe", b"{", b""):
        with pytest.raises(ApiError) as caught:
            load_body(raw)
        assert caught.value.status == 400


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "function", "name"]), inner)
    ),
    max_leaves=8,
)
members = st.dictionaries(
    st.sampled_from(
        [
            "messages", "prompt", "model", "max_tokens", "max_completion_tokens", "min_tokens",
            "n", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "tools",
            "tool_choice", "cache_salt", "kv_transfer_params", "truncate_prompt_tokens", "echo",
            "stream_interval", "chat_template_kwargs", "return_token_ids", "continue_final_message",
        ]
    ),
    anything,
)  # fmt: skip


@given(st.sampled_from(["chat", "completion"]), members, st.booleans())
def test_whatever_comes_is_understood_or_refused(endpoint, body, sound):
    if sound:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "model": "tiny"}
    found = outcome(endpoint, body)
    if isinstance(found, ApiError):
        assert 400 <= found.status < 500
        assert orjson.loads(found.body())
        return
    assert all(0 < len(prompt) < SERVED.max_model_len for prompt in found.prompts)
    assert found.max_tokens is None or found.max_tokens >= max(1, found.min_tokens)


def outcome(endpoint, body):
    try:
        return parse_call(endpoint, body, SERVED, "r")
    except ApiError as error:
        return error
