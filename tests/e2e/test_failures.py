"""The failure table: each step of the main path fails once, and what the client sees of it.

The client gets the text that one engine alone would give, or an error of OpenAI's shape; never
another prompt's text, never a doubled or missing token. `strict` has short time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import (
    Gateway,
    Sims,
    chat,
    http,
    model,
    prompt,
    routed,
    sse,
    streamed_text,
    text_of,
    until,
)
from tests.fakes import (
    DONE,
    ERROR,
    ROLE,
    Answer,
    Received,
    ScriptedEngine,
    chunk,
    completion,
    events,
    forward,
    hang_up,
    in_turn,
    prefilled,
    silent,
    whole,
)

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ANSWER = whole(200, completion("fine"))
STREAM = events(ROLE, chunk({"content": "fi"}), chunk({"content": "ne"}, "stop"), DONE)


def ask(gateway: Gateway, body: dict[str, Any], **more: Any) -> tuple[httpx.Response, str]:
    """The reply and the text in it."""
    reply = gateway.post(body, **more)
    if reply.status_code != 200:
        return reply, ""
    text = streamed_text(reply.text) if body.get("stream") else text_of(reply.json())
    if body.get("stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
        assert reply.text.count("[DONE]") == 1
    return reply, text


def serves_right(gateway: Gateway, sims: Sims, name: str, calls: int = 4, **more: Any) -> None:
    """Calls with new prompts, one after the other, are all answered right, and end once each."""
    for number in range(calls):
        request_id = f"{name}-{number}"
        body = chat(prompt(request_id), **more)
        reply, text = ask(gateway, body, headers={"x-request-id": request_id})
        assert reply.status_code == 200, reply.text
        assert text == sims.text(body | {"model": "sim"})
        outcome = gateway.outcome(request_id)
        assert outcome["code"] == 200


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def _rests(engine: ScriptedEngine) -> bool:
    return engine.active == 0


def answer_for(stream: bool):
    return STREAM if stream else ANSWER


# -- prefill ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"error_5xx": 1.0}, "status_500"),
        ({"error_5xx": 1.0, "error_status": 503}, "status_503"),
        ({"stall": True}, "first_byte_timeout"),
    ],
    ids=["500", "503", "stall"],
)
def test_a_prefill_worker_that_fails_is_gone_around(strict, sims, fault, reason, stream):
    before = strict.retries(stage="prefill", reason=reason)
    sims["p0"].fault(**fault)
    calls = 2 if "stall" in fault else 4
    serves_right(strict, sims, f"prefill-{reason}-{stream}", calls, stream=stream)
    assert strict.retries(stage="prefill", reason=reason) > before


@both
def test_a_dead_prefill_worker_is_gone_around(strict, sims, stream):
    sims["p0"].fault(die=True)
    serves_right(strict, sims, f"prefill-dead-{stream}", stream=stream)
    until(lambda: not strict.up([sims["p0"]]), 3, "the router knows that p0 is down")
    serves_right(strict, sims, f"prefill-known-dead-{stream}", stream=stream)


@both
def test_a_prefill_worker_that_refuses_connections_is_gone_around(strict, sims, stream):
    sims["p0"].restart()  # closes the pooled connections
    sims["p0"].fault(refuse=True)
    serves_right(strict, sims, f"prefill-refuses-{stream}", stream=stream)


@both
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (hang_up, "disconnected"),
        (whole(200, b"not json"), "unreadable_reply"),
        (whole(200, b"[1]"), "unreadable_reply"),
        (whole(429, {"error": {"message": "later"}}), "status_429"),
        (events(b"data: {}\n\n"), "unreadable_reply"),
    ],
    ids=["hangs-up", "no-json", "a-list", "throttled", "a-stream"],
)
def test_a_prefill_answer_that_is_none_leads_to_decoding_alone(
    strict, scripted, behaviour, reason, stream
):
    scripted.prefill.behaviour = behaviour
    scripted.decode.behaviour = answer_for(stream)
    before = strict.retries(stage="prefill", reason=reason)
    reply, text = ask(strict, chat("hello", "scripted", stream=stream))
    assert (reply.status_code, text) == (200, "fine")
    assert reply.headers["x-pdrouter-prefill"] == ""
    assert strict.retries(stage="prefill", reason=reason) == before + 1
    (decode,) = scripted.decode.received
    assert "kv_transfer_params" not in decode.json


@both
@pytest.mark.parametrize("params", [None, {}], ids=["null", "empty"])
def test_missing_transfer_parameters_are_counted_and_decode_computes(
    strict, scripted, params, stream
):
    scripted.prefill.behaviour = whole(200, completion("x", kv_transfer_params=params))
    scripted.decode.behaviour = answer_for(stream)
    name = "pdrouter_missing_transfer_params_total"
    before = strict.page.total(name)
    _, text = ask(strict, chat("hello", "scripted", stream=stream))
    assert text == "fine"
    assert strict.page.total(name) == before + 1
    assert "kv_transfer_params" not in scripted.decode.received[0].json


@both
def test_both_prefill_workers_down_means_decoding_alone(strict, sims, stream):
    for name in ("p0", "p1"):
        sims[name].fault(die=True)
    serves_right(strict, sims, f"no-prefill-{stream}", stream=stream)
    reply, _ = ask(strict, chat(prompt(f"no-prefill-route-{stream}"), stream=stream))
    assert reply.headers["x-pdrouter-prefill"] == ""
    assert strict.page.total("pdrouter_requests_total", plan="decode", code="200") >= 5


# -- between the legs ------------------------------------------------------------------------------


@both
def test_a_prefill_worker_that_dies_after_its_answer_costs_one_retry(strict, sims, hooked, stream):
    """Both engines behind the stand-ins may be hit first; the first one hit dies."""
    died = threading.Event()

    def dying(name: str):
        async def die() -> None:
            if not died.is_set():
                died.set()
                await asyncio.to_thread(sims[name].fault, die=True)

        return die

    for engine, name in zip(hooked.prefill, ("p2", "p3"), strict=True):
        engine.behaviour = forward(sims[name].url, after_reply=dying(name))
        engine.received.clear()
    before = strict.retries()
    serves_right(strict, sims, f"dies-between-{stream}", 1, model="hooked", stream=stream)
    assert died.is_set()
    assert strict.retries() == before + 1
    legs = [received for engine in hooked.prefill for received in engine.received]
    assert len({leg.headers["x-request-id"] for leg in legs}) == len(legs) == 2


@both
def test_kv_that_cannot_be_transferred_never_shows(strict, sims, stream):
    for name in ("d0", "d1"):
        sims[name].fault(drop_transfer=True)
    serves_right(strict, sims, f"drop-decode-{stream}", 2, stream=stream)
    for name in ("d0", "d1"):
        sims[name].fault()
    sims["p0"].fault(drop_transfer=True)
    serves_right(strict, sims, f"drop-prefill-{stream}", stream=stream)


def test_a_decode_leg_that_would_start_after_the_lease_is_prefilled_again(loop_thread, folder):
    """The decode worker is slow to take the connection; by then the KV may be another prompt's."""
    numbers = iter(range(1, 100))

    async def number_it(request: Received, answer: Answer) -> None:
        answer.reply(200, json.dumps(prefilled(next(numbers))).encode())

    prefill = ScriptedEngine("m", number_it)
    decode = ScriptedEngine("m", ANSWER, backlog=0)
    for engine in (prefill, decode):
        loop_thread.run(engine.start())
    config = {
        "models": [model("m", [prefill.url], [decode.url])],
        "timeouts": {"connect_s": 5, "handoff_gap_s": 0.4},
        "monitor": {"interval_s": 600, "timeout_s": 5},
    }
    with contextlib.ExitStack() as held, routed(config, folder / "gap.log") as gateway:
        loop_thread.run(decode.pause())
        for _ in range(4):  # more than the backlog takes
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", int(decode.url.rpartition(":")[2])))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(ask, gateway, chat("hello", "m"))
            until(lambda: prefill.received, 5, "prefilled")
            opens_s = time.monotonic() + 0.5
            until(lambda: time.monotonic() > opens_s, 2, "longer than the gap")
            loop_thread.run(decode.accept())
            _, text = call.result(20)
        assert text == "fine"
        assert len(prefill.received) == 2
        used = decode.received[-1].json["kv_transfer_params"]["remote_request_id"]
        assert used == "chatcmpl-2"
        assert gateway.retries(stage="decode", reason="handoff_gap") == 1
    for engine in (prefill, decode):
        loop_thread.run(engine.stop())


