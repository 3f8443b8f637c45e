"""The bodies that vLLM's pull connector is sent, to the byte."""

from __future__ import annotations

import json

from router.handoff.vllm_nixl import VllmNixl

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "東京?"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 16,
    "min_tokens": 16,
    "stop": "x",
    "top_p": 0.5,
}
REMOTE = (
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


def test_prefill_of_a_chat():
    assert (
        VllmNixl().prefill(BODY, chat=True)
        == (
            '{"model":"m","messages":[{"role":"user","content":"東京?"}],"stream":false,'
            '"max_tokens":1,"top_p":0.5,"max_completion_tokens":1,"ignore_eos":true,'
        ).encode()
        + REMOTE
        + b"}"
    )


def test_prefill_of_a_completion():
    assert VllmNixl().prefill({"model": "m", "prompt": [1, 2]}, chat=False) == (
        b'{"model":"m","prompt":[1,2],"stream":false,"max_tokens":1,"ignore_eos":true,'
        + REMOTE
        + b"}"
    )


def test_decode_takes_the_params_verbatim():
    raw = b'{"model":"m","max_tokens":16}'
    reply = {"kv_transfer_params": {"remote_request_id": "r", "remote_block_ids": [[3], [4]]}}
    params = VllmNixl().transfer_params(reply)
    assert params is not None
    assert VllmNixl().decode(raw, params) == (
        b'{"model":"m","max_tokens":16,'
        b'"kv_transfer_params":{"remote_request_id":"r","remote_block_ids":[[3],[4]]}}'
    )


def test_a_release_is_a_decode_leg_of_one_token():
    leg = json.loads(VllmNixl().release(BODY, True, b'{"remote_request_id":"r"}'))
    assert leg["kv_transfer_params"] == {"remote_request_id": "r"}
    assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)
    assert "do_remote_decode" not in leg["kv_transfer_params"]
