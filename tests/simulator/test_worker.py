"""A worker over HTTP: clients that leave, faults, restarts."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest
import zmq
from msgspec import msgpack

from simulator.profile import load
from tests.simulator.calls import CHAT, PATH, content, eventually, leg1, raw_request
from tests.simulator.sse import events

# -- clients that leave -------------------------------------------------------------------------


def leave_closed(connection):
    connection.close()


def leave_half_closed(connection):
    connection.shutdown(socket.SHUT_WR)


def leave_reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


LEAVES = [leave_closed, leave_half_closed, leave_reset]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", LEAVES)
def test_leaving_during_decode_aborts(serve, leave, stream):
    served = serve("both", speed=1.0)
    connection = raw_request(served, CHAT | {"max_tokens": 2000, "stream": stream})
    eventually(lambda: served.state()["output_tokens_total"] > 2)
    leave(connection)
    assert eventually(lambda: served.state()["running"] == 0) < 0.5
    state = served.state()
    assert (state["aborted_total"], state["kv_used_tokens"]) == (1, 0)
    connection.close()


@pytest.mark.parametrize("leave", LEAVES)
def test_leaving_during_prefill_or_while_waiting_aborts(serve, leave):
    served = serve("both", speed=0.1, limits={"max_running": 1})
    long = CHAT | {"messages": [{"role": "user", "content": "long " * 20_000}]}
    connections = [raw_request(served, long), raw_request(served, CHAT)]
    eventually(lambda: served.state()["prefilling"] == 1 and served.state()["waiting"] == 1)
    for connection in reversed(connections):
        leave(connection)
    eventually(lambda: (served.state()["running"], served.state()["waiting"]) == (0, 0), 1)
    state = served.state()
    assert (state["aborted_total"], state["kv_used_tokens"]) == (2, 0)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("leave", LEAVES)
def test_leaving_during_the_transfer_frees_both_workers(serve, leave):
    served = serve("prefill", "decode", speed=1.0)
    params = leg1(served)
    served.faults(0, stall=True)
    connection = raw_request(served, CHAT | {"kv_transfer_params": params}, 1)
    eventually(lambda: served.state(1)["pulling"] == 1)
    served.faults(0)
    leave(connection)
    eventually(lambda: served.state(1)["pulling"] == 0, 1)
    eventually(lambda: served.state(0)["pinned_requests"] == 0, 1)
    assert served.state(0)["expired_total"] == 0
    assert served.state(1)["kv_used_tokens"] == 0
    connection.close()


# -- faults -------------------------------------------------------------------------------------


def test_slow_and_throttled_workers_take_longer(serve):
    served = serve("both", speed=20.0)
    body = CHAT | {"max_tokens": 200}

    def seconds():
        start = time.monotonic()
        content(served.post(PATH, body))
        return time.monotonic() - start

    normal = min(seconds() for _ in range(3))
    served.faults(slow=5)
    assert seconds() > 3 * normal
    served.faults(throttle=0.2)
    assert seconds() > 3 * normal
    served.faults()
    assert min(seconds() for _ in range(3)) < 3 * normal


def test_stall_accepts_and_never_answers(serve):
    served = serve("both")
    served.faults(stall=True)
    assert served.get("/health").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        served.post(PATH, CHAT, timeout=0.2)
    served.faults(stall="all")
    with pytest.raises(httpx.ReadTimeout):
        served.client.get(served.url() + "/health", timeout=0.2)
    served.faults()
    assert served.get("/health").status_code == 200


def test_dead_worker_refuses_and_comes_back_new(serve):
    served = serve("both", "both")
    before = served.state()
    connection = raw_request(served, CHAT | {"max_tokens": 20_000, "stream": True})
    eventually(lambda: served.state()["running"] == 1)
    reply = served.client.put(served.url() + "/sim/faults", json={"die": True})
    assert reply.json()["die"] is True
    while connection.recv(65536):
        pass
    connection.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url() + "/health")
    assert served.get("/health", 1).status_code == 200
    served.faults(0)
    after = served.state()
    assert after["engine_id"] != before["engine_id"]
    assert after["started_at_s"] > before["started_at_s"]
    assert (after["requests_total"], after["kv_used_tokens"]) == (0, 0)
    assert content(served.post(PATH, CHAT))


def test_a_fault_for_some_time(serve):
    served = serve("both")
    start = time.monotonic()
    served.faults(die=True, for_s=1.0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url() + "/health")

    def back():
        try:
            return httpx.get(served.url() + "/health").status_code == 200
        except httpx.ConnectError:
            return False

    eventually(back)
    assert time.monotonic() - start >= 1.0


def test_refuse_keeps_open_connections(serve):
    served = serve("both")
    assert served.get("/health").status_code == 200
    served.faults(refuse=True)
    assert served.get("/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url() + "/health")
    served.faults()
    assert httpx.get(served.url() + "/health").status_code == 200


def test_dropped_transfers_fail_the_second_leg(serve):
    served = serve("prefill", "decode")
    for at in (0, 1):
        served.faults(at, drop_transfer=True)
        params = leg1(served)
        assert served.post(PATH, CHAT | {"kv_transfer_params": params}, 1).status_code == 500
        served.faults(at)
    assert served.state(1)["transfer_failures_total"] == 2


def test_a_wrong_lease_is_a_wrong_text(serve):
    served = serve("prefill", "decode")
    served.faults(0, wrong_lease=True)
    wrong = content(served.post(PATH, CHAT | {"kv_transfer_params": leg1(served)}, 1))
    served.faults(0)
    assert wrong != content(served.post(PATH, CHAT, 0))


def test_transfers_fail_beyond_a_number_at_once(serve):
    fitted = load("h200-llama8b")
    slow_link = replace(fitted, transfer=replace(fitted.transfer, latency_s=0.3, handshake_s=0))
    served = serve("prefill", "decode", speed=1.0, profile=slow_link)
    served.faults(1, transfer_limit=2)
    bodies = [{"model": "tiny", "prompt": [i + 1] * 50, "max_tokens": 1} for i in range(6)]
    claims = []
    for body in bodies:
        leg = body | {"kv_transfer_params": {"do_remote_decode": True}}
        claims.append(served.post("/v1/completions", leg).json()["kv_transfer_params"])
    codes = []

    def send(body, params):
        body = body | {"kv_transfer_params": params}
        codes.append(httpx.post(served.url(1) + "/v1/completions", json=body).status_code)

    threads = [
        threading.Thread(target=send, args=pair) for pair in zip(bodies, claims, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 200, 500, 500, 500, 500]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_can_fail_on_its_way(serve, stream):
    served = serve("both")
    served.faults(error_after_tokens=5)
    reply = served.post(PATH, CHAT | {"stream": stream})
    if stream:
        found = events(reply.text)
        assert len(found) == 1 + 5 + 2
        assert found[-2]["error"]["code"] == 500
    else:
        assert reply.status_code == 500
    eventually(lambda: served.state()["running"] == 0)


def test_an_answer_can_be_cut_or_go_silent(serve):
    served = serve("both")
    served.faults(cut_after_tokens=5)
    with pytest.raises(httpx.RemoteProtocolError):
        served.post(PATH, CHAT | {"stream": True})
    served.faults(freeze_after_tokens=5)
    got = []
    with (
        pytest.raises(httpx.ReadTimeout),
        served.client.stream(
            "POST", served.url() + PATH, json=CHAT | {"stream": True}, timeout=0.3
        ) as reply,
    ):
        got.extend(reply.iter_text())
    assert len(events("".join(got))) == 1 + 5


# -- the rest -----------------------------------------------------------------------------------


def test_a_slow_reader_gets_everything_and_holds_up_nobody(serve):
    served = serve("both", speed=1000.0)
    body = CHAT | {"max_tokens": 30_000, "stream": True}
    connection = raw_request(served, body)
    eventually(lambda: served.state()["output_tokens_total"] >= 30_000, 20)
    assert content(served.post(PATH, CHAT))
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += connection.recv(1 << 20)
    connection.close()
    assert data.count(b'"content":"') == 30_001


def test_cache_events_are_published_where_the_worker_says(serve):
    silent = serve("prefill")
    assert silent.get("/kv_event_sources").json() == {}
    served = serve("prefill", kv_events=True)
    source = served.get("/kv_event_sources").json()["0"]
    assert source["topic"] == "kv@p0@tiny"
    subscriber: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.subscribe("kv@p0@tiny")
        subscriber.connect(source["endpoint"])
        prompts = (f"{i} " * 40 for i in range(500))
        while not subscriber.poll(5):
            served.post("/v1/completions", {"model": "tiny", "prompt": next(prompts)})
        topic, number, payload = subscriber.recv_multipart()
    assert (topic, len(number)) == (b"kv@p0@tiny", 8)
    assert msgpack.decode(payload)[1][0]["type"] == "BlockStored"


def test_time_on_the_wire_is_the_profiles(serve):
    profile = load("b300-tp4")
    served = serve("both", profile=profile, speed=2.0)
    body = {"model": "tiny", "prompt": [7] * 4000, "max_tokens": 21}
    start = time.monotonic()
    assert served.post("/v1/completions", body).status_code == 200
    took_s = time.monotonic() - start
    expected_s = profile.prefill.seconds(4000, 0) + 20 * profile.decode.seconds(1, 4010)
    assert expected_s / 2 <= took_s < expected_s / 2 + 0.25


def test_a_port_that_is_taken_meanwhile_is_waited_for(serve):
    served = serve("both")
    served.faults(die=True)
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((served.workers[0].config.host, served.workers[0].port))
        squatter.listen()
        healing = threading.Thread(target=served.faults)
        healing.start()
        healing.join(0.2)
        assert healing.is_alive()
    healing.join(5)
    assert served.get("/health").status_code == 200