# -- decode ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "fault",
    [{"error_5xx": 1.0}, {"stall": True}, {"die": True}, {"error_after_tokens": 0}],
    ids=["500", "stall", "dead", "error-before-content"],
)
def test_a_decode_worker_that_fails_before_content_is_gone_around(strict, sims, fault, stream):
    before = strict.retries()
    sims["d0"].fault(**fault)
    calls = 2 if "stall" in fault else 4
    serves_right(strict, sims, f"decode-{next(iter(fault))}-{stream}", calls, stream=stream)
    # A dead worker may be known as such before a call meets it.
    assert strict.retries() > before or "die" in fault


@pytest.mark.parametrize(
    "behaviour",
    [
        events(ROLE, ERROR, DONE),
        events(ERROR, DONE),
        events(ROLE, then="cut"),
        events(ROLE, then="close"),
        events(ROLE, then="silent"),
        events(then="end"),
        events(ROLE, then="end"),
        hang_up,
        whole(500, ERROR),
        whole(200, b""),
    ],
    ids=[
        "error-event", "error-first", "cut", "closed", "silent", "empty", "role-only",
        "hangs-up", "500", "no-stream",
    ],
)  # fmt: skip
def test_a_stream_that_fails_before_content_is_asked_for_again(strict, scripted, behaviour):
    scripted.decode.behaviour = in_turn(behaviour, STREAM)
    reply, text = ask(strict, chat("hello", "scripted", stream=True))
    assert (reply.status_code, text) == (200, "fine")
    assert reply.text.count('"role"') == 1
    first, second = scripted.decode.received
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize(
    "then", ["cut", "close", "silent", "end"], ids=["cut", "closed", "silent", "no-done"]
)
def test_a_stream_that_fails_after_content_ends_in_one_error_event(strict, scripted, then):
    scripted.decode.behaviour = events(ROLE, chunk({"content": "fi"}), then=then)
    started_s = time.monotonic()
    reply = strict.post(
        chat("hello", "scripted", stream=True), headers={"x-request-id": f"broken-{then}"}
    )
    assert time.monotonic() - started_s < 4
    assert reply.status_code == 200
    *content, last = sse(reply.text)
    assert [item["choices"][0]["delta"].get("content") for item in content] == ["", "fi"]
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in reply.text
    # What a client has seen is never sent again.
    assert len(scripted.decode.received) == 1
    outcome = strict.outcome(f"broken-{then}")
    assert outcome.get("retries") or outcome.get("error") or outcome.get("rejected")


