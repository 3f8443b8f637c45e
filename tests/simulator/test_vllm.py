"""The dialect: replies have the shape of recorded replies of a real engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from simulator import vllm
from simulator.tokenizer import encode
from tests.simulator import recordings

NAMES = [
    "chat",
    "chat_cached",
    "chat_logprobs",
    "chat_n2",
    "chat_stream",
    "chat_stream_continuous_usage",
    "chat_token_ids",
    "completion",
    "completion_stream",
    "completion_token_ids",
    "completion_two_prompts",
    "error_bad_json",
    "error_leg2_dead_prefill",
    "error_leg2_dead_prefill_chat_stream",
    "error_leg2_dead_prefill_stream",
    "error_max_tokens_zero",
    "error_method",
    "error_no_messages",
    "error_not_found",
    "error_too_long",
    "error_unknown_model",
    "error_wrong_type",
    "health",
    "kv_event_sources",
    "leg2_unknown_request",
    "models",
    "pd_leg1_chat",
    "pd_leg1_chat_again",
    "pd_leg1_chat_ids",
    "pd_leg1_completion",
    "pd_leg1_short",
    "pd_leg2_chat",
    "pd_leg2_chat_ids",
    "pd_leg2_chat_stream",
    "pd_leg2_completion",
    "pd_leg2_short",
    "pd_plain_chat",
    "ping",
    "tokenize_chat",
    "version",
]
# Another connector's protocol, which this worker does not speak.
OTHER_PROTOCOL = {
    "mooncake_bootstrap_query",
    "mooncake_leg1",
    "mooncake_leg2",
    "mooncake_plain",
}
# The recordings are of a version before the one that is simulated.
NEWER_KEYS = {"remote_registration_generation"}


def shape(value: Any) -> Any:
    """Keys in order, types of values, distinct shapes of list items."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items() if key not in NEWER_KEYS]
    if isinstance(value, list):
        shapes: list[Any] = []
        for item in value:
            if shape(item) not in shapes:
                shapes.append(shape(item))
        return shapes
    return type(value).__name__


@pytest.fixture(scope="module")
def pair():
    from tests.simulator.conftest import Served

    limits = {"capacity_tokens": 32768, "max_model_len": 8192}
    served = Served("prefill", "decode", limits=limits, block_tokens=32)
    yield served
    served.close()


def request_body(served: Any, name: str, recorded: Any) -> Any:
    """The recorded body, with handoff parameters of the simulated prefill worker."""
    body = recorded["body"]
    if name == "error_too_long":
        return {"model": "tiny", "prompt": [300] * 9000, "max_tokens": 1}
    params = body.get("kv_transfer_params") if isinstance(body, dict) else None
    if not params or not params.get("do_remote_prefill") or params["remote_engine_id"] == "gone":
        return body
    leg1 = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    leg1 |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    leg1["return_token_ids"] = True
    found = served.post(recorded["path"], leg1).json()
    given = found["kv_transfer_params"]
    if params["remote_request_id"] == "cmpl-no-such-request":
        given |= {"remote_request_id": "cmpl-no-such-request", "remote_block_ids": [[900, 901]]}
    if "prompt_token_ids" in params:
        given["prompt_token_ids"] = found["prompt_token_ids"]
    return body | {"kv_transfer_params": given}


def test_every_recording_is_compared():
    folder = recordings.shared_dir() / "fixtures" / "vllm" / "http"
    assert {path.stem for path in folder.glob("*.json")} == {*NAMES, *OTHER_PROTOCOL}


@pytest.mark.parametrize("name", NAMES)
def test_reply_has_the_shape_of_the_recorded_one(pair, name):
    recorded = recordings.exchange(name)
    request = recorded["request"]
    at = 1 if recorded["role"] == "decode" else 0
    headers = {k: v for k, v in request["headers"].items() if k == "x-request-id"}
    if request["method"] == "GET":
        reply = pair.get(request["path"], at)
    else:
        body = request_body(pair, name, request)
        reply = pair.post(request["path"], body, at, headers=headers)
    assert reply.status_code == recorded["status"]
    for header in ("content-type", "server", "vary", "allow", "transfer-encoding"):
        assert reply.headers.get(header) == recorded["headers"].get(header), header
    if name == "kv_event_sources":
        return  # none without --kv-events
    if "event-stream" in reply.headers.get("content-type", ""):
        ours, theirs = recordings.events(reply.text), recordings.events(recorded["body"])
        assert [shape(event) for event in ours] == [shape(event) for event in theirs]
    elif recorded["body"]:
        ours, theirs = orjson.loads(reply.content), orjson.loads(recorded["body"])
        assert shape(ours) == shape(theirs)
        same_values(name, ours, theirs)
    else:
        assert reply.content == b""


def same_values(name: str, ours: Any, theirs: Any) -> None:
    """What has to be equal beyond its type."""
    if name.startswith("error_"):
        assert ours == theirs
        return
    for key in ("object", "model"):
        assert ours.get(key) == theirs.get(key)
    if "usage" in theirs:
        assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]
    for one, other in zip(ours.get("choices", ()), theirs.get("choices", ()), strict=True):
        assert one["finish_reason"] == other["finish_reason"]
        assert one["index"] == other["index"]


def test_metrics_have_recorded_names_and_labels(pair):
    recorded = recordings.text("metrics_decode.txt")

    def series(page: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for line in page.splitlines():
            if line.startswith("vllm:"):
                name, _, rest = line.partition("{")
                labels = {part.split('="')[0] for part in rest.split("} ")[0].split(",")}
                found.setdefault(name, set()).update(labels)
        return found

    pair.post("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 3})
    ours, theirs = series(pair.get("/metrics").text), series(recorded)
    assert set(ours) <= set(theirs)
    for name, labels in ours.items():
        assert labels <= theirs[name], name
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:nixl_num_kv_expired_reqs_total",
        "vllm:cache_config_info",
    } <= set(ours)


# -- requests -----------------------------------------------------------------------------------

SERVED = vllm.Served(("tiny", "small"), 1000)


def parse(endpoint="chat", **members):
    base = {"messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {}
    return vllm.parse_call(endpoint, base | members, SERVED, "r")


def refused(endpoint="chat", **members):
    with pytest.raises(vllm.ApiError) as caught:
        parse(endpoint, **members)
    return caught.value


def test_max_completion_tokens_wins_on_chat():
    assert parse(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert parse(max_tokens=5).max_tokens == 5
    assert parse().max_tokens is None
    assert parse("completion", prompt="Hi", max_completion_tokens=3).max_tokens == 16


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
    return vllm.parse_kv_transfer_params(params)


def test_truncation_keeps_the_end():
    assert parse("completion", prompt=[1, 2, 3, 4], truncate_prompt_tokens=2).prompts[
        0
    ].tolist() == [3, 4]


def test_bodies_that_are_no_objects():
    for raw in (b"[1]", b"3", b'"x"', b"\xff\xfe", b"{", b""):
        with pytest.raises(vllm.ApiError) as caught:
            vllm.load_body(raw)
        assert caught.value.status == 400
