"""What engines receive: the client's own bytes on the decode leg, a one-token call on prefill's."""

from __future__ import annotations

import json

import pytest

from tests.e2e.cluster import chat, prompt, text_of, until
from tests.fakes import DONE, ROLE, chunk, completion, events, hang_up, in_turn, whole

SPLICED = b',"kv_transfer_params":'
# Order, spacing, number spelling, escapes, unknown members, repeated whitespace: all of it stays.
ODD = (
    '{ "zeta":1.50, "model" : "scripted",\n\t"temperature":0.70000000000000001e0,'
    '"seed":12345678901234567890123,"big":1E400,'
    '"messages":[{"content":"h\\u00e9llo \\ud83d\\ude00 é 漢",'
    '"role":"user","x_unknown":{"b":[1.0,-0.0,1e2],"a":null}}],"max_tokens":20,'
    '"unknown_future":{"nested":{"y":2,"x":1}},"min_tokens":16,"user":"caf\\u00e9" } '
).encode()


@pytest.fixture
def legs(gateway, scripted):
    """Sends bytes, and returns what the prefill and the decode engine got."""

    def send(raw: bytes, path: str = "/v1/chat/completions", **more):
        stream = b'"stream":true' in raw
        scripted.decode.behaviour = (
            events(ROLE, chunk({"content": "hi"}, "stop"), DONE)
            if stream
            else whole(200, completion("hi"))
        )
        for engine in (scripted.prefill, scripted.decode):
            engine.received.clear()
        reply = gateway.post(raw, path, **more)
        assert reply.status_code == 200, reply.text
        prefill, decode = scripted.prefill.received, scripted.decode.received
        assert (len(prefill), len(decode)) == (1, 1)
        return prefill[0], decode[0]

    return send


@pytest.mark.parametrize(
    "raw",
    [
        ODD,
        ODD.replace(b'{ "zeta"', b'{"stream":true,"zeta"'),
        b'{"model":"scripted","messages":[{"role":"user","content":"}{\\"}"}]}\r\n\r\n',
        b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800 alone"}]}',
        b'{"model":"scripted","messages":[],"a":1,"a":2}',
    ],
    ids=["odd", "odd-stream", "braces", "lone-surrogate", "twice"],
)
def test_decode_gets_the_clients_bytes_and_the_handoff(legs, raw):
    _, decode = legs(raw)
    before, mark, after = decode.body.partition(SPLICED)
    assert mark
    assert before == raw[: raw.rindex(b"}")]
    params = json.loads(after[: after.rindex(b"}")])
    assert params["remote_request_id"] == "chatcmpl-1"
    assert int(decode.headers["content-length"]) == len(decode.body)


def test_completions_too(legs):
    raw = b'{"prompt" :"x y" , "model":"scripted","max_tokens":3.0}'
    prefill, decode = legs(raw, "/v1/completions")
    assert decode.body.startswith(raw[:-1] + SPLICED)
    assert (prefill.path, decode.path) == ("/v1/completions", "/v1/completions")
    assert prefill.json["max_tokens"] == 1
    assert "max_completion_tokens" not in prefill.json


def test_prefill_makes_one_token_in_one_piece_whatever_the_client_wants(legs):
    wants = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 500,
        "max_completion_tokens": 400,
        "min_tokens": 16,
        "stop": ["."],
        "stop_token_ids": [2],
        "logprobs": True,
        "top_logprobs": 3,
        "n": 1,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "cache_salt": "pepper",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body = chat("hello", "scripted") | wants
    raw = json.dumps(body, separators=(",", ":")).encode()
    prefill, decode = legs(raw)
    leg = prefill.json
    assert (leg["stream"], leg["max_tokens"], leg["max_completion_tokens"]) == (False, 1, 1)
    for member in ("stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs"):
        assert member not in leg
    assert leg.get("n", 1) == 1
    # What the prompt's tokens and their identity depend on stays.
    for member in ("messages", "tools", "cache_salt", "chat_template_kwargs", "model"):
        assert leg[member] == body[member]
    assert leg["kv_transfer_params"]["do_remote_decode"] is True
    assert leg["kv_transfer_params"]["do_remote_prefill"] is False
    assert decode.body.startswith(raw[:-1] + SPLICED)