@pytest.mark.parametrize(
    "pieces",
    [
        (ROLE, chunk({"content": "fi"}), ERROR, DONE),
        (ROLE, chunk({"content": "fi"}), ERROR + DONE),
        (ROLE, chunk({"content": "fi"}), ERROR[:20], ERROR[20:] + DONE),
        (ROLE, chunk({"content": "fi"}) + ERROR + DONE),
    ],
    ids=["apart", "with-done", "split", "with-first-content"],
)
def test_an_engines_error_event_after_content_ends_the_stream_without_done(
    strict, scripted, request, pieces
):
    case = request.node.callspec.id
    scripted.decode.behaviour = events(*pieces, apart_s=0.05)
    reply = strict.post(
        chat("hello", "scripted", stream=True), headers={"x-request-id": f"own-{case}"}
    )
    *content, last = sse(reply.text)
    assert [item["choices"][0]["delta"].get("content") for item in content] == ["", "fi"]
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in reply.text
    assert strict.outcome(f"own-{case}")["error"]


@pytest.mark.parametrize(
    ("fault", "then"),
    [({"cut_after_tokens": 6}, "cut"), ({"freeze_after_tokens": 6}, "freeze")],
    ids=["cut", "freeze"],
)
def test_a_decode_worker_that_breaks_mid_stream_gives_a_true_beginning_and_an_error(
    strict, sims, fault, then
):
    for name in ("d0", "d1"):
        sims[name].fault(**fault)
    body = chat(prompt(f"mid-{then}"), stream=True)
    reply = strict.post(body)
    assert reply.status_code == 200
    text = streamed_text(reply.text)
    assert text
    assert sims.text(body).startswith(text)
    assert sse(reply.text)[-1]["error"]["type"] == "server_error"


