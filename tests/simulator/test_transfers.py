"""KV between workers over HTTP: both legs of a call, leases, claims on what is not there."""

from __future__ import annotations

import threading

import httpx
import pytest

from tests.simulator.calls import CHAT, PATH, content, eventually, leg1, raw_request
from tests.simulator.sse import events

# -- handoff ------------------------------------------------------------------------------------


def test_two_legs_say_what_one_worker_says_and_pass_on_its_hits(serve):
    served = serve("prefill", "decode", "both")
    plain = content(served.post(PATH, CHAT, 2))
    for turn in range(2):
        params = leg1(served)
        assert served.state(0)["pinned_requests"] == 1
        reply = served.post(PATH, CHAT | {"kv_transfer_params": params}, 1)
        assert content(reply) == plain
        usage = reply.json()["usage"]["prompt_tokens_details"]
        assert usage["cached_tokens"] == params["remote_prefill_cached_tokens"]
        assert (usage["cached_tokens"] > 0) == (turn > 0)
        eventually(lambda: served.state(0)["pinned_requests"] == 0)
    assert served.state(1)["computed_tokens_total"] == 2
    assert "vllm:external_prefix_cache_hits_total" in served.get("/metrics", 1).text


def test_a_stream_over_two_legs(serve):
    served = serve("prefill", "decode")
    plain = content(served.post(PATH, CHAT))
    body = CHAT | {"stream": True, "kv_transfer_params": leg1(served)}
    found = events(served.post(PATH, body, 1).text)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1]) == plain
    assert all("kv_transfer_params" not in e for e in found[:-1])


def test_a_streamed_first_leg_carries_the_parameters_at_its_end(serve):
    served = serve("prefill")
    body = CHAT | {
        "max_tokens": 1,
        "stream": True,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    found = events(served.post(PATH, body).text)
    assert found[-2]["kv_transfer_params"]["do_remote_prefill"] is True


def test_a_lease_runs_out_in_the_workers_own_time(serve):
    served = serve("prefill", speed=100.0, lease_s=30.0)
    leg1(served)
    took = eventually(lambda: served.state()["pinned_requests"] == 0)
    assert 0.2 < took < 2
    assert served.state()["expired_total"] == 1
    assert "vllm:nixl_num_kv_expired_reqs_total" in served.get("/metrics").text


def test_an_expired_claim_on_reused_blocks_is_a_wrong_text_with_status_200(serve):
    limits = {"capacity_tokens": 1024, "max_model_len": 1024}
    served = serve("prefill", "decode", lease_s=1.0, limits=limits)
    params = leg1(served)
    eventually(lambda: served.state()["pinned_requests"] == 0)
    for kind in range(3):
        other = {"model": "tiny", "prompt": [kind + 1] * 900, "max_tokens": 1}
        assert served.post("/v1/completions", other).status_code == 200
    wrong = content(served.post(PATH, CHAT | {"kv_transfer_params": params}, 1))
    assert wrong != content(served.post(PATH, CHAT, 0))


def test_params_of_another_prompt_are_a_wrong_text(serve):
    served = serve("prefill", "decode")
    other = CHAT | {"messages": [{"role": "user", "content": "What? " * 80}]}
    reply = served.post(PATH, CHAT | {"kv_transfer_params": leg1(served, other)}, 1)
    assert content(reply) != content(served.post(PATH, CHAT, 0))


def test_a_restarted_prefill_worker_is_unknown(serve):
    served = serve("prefill", "decode")
    params = leg1(served)
    assert served.client.post(served.url() + "/sim/restart").status_code == 200
    eventually(lambda: served.state()["engine_id"] != params["remote_engine_id"])
    reply = served.post(PATH, CHAT | {"kv_transfer_params": params}, 1)
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "InternalServerError")
    assert content(served.post(PATH, CHAT | {"kv_transfer_params": leg1(served)}, 1))


def test_recompute_policy_answers_all_the_same(serve):
    served = serve("prefill", "decode", recompute_failed_loads=True)
    plain = content(served.post(PATH, CHAT))
    params = leg1(served)
    served.faults(0, die=True)
    assert content(served.post(PATH, CHAT | {"kv_transfer_params": params}, 1)) == plain


def test_a_refused_decode_leg_frees_the_prefill_worker(serve):
    served = serve("prefill", "decode", speed=1.0)
    params = leg1(served)
    body = CHAT | {"max_tokens": 0, "kv_transfer_params": params}
    assert served.post(PATH, body, 1).status_code == 400
    eventually(lambda: served.state(0)["pinned_requests"] == 0, 2)
    assert served.state(0)["expired_total"] == 0


def test_a_claim_of_the_clients_own_making_hangs_and_kills_the_engine(serve):
    served = serve("decode")
    body = CHAT | {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}}
    connection = raw_request(served, body)
    eventually(lambda: served.state()["pulling"] == 1)
    connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.close()
    eventually(lambda: served.get("/health").status_code == 503)
    assert served.post(PATH, CHAT).status_code == 500
    served.client.post(served.url() + "/sim/restart")
    eventually(lambda: served.get("/health").status_code == 200)


# -- handoff by push ----------------------------------------------------------------------------


def push_leg2(served):
    """What a caller that knows the prefill worker can say before that has answered."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": served.workers[0].engine.engine_id,
        "remote_host": served.fleet.peers.host,
        "remote_port": served.fleet.peers.port,
        "tp_size": 1,
    }


def push_legs(served, ids, order):
    """Send both legs at once, each under its own id, in an order; their texts."""
    bodies = [
        CHAT | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
        CHAT | {"kv_transfer_params": push_leg2(served)},
    ]
    replies: dict[int, httpx.Response] = {}

    def send(at):
        url = served.url(at) + PATH
        headers = {"x-request-id": ids[at]}
        replies[at] = httpx.post(url, json=bodies[at], headers=headers, timeout=10)

    threads = [threading.Thread(target=send, args=(at,)) for at in order]
    for thread, at in zip(threads, order, strict=True):
        thread.start()
        eventually(lambda at=at: served.state(at)["requests_total"] == 1)
    for thread in threads:
        thread.join()
    return replies


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pushed_kv_gives_the_text_of_one_worker(serve, order):
    served = serve("prefill", "decode", "both", kv_push=True)
    replies = push_legs(served, ("same", "same"), order)
    assert replies[0].json()["kv_transfer_params"]["transfer_mode"] == "push"
    assert content(replies[1]) == content(served.post(PATH, CHAT, 2))
    eventually(lambda: served.state(0)["pinned_requests"] == 0)
    assert served.state(0)["transfers_total"] == 1
    assert served.state(1)["transfers_total"] == 0
    assert served.state(1)["computed_tokens_total"] == 1


def test_pushed_kv_needs_the_same_request_id_on_both_legs(serve):
    served = serve("prefill", "decode", kv_push=True, speed=1.0)
    body = CHAT | {"kv_transfer_params": push_leg2(served)}
    leg1(served)
    connection = raw_request(served, body, 1)
    eventually(lambda: served.state(1)["pulling"] == 1)
    connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.close()
    eventually(lambda: served.state(1)["pulling"] == 0)
    assert served.get("/health", 1).status_code == 200
    eventually(lambda: not served.workers[0].transfers.expected)