@pytest.mark.parametrize(
    "member",
    [
        "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "disaggregated_params", "data_parallel_rank", "ec_transfer_params",
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["plain", "escaped", "twice"])
def test_no_client_can_name_kv_of_its_own(legs, member, spelling):
    evil = '{"do_remote_prefill":true,"remote_host":"10.9.9.9","remote_block_ids":[[1]]}'
    name = "".join(f"\\u{ord(c):04x}" for c in member) if spelling == "escaped" else member
    times = 2 if spelling == "twice" else 1
    raw = (
        '{"model":"scripted",' + f'"{name}":{evil},' * times + '"x_kept":7,'
        '"messages":[{"role":"user","content":"hello"}]}'
    ).encode()
    for leg in legs(raw):
        assert b"10.9.9.9" not in leg.body
        assert leg.json["x_kept"] == 7
        assert member == "kv_transfer_params" or member not in leg.json


@pytest.mark.parametrize(
    "name", ["x-data-parallel-rank", "x-session-id", "x-vllm-priority", "cookie", "x-anything"]
)
def test_headers_of_the_client_stay_outside(legs, name):
    for leg in legs(ODD, headers={name: "3", "traceparent": "00-aa-bb-01"}):
        assert name not in leg.headers
        assert leg.headers["traceparent"] == "00-aa-bb-01"


def test_both_legs_have_one_request_id(legs):
    prefill, decode = legs(ODD, headers={"x-request-id": "mine"})
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]


def test_every_call_and_attempt_has_a_request_id_of_its_own(gateway, scripted):
    scripted.decode.behaviour = in_turn(
        hang_up, whole(200, completion("hi")), whole(200, completion("hi"))
    )
    replies = [
        gateway.post(ODD, headers={"x-request-id": "same"}),
        gateway.post(ODD, headers={"x-request-id": "same"}),
    ]
    assert [reply.headers["x-request-id"] for reply in replies] == ["same", "same"]
    ids = [leg.headers["x-request-id"] for leg in scripted.decode.received]
    assert len(ids) == 3
    # Two attempts of one call differ; two calls that a client names alike are its own affair.
    assert ids[0] != ids[1]


@pytest.mark.parametrize("given", ["bad id", "x" * 200, "a\tb", ""])
def test_an_unusable_request_id_is_replaced(legs, gateway, given):
    prefill, decode = legs(ODD, headers={"x-request-id": given})
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] != given


def test_simulated_engines_receive_it_too(gateway, sims):
    for name in ("p0", "p1", "d0", "d1"):
        sims[name].record(5)
    raw = json.dumps(chat(prompt("recorded"), temperature=0.25), indent=1).encode()
    reply = gateway.post(raw, headers={"x-request-id": "recorded"})
    assert reply.status_code == 200
    seen = {
        name: [r for r in sims[name].state["received"] if r["path"].startswith("/v1/chat")]
        for name in ("p0", "p1", "d0", "d1")
    }
    for name in seen:
        sims[name].record(0)
    (prefill,) = seen["p0"] + seen["p1"]
    (decode,) = seen["d0"] + seen["d1"]
    assert decode["body"].encode().startswith(raw[: raw.rindex(b"}")] + SPLICED)
    assert prefill["headers"]["x-request-id"] == decode["headers"]["x-request-id"] == "recorded"


def test_an_alias_changes_the_model_and_nothing_else(gateway, sims):
    for name in ("d0", "d1"):
        sims[name].record(5)
    raw = b'{"model":"sim-alias", "max_tokens" :4,"messages":[{"role":"user","content":"al"}]}'
    reply = gateway.post(raw)
    seen = sims["d0"].state["received"] + sims["d1"].state["received"]
    for name in ("d0", "d1"):
        sims[name].record(0)
    (decode,) = [r for r in seen if r["path"].startswith("/v1/chat")]
    assert decode["body"].encode().startswith(raw[:-1].replace(b"sim-alias", b"sim"))
    assert text_of(reply.json())


def test_no_prompt_text_in_any_log(gateway, strict, scripted):
    secret = "zebra-umbrella-quartz"
    bodies = [
        chat(secret, "scripted"),
        chat(secret, "scripted", stream=True),
        chat(secret, "scripted", n=2),
        chat(secret, "no-such-model"),
        chat(secret, "scripted") | {"messages": secret},
        chat(secret, "scripted") | {"kv_transfer_params": {"a": secret}},
    ]
    for failing in (whole(200, completion(secret)), whole(500, completion(secret)), hang_up):
        scripted.decode.behaviour = failing
        for body in bodies:
            gateway.post(body)
            strict.post(body)
    gateway.post(f'{{"model":"scripted","messages":[{secret}'.encode())
    gateway.post(chat(secret, "scripted"), headers={"x-request-id": "the-last"})
    until(lambda: gateway.outcomes("the-last"), 5, "logs are written")
    for router in (gateway, strict):
        text = router.log.read_text()
        assert "request_id" in text
        assert secret not in text
        assert secret not in router.page.samples.__repr__()