def test_a_decode_worker_killed_mid_stream_gives_a_true_beginning_and_an_error(strict, sims):
    body = chat(prompt("killed"), stream=True, max_tokens=1500)
    head = {"authorization": f"Bearer {strict.key}"}
    url = f"{strict.url}/v1/chat/completions"
    with (
        httpx.Client(trust_env=False, timeout=20) as client,
        client.stream("POST", url, json=body, headers=head) as reply,
    ):
        pieces = reply.iter_text()
        text = next(pieces)
        for sim in sims.group("d0", "d1"):
            if sim.state["running"]:
                sim.fault(die=True)
        text += "".join(pieces)
    assert sse(text)[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in text
    assert sims.text(body).startswith(streamed_text(text))


@both
def test_an_unfinished_whole_answer_is_asked_for_again(strict, scripted, stream):
    async def half(request: Received, answer: Answer) -> None:
        answer.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"
        )
        await asyncio.sleep(0.05)
        answer.cut()

    async def garbage(request: Received, answer: Answer) -> None:
        answer.raw(b"this is not HTTP\r\n\r\n")

    for behaviour in (half, garbage):
        scripted.decode.received.clear()
        scripted.decode.behaviour = in_turn(behaviour, answer_for(stream))
        _, text = ask(strict, chat("hello", "scripted", stream=stream))
        assert text == "fine"
        assert len(scripted.decode.received) == 2


@both
def test_all_decode_workers_down_is_503(strict, sims, stream):
    for name in ("d0", "d1"):
        sims[name].fault(die=True)
    body = chat(prompt(f"down-{stream}"), stream=stream)
    reply = strict.post(body)
    assert reply.status_code == 503
    until(
        lambda: strict.page.total("pdrouter_worker_up", model="sim", role="decode") == 0, 3, "down"
    )
    reply = strict.post(body, headers={"x-request-id": f"down-{stream}"})
    assert reply.status_code == 503
    assert error_of(reply)["type"] == "service_unavailable_error"
    outcome = strict.outcome(f"down-{stream}")
    assert (outcome["code"], outcome["rejected"]) == (503, "no_workers")
    ready = http("GET", f"{strict.url}/health/ready")
    assert ready.status_code == 503
    assert "sim" in ready.json()["missing"]
    for name in ("d0", "d1"):
        sims[name].fault()
    until(lambda: strict.up(sims.group("d0", "d1")), 5, "decode workers back")
    serves_right(strict, sims, f"back-{stream}", 2, stream=stream)


@both
def test_attempts_are_bounded_and_the_last_error_is_clean(strict, scripted, stream):
    scripted.decode.behaviour = whole(500, {"error": {"message": "secret prompt text"}})
    reply = strict.post(
        chat("hello", "scripted", stream=stream), headers={"x-request-id": f"thrice-{stream}"}
    )
    assert reply.status_code == 502
    assert "secret" not in error_of(reply)["message"]
    assert len(scripted.decode.received) == 3
    outcome = strict.outcome(f"thrice-{stream}")
    assert len(outcome["retries"]) == 2
    ids = [leg.headers["x-request-id"] for leg in scripted.decode.received]
    assert len(set(ids)) == 3


@both
def test_silent_engines_are_504(strict, scripted, stream):
    scripted.prefill.behaviour = silent
    scripted.decode.behaviour = silent
    reply = strict.post(chat("hello", "scripted", stream=stream))
    assert reply.status_code == 504
    error_of(reply)
    for engine in (scripted.prefill, scripted.decode):
        until(partial(_rests, engine), 1, "given up upstream")


# -- retries never mix handoffs --------------------------------------------------------------------


