"""The dialect: replies have the shape of recorded replies of a real engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.simulator.sse import events

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


@pytest.fixture
def recordings(shared):
    return shared("fixtures/vllm/http")


def test_every_recording_is_compared(recordings):
    assert {path.stem for path in recordings.glob("*.json")} == {*NAMES, *OTHER_PROTOCOL}


@pytest.mark.parametrize("name", NAMES)
def test_reply_has_the_shape_of_the_recorded_one(recordings, pair, name):
    recorded = orjson.loads((recordings / f"{name}.json").read_bytes())
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
        ours, theirs = events(reply.text), events(recorded["body"])
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


def test_metrics_have_recorded_names_and_labels(recordings, pair):
    recorded = (recordings / "metrics_decode.txt").read_text()

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