@both
def test_a_handoff_is_used_once(strict, scripted, stream):
    numbers = iter(range(1, 100))

    async def number_it(request: Received, answer: Answer) -> None:
        answer.reply(200, json.dumps(prefilled(next(numbers))).encode())

    scripted.prefill.behaviour = number_it
    scripted.decode.behaviour = in_turn(hang_up, hang_up, answer_for(stream))
    _, text = ask(strict, chat("hello", "scripted", stream=stream))
    assert text == "fine"
    used = [
        leg.json["kv_transfer_params"]["remote_request_id"]
        for leg in scripted.decode.received
        if "kv_transfer_params" in leg.json
    ]
    assert len(used) == len(set(used))


# -- restarts --------------------------------------------------------------------------------------


def test_a_restarted_worker_begins_without_credit(gateway, sims):
    body = chat(prompt("epoch", 600))
    for _ in range(2):
        reply = gateway.post(body)
    assert int(reply.headers["x-pdrouter-cached-tokens"]) > 600
    before = gateway.page
    for name in ("p0", "p1", "d0", "d1"):
        sims[name].restart()
    held = "pdrouter_cachemap_blocks"
    until(
        lambda: (
            not any(gateway.page.total(held, worker=sims[n].id) for n in ("p0", "p1", "d0", "d1"))
        ),
        5,
        "the map forgot the workers",
    )
    reply = gateway.post(body)
    assert reply.status_code == 200
    assert reply.headers["x-pdrouter-cached-tokens"] == "0"
    grown = gateway.page.since(before)
    kinds = grown.by("pdrouter_prefix_tokens_total", "kind")
    assert not any(kinds.values()), kinds
    assert text_of(reply.json()) == sims.text(body)


@both
def test_connections_that_a_restart_closed_cost_the_client_nothing(strict, sims, stream):
    """Every pooled connection is dead; none of the calls may notice, whatever their number."""
    with ThreadPoolExecutor(8) as pool:
        bodies = [chat(prompt(f"pooled-{stream}-{i}"), stream=stream) for i in range(8)]
        assert all(text for _, text in pool.map(lambda body: ask(strict, body), bodies))
    for name in ("p0", "p1", "d0", "d1"):
        sims[name].restart()
    serves_right(strict, sims, f"stale-{stream}", 4, stream=stream)


# -- all at once -----------------------------------------------------------------------------------


@pytest.fixture
def storm(sims) -> Iterator[None]:
    """Engines that fail in changing ways for as long as the test runs."""
    stop = threading.Event()
    faults: list[dict[str, Any]] = [
        {"error_5xx": 0.5},
        {"error_after_tokens": 3},
        {"drop_transfer": True},
        {"cut_after_tokens": 2},
        {"die": True, "for_s": 0.2},
        {},
    ]

    def blow() -> None:
        turn = 0
        while not stop.wait(0.15):
            sims[("p0", "d0", "p1", "d1")[turn % 4]].fault(**faults[turn % len(faults)])
            turn += 1

    thread = threading.Thread(target=blow)
    thread.start()
    yield
    stop.set()
    thread.join()
    for name in ("p0", "p1", "d0", "d1"):
        sims[name].fault()


def test_no_wrong_text_ever_under_a_storm_of_faults(gateway, sims, storm):
    """Each of 200 calls gets its own text whole, its own text's beginning and an error, or an
    error."""

    def one(number: int) -> str:
        body = chat(prompt(f"storm-{number}", 30), stream=number % 2 == 0, max_tokens=12)
        reply = gateway.post(body, headers={"x-request-id": f"storm-{number}"})
        expected = sims.text(body)
        if reply.status_code != 200:
            error_of(reply)
            return "refused"
        if not body["stream"]:
            assert text_of(reply.json()) == expected
            return "right"
        items = sse(reply.text)
        text = streamed_text(reply.text)
        if "error" in items[-1]:
            assert expected.startswith(text)
            return "broken"
        assert text == expected
        assert reply.text.endswith("[DONE]\n\n")
        return "right"

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(one, range(200)))
    assert ends.count("right") > 50
    for number in range(200):
        gateway.outcome(f"storm-{number}")
