"""A call's way over scripted engines: what each of them gets, and what the client hears."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from router import dispatch
from router.dispatch import COMPLETIONS, Dispatcher
from router.errors import (
    ConnectFailed,
    Disconnected,
    StaleConnection,
    TimedOut,
    WorkerFailure,
)
from router.fleet import Fleet
from router.outcome import Outcome
from router.upstream import Receiver
from tests.fakes import (
    DONE,
    ERROR,
    ROLE,
    Behaviour,
    chunk,
    completion,
    events,
    handoff_params,
    hang_up,
    in_turn,
    prefilled,
    silent,
    whole,
)
from tests.router.clusters import (
    CALL,
    STREAM,
    UP,
    Cluster,
    cluster,
    decodes,
    fleet_of,
    model_config,
    prefills,
)
from tests.router.wire import Edge, listening, read_chunk, read_head, read_response, request, until

JSON = dict[str, Any]
STREAMED: JSON = CALL | {"stream": True}


def played(play: Callable[[Cluster], Any], **more: Any) -> None:
    """Let a test play on a cluster; it must be at rest afterwards."""

    async def scenario() -> None:
        async with cluster(**more) as made:
            await play(made)

    uvloop.run(scenario())


# A call that goes well


def test_a_stream_over_two_workers():
    async def play(made: Cluster) -> None:
        response = await made.ask(STREAMED)
        assert (response.status, response.body) == (200, b"".join(STREAM))
        outcome = await made.outcome()
        assert response.headers["x-pdrouter-prefill"] == outcome.prefill_worker != ""
        assert response.headers["x-pdrouter-decode"] == outcome.decode_worker != ""
        assert response.headers["x-pdrouter-cached-tokens"] == "0"
        assert response.headers["x-request-id"] == outcome.request_id
        assert (outcome.plan, outcome.code, outcome.stream) == ("pd", 200, True)
        assert abs(outcome.ended_at - time.time()) < 60
        assert (outcome.prompt_tokens, outcome.output_tokens) == (20, 2)
        assert (outcome.retries, outcome.rejected, outcome.disconnect_phase) == ([], "", "")
        times = (outcome.prefill_s, outcome.handoff_gap_s, outcome.ttft_s, outcome.tpot_s)
        assert all(each is not None and 0 <= each < outcome.e2e_s for each in times)

    played(play)


def test_a_whole_answer_over_two_workers():
    async def play(made: Cluster) -> None:
        response = await made.ask(CALL)
        assert (response.status, json.loads(response.body)) == (200, completion())
        assert response.headers["content-type"] == "application/json"
        outcome = await made.outcome()
        assert (outcome.plan, outcome.code, outcome.output_tokens) == ("pd", 200, 1)

    played(play)


def test_what_each_leg_carries():
    async def play(made: Cluster) -> None:
        raw = b'{ "model" : "full-name" , "messages":[{"role":"user",'
        raw += b' "content":"\\u0041 \xe6\x9d\xb1"}],\n'
        raw += b' "stream":true, "min_tokens":16, "max_tokens":20, "x": 1.0e2 }\n'
        await made.ask(raw)
        (prefill,), (decode,) = made.bodies("p"), made.bodies("d")
        assert (prefill["stream"], prefill["max_tokens"]) == (False, 1)
        assert "min_tokens" not in prefill
        params = (
            b'"kv_transfer_params":' + json.dumps(handoff_params(), separators=(",", ":")).encode()
        )
        (leg,) = [each.body for name in ("d0", "d1") for each in made.received(name)]
        assert leg == raw[: raw.rindex(b"}")] + b"," + params + b"}"
        assert decode["kv_transfer_params"] == handoff_params()

    played(play)


def test_a_completion_goes_the_same_way():
    async def play(made: Cluster) -> None:
        body = {"model": "short", "prompt": "Once upon a time " * 20, "max_tokens": 5}
        response = await made.ask(body, path=COMPLETIONS)
        assert response.status == 200
        (prefill,) = made.bodies("p")
        assert "max_completion_tokens" not in prefill
        assert {each.path for name in made.engines for each in made.received(name)} == {
            "/v1/completions"
        }
        assert (await made.outcome()).endpoint == "/v1/completions"

    played(play)


def test_engines_hear_the_full_name_of_a_model():
    async def play(made: Cluster) -> None:
        await made.ask(CALL)
        assert [body["model"] for body in made.bodies("p") + made.bodies("d")] == ["full-name"] * 2
        assert (await made.outcome()).model == "full-name"

    played(play)


def test_forbidden_members_reach_no_engine():
    async def play(made: Cluster) -> None:
        evil = {"kv_transfer_params": {"remote_host": "evil"}, "bootstrap_room": 1}
        await made.ask(CALL | evil)
        for body in made.bodies("p") + made.bodies("d"):
            assert "evil" not in json.dumps(body)
            assert "bootstrap_room" not in body

    played(play)


def test_what_must_not_be_split_goes_to_one_worker():
    async def play(made: Cluster) -> None:
        for more in ({"n": 2}, {"prompt_logprobs": 1}, {"use_beam_search": True}):
            assert (await made.ask(CALL | more)).status == 200
        assert made.bodies("p") == []
        assert len(made.bodies("d")) == 3
        outcome = await made.outcome(3)
        assert (outcome.plan, outcome.prefill_worker) == ("decode", "")

    played(play)


def test_a_prompt_is_known_where_it_went():
    long = {"model": "short", "messages": [{"role": "user", "content": "word " * 4000}]}

    async def play(made: Cluster) -> None:
        for _ in range(3):
            assert (await made.ask(long)).status == 200
        first, *later = made.outcomes
        assert first.available_tokens == 0
        for outcome in later:
            warm = {first.prefill_worker, first.decode_worker}
            assert {outcome.prefill_worker, outcome.decode_worker} & warm
            assert outcome.available_tokens >= outcome.captured_tokens >= outcome.predicted_tokens

    played(play)


def test_delivered_tokens_are_what_the_engine_says():
    reply = prefilled()
    reply["usage"]["prompt_tokens_details"] = {"cached_tokens": 16}

    async def play(made: Cluster) -> None:
        response = await made.ask(CALL)
        assert response.headers["x-pdrouter-cached-tokens"] == "16"
        assert (await made.outcome()).delivered_tokens == 16

    played(play, prefill=[whole(200, reply)])


def test_missing_transfer_params_are_counted_and_decode_computes():
    async def play(made: Cluster) -> None:
        assert (await made.ask(CALL)).status == 200
        (leg,) = made.bodies("d")
        assert "kv_transfer_params" not in leg
        outcome = await made.outcome()
        assert outcome.missing_transfer_params
        assert outcome.retries == []

    played(play, prefill=[whole(200, completion("x"))])


@pytest.mark.parametrize("body", [CALL, STREAMED], ids=["whole", "stream"])
def test_the_header_tells_what_a_decode_worker_alone_is_expected_to_reuse(body):
    long = body | {"messages": [{"role": "user", "content": "word " * 4000}]}

    async def play(made: Cluster) -> None:
        responses = [await made.ask(long) for _ in range(2)]
        cached = [int(each.headers["x-pdrouter-cached-tokens"]) for each in responses]
        assert cached[0] == 0
        assert cached[1] >= 4900
        assert [outcome.plan for outcome in made.outcomes] == ["decode"] * 2

    played(play, prefill=[], decode=[decodes])


def test_a_prefill_worker_is_not_running_what_only_decodes():
    async def play(made: Cluster) -> None:
        async with made.edge.client() as (reader, writer):
            writer.write(request(json.dumps(STREAMED).encode()))
            await read_head(reader)
            assert await read_chunk(reader)
            assert (made.worker("p0").running, made.worker("d0").running) == (0, 1)

    behaviour = events(ROLE, chunk({"content": "x"}), then="silent")
    played(play, prefill=[prefills], decode=[behaviour])


# Names and headers


def test_the_clients_request_id_is_everybodys():
    async def play(made: Cluster) -> None:
        response = await made.ask(CALL, b"x-request-id: my.call-1_a\r\n")
        assert response.headers["x-request-id"] == "my.call-1_a"
        ids = {each.headers["x-request-id"] for n in made.engines for each in made.received(n)}
        assert ids == {"my.call-1_a"}
        assert (await made.outcome()).request_id == "my.call-1_a"

    played(play)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"x-request-id: \r\n",
        b"x-request-id: a b\r\n",
        b"x-request-id: " + b"x" * 129 + b"\r\n",
        b'x-request-id: "x"\r\n',
    ],
)
def test_other_ids_are_made_anew(given):
    async def play(made: Cluster) -> None:
        ids = [(await made.ask(CALL, given)).headers["x-request-id"] for _ in range(2)]
        assert ids[0] != ids[1]
        assert all(len(each) >= 16 and each.isalnum() for each in ids)

    played(play)


def test_attempts_have_ids_of_their_own_equal_on_both_legs():
    async def play(made: Cluster) -> None:
        await made.ask(CALL, b"x-request-id: call\r\n")
        prefills_seen = [e.headers["x-request-id"] for n in ("p0", "p1") for e in made.received(n)]
        decodes_seen = [e.headers["x-request-id"] for n in ("d0", "d1") for e in made.received(n)]
        assert len(set(prefills_seen)) == 2
        assert sorted(prefills_seen) == sorted(decodes_seen)

    first = in_turn(whole(500, {}), decodes)
    played(play, decode=[first, first])


def test_errors_carry_the_request_id_too():
    async def play(made: Cluster) -> None:
        response = await made.ask(b"{", b"x-request-id: call\r\n")
        assert (response.status, response.headers["x-request-id"]) == (400, "call")

    played(play)


def test_without_keys_everybody_is_served_and_engines_see_who_asks():
    async def play(made: Cluster) -> None:
        headers = b"authorization: Bearer theirs\r\ntraceparent: 00-1\r\ncookie: x\r\n"
        assert (await made.ask(CALL, headers)).status == 200
        for name in made.engines:
            for each in made.received(name):
                assert each.headers["authorization"] == "Bearer theirs"
                assert each.headers["traceparent"] == "00-1"
                assert "cookie" not in each.headers

    played(play)


@pytest.mark.parametrize("given", [b"", b"authorization: Bearer c\r\n", b"authorization: a\r\n"])
def test_with_keys_others_are_refused(given):
    async def play(made: Cluster) -> None:
        response = await made.ask(CALL, given)
        assert response.status == 401
        assert json.loads(response.body)["error"]["code"] == "invalid_api_key"
        outcome = await made.outcome()
        assert (outcome.code, outcome.rejected, outcome.plan) == (401, "unauthorized", "none")
        assert made.bodies("p") == made.bodies("d") == []

    played(play, keys=frozenset({"a", "b"}))


def test_with_keys_the_right_ones_are_served_and_kept():
    async def play(made: Cluster) -> None:
        for key in (b"a", b"b"):
            assert (await made.ask(CALL, b"authorization: Bearer " + key + b"\r\n")).status == 200
        seen = [each.headers for name in made.engines for each in made.received(name)]
        assert len(seen) == 4
        assert not [headers for headers in seen if "authorization" in headers]

    played(play, keys=frozenset({"a", "b"}))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"not json", 400, None),
        (b"[]", 400, None),
        (b"{}", 400, None),
        ({"model": 7}, 400, None),
        ({"model": "unheard of"}, 404, "model_not_found"),
    ],
)
def test_what_cannot_be_served(body, status, code):
    async def play(made: Cluster) -> None:
        response = await made.ask(body)
        error = json.loads(response.body)["error"]
        assert (response.status, error["code"]) == (status, code)
        assert error["type"] == "invalid_request_error"
        outcome = await made.outcome()
        assert (outcome.code, outcome.plan) == (status, "none")
        assert outcome.rejected

    played(play)


# Failures and retries


PREFILL_FAILURES: list[tuple[Behaviour, str]] = [
    (whole(500, {"error": {}}), "status_500"),
    (whole(503, {}), "status_503"),
    (whole(429, {}), "status_429"),
    (whole(200, b"not json"), "unreadable_reply"),
    (whole(200, b"[]"), "unreadable_reply"),
    (hang_up, "disconnected"),
]
DECODE_FAILURES: list[tuple[Behaviour, str]] = [
    (whole(500, {"error": {}}), "status_500"),
    (whole(429, {}), "status_429"),
    (hang_up, "disconnected"),
    (events(ERROR, DONE), "engine_error_event"),
    (events(ROLE, ERROR, DONE), "engine_error_event"),
    (events(ROLE), "empty_stream"),
    (events(), "empty_stream"),
    (events(ROLE, then="close"), "disconnected"),
]


@pytest.mark.parametrize(("failing", "reason"), PREFILL_FAILURES)
@pytest.mark.parametrize("body", [CALL, STREAMED], ids=["whole", "stream"])
def test_prefill_that_fails_is_done_elsewhere(failing, reason, body):
    behaviour = in_turn(failing, prefills)

    async def play(made: Cluster) -> None:
        assert (await made.ask(body)).status == 200
        outcome = await made.outcome()
        assert outcome.retries == [("prefill", reason)]
        assert (outcome.code, outcome.error) == (200, "")
        assert [len(made.received(name)) for name in ("p0", "p1")] == [1, 1]
        assert len(made.bodies("d")) == 1
        assert len(made.suspects) == 1

    played(play, prefill=[behaviour, behaviour])


@pytest.mark.parametrize(("failing", "reason"), DECODE_FAILURES)
def test_decode_that_fails_before_content_is_done_elsewhere(failing, reason):
    """After a prefill of its own."""
    behaviour = in_turn(failing, decodes)

    async def play(made: Cluster) -> None:
        response = await made.ask(STREAMED)
        assert (response.status, response.body) == (200, b"".join(STREAM))
        outcome = await made.outcome()
        assert outcome.retries == [("decode", reason)]
        assert len(made.bodies("p")) in (1, 2)
        assert [len(made.received(name)) for name in ("d0", "d1")] == [1, 1]
        legs = [body.get("kv_transfer_params") for body in made.bodies("d")]
        assert len(legs) == 2

    played(play, decode=[behaviour, behaviour])


@pytest.mark.parametrize(("failing", "reason"), PREFILL_FAILURES[:1] + PREFILL_FAILURES[-1:])
def test_where_all_prefill_workers_fail_decode_serves_alone(failing, reason):
    async def play(made: Cluster) -> None:
        assert (await made.ask(CALL)).status == 200
        outcome = await made.outcome()
        assert outcome.retries == [("prefill", reason)] * 2
        assert outcome.plan == "decode"

    played(play, prefill=[failing, failing])


@pytest.mark.parametrize("body", [CALL, STREAMED], ids=["whole", "stream"])
def test_where_all_fail_the_client_hears_of_it(body):
    async def play(made: Cluster) -> None:
        response = await made.ask(body)
        assert response.status == 502
        assert json.loads(response.body)["error"]["type"] == "server_error"
        outcome = await made.outcome()
        assert (outcome.code, outcome.error, outcome.rejected) == (502, "workers_failed", "")
        assert len(outcome.retries) == 2
        assert len(made.bodies("d")) == 3

    played(play, decode=[whole(500, {}), whole(500, {})])


def test_one_attempt_is_one_attempt():
    async def play(made: Cluster) -> None:
        assert (await made.ask(CALL)).status == 502
        assert len(made.bodies("p")) == 1
        assert (await made.outcome()).retries == []

    played(play, prefill=[whole(500, {}), whole(500, {})], max_attempts=1)


@pytest.mark.parametrize("role", ["p0", "d0"])
def test_a_worker_that_refuses_connections_is_passed_over_and_down(role):
    async def play(made: Cluster) -> None:
        await made.engines[role].pause()
        listener = made.engines[role]._listener
        assert listener is not None
        listener.close()
        for _ in range(2):
            assert (await made.ask(CALL)).status == 200
        assert made.worker(role).up is False
        assert made.worker(role).id in made.suspects
        assert sum(len(outcome.retries) for outcome in made.outcomes) == 1

    played(play)


def test_a_failed_prefill_leaves_nothing_in_the_map():
    async def play(made: Cluster) -> None:
        await made.ask(CALL)
        assert not [size for size in made.fleet.cachemap.blocks_held().values() if size]

    played(play, prefill=[whole(500, {})], decode=[whole(500, {})])


@pytest.mark.parametrize(("role", "status"), [("p", 400), ("p", 404), ("d", 400), ("d", 422)])
@pytest.mark.parametrize("body", [CALL, STREAMED], ids=["whole", "stream"])
def test_a_refusal_of_the_call_is_passed_on_as_it_is(role, status, body):
    said = b'{"error": {"message": "too long",  "odd": [1.0]}}'
    refusing = [whole(status, said)] * 2

    async def play(made: Cluster) -> None:
        response = await made.ask(body)
        assert (response.status, response.body) == (status, said)
        outcome = await made.outcome()
        assert (outcome.code, outcome.retries) == (status, [])
        assert len(made.bodies(role)) == 1
        assert made.suspects == []

    played(play, **{"prefill" if role == "p" else "decode": refusing})


@pytest.mark.parametrize(
    ("behind", "then"),
    [
        (b"", "cut"),
        (b"", "close"),
        (b"", "end"),
        (ERROR, "close"),
        (ERROR + DONE, "end"),
        (ERROR + DONE, "silent"),
    ],
)
def test_a_stream_that_breaks_off_is_not_begun_again(behind, then):
    async def play(made: Cluster) -> None:
        response = await made.ask(STREAMED)
        assert response.status == 200
        *seen, last = response.body.removesuffix(b"\n\n").split(b"\n\n")
        assert [each + b"\n\n" for each in seen] == [ROLE, chunk({"content": "Hel"})]
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
        assert DONE not in response.body
        assert len(made.bodies("d")) == 1
        outcome = await made.outcome()
        assert (outcome.code, outcome.error) == (502, "workers_failed")
        assert (outcome.retries, outcome.disconnect_phase) == ([], "")

    behaviour = events(ROLE, chunk({"content": "Hel"}), behind, then=then)
    played(play, decode=[behaviour, behaviour])


def test_the_error_that_ends_a_stream_is_an_event_of_its_own():
    async def play(made: Cluster) -> None:
        response = await made.ask(STREAMED)
        *_, last = response.body.removesuffix(b"\n\n").split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"

    played(play, decode=[events(ROLE, chunk({"content": "Hel"}), b'data: {"cho')])


def test_a_dead_pooled_connection_is_no_fault_of_the_worker():
    async def play(made: Cluster) -> None:
        for _ in range(2):
            assert (await made.ask(CALL)).status == 200
        outcome = await made.outcome(2)
        assert outcome.retries == [("prefill", "stale_connection")]
        assert made.suspects == []
        assert len(made.bodies("p")) == 3

    played(play, prefill=[in_turn(prefills, hang_up, prefills)])


def test_past_the_handoff_gap_nothing_is_decoded():
    async def play(made: Cluster) -> None:
        response = await made.ask(CALL)
        assert response.status == 504
        assert len(made.bodies("p")) == 2
        assert made.bodies("d") == []
        outcome = await made.outcome()
        assert outcome.retries == [("decode", "handoff_gap")]

    played(play, handoff_gap_s=0.0, max_attempts=2)


def test_an_attempt_that_failed_is_ended_at_its_engine():
    """The engine told of an error, and does not end its stream."""
    behaviour = in_turn(events(ROLE, ERROR, then="silent"), decodes)

    async def play(made: Cluster) -> None:
        assert (await made.ask(STREAMED)).status == 200
        engines = [made.engines[name] for name in ("d0", "d1")]
        await until(lambda: not any(engine.active for engine in engines), timeout_s=1.0)

    played(play, decode=[behaviour, behaviour])


# Queueing


BIG = {"model": "short", "prompt": "x" * 1000, "max_tokens": 100}


async def occupied(made: Cluster) -> asyncio.Task[Any]:
    """A call that takes all room there is."""
    running = asyncio.create_task(made.ask(BIG, path=COMPLETIONS))
    await until(lambda: made.fleet.scheduler.leases)
    return running


async def waiting(made: Cluster, count: int) -> None:
    await until(lambda: made.fleet.scheduler.depth == count)


class Held:
    """An engine that answers once it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def __call__(self, request: Any, answer: Any) -> None:
        await self.may.wait()
        await decodes(request, answer)


def queued(play: Callable[[Cluster, Held], Any], **more: Any) -> None:
    """Play on a cluster whose only decode worker has room for one call and holds it."""

    async def scenario() -> None:
        held = Held()
        async with cluster([], [held], capacity_tokens=400, **more) as made:
            await play(made, held)

    uvloop.run(scenario())


def test_calls_wait_for_room_in_their_order():
    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        later = []
        for i in range(3):
            later.append(asyncio.create_task(made.ask(BIG | {"seed": i}, path=COMPLETIONS)))
            await waiting(made, i + 1)
        held.may.set()
        for task in (first, *later):
            assert (await task).status == 200
        assert [body.get("seed") for body in made.bodies("d")] == [None, 0, 1, 2]
        outcome = await made.outcome(4)
        assert outcome.queue_wait_s is not None
        assert outcome.queue_wait_s > 0

    queued(play)


def test_a_call_that_waits_too_long_is_refused():
    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        response = await made.ask(BIG, path=COMPLETIONS)
        assert (response.status, response.headers["retry-after"]) == (429, "1")
        outcome = await made.outcome()
        assert (outcome.rejected, outcome.plan) == ("queue_timeout", "none")
        held.may.set()
        assert (await first).status == 200

    queued(play, queue_timeout_s=0.05)


def test_a_call_too_many_is_refused():
    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        second = asyncio.create_task(made.ask(BIG, path=COMPLETIONS))
        await waiting(made, 1)
        response = await made.ask(BIG, path=COMPLETIONS)
        assert response.status == 429
        assert "retry-after" in response.headers
        assert b"max_waiting" in response.body
        assert (await made.outcome()).rejected == "queue_full"
        held.may.set()
        assert [(await each).status for each in (first, second)] == [200, 200]

    queued(play, max_waiting=1)


def test_calls_too_large_to_wait_are_refused():
    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        second = asyncio.create_task(made.ask(BIG, path=COMPLETIONS))
        await waiting(made, 1)
        response = await made.ask(BIG, path=COMPLETIONS)
        assert response.status == 429
        assert "retry-after" in response.headers
        assert b"queue.max_waiting_bytes" in response.body
        outcome = await made.outcome()
        assert (outcome.code, outcome.rejected, outcome.plan) == (429, "queue_full", "none")
        held.may.set()
        assert [(await each).status for each in (first, second)] == [200, 200]

    queued(play, max_waiting_bytes=2000)


def test_a_prefix_that_came_while_a_call_waited_is_found():
    """Two equal calls wait; the second reuses what the first brings to the worker."""
    large = {"model": "short", "prompt": "word " * 2000, "max_tokens": 100}

    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        twins = []
        for i in range(2):
            twins.append(asyncio.create_task(made.ask(large, path=COMPLETIONS)))
            await waiting(made, i + 1)
        held.may.set()
        responses = [await each for each in (first, *twins)]
        cached = [int(each.headers["x-pdrouter-cached-tokens"]) for each in responses]
        assert cached[:2] == [0, 0]
        assert cached[2] > 300  # the worker keeps no more than 400

    queued(play)


def test_without_any_worker_a_call_is_refused_at_once():
    async def play(made: Cluster) -> None:
        for worker in made.fleet.workers:
            worker.up = False
        assert (await made.ask(CALL)).status == 503
        assert (await made.outcome()).rejected == "no_workers"

    played(play)


def test_two_calls_of_one_request_id_may_wait():
    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        twins = []
        for i in range(2):
            twins.append(asyncio.create_task(made.ask(BIG, b"x-request-id: twin\r\n", COMPLETIONS)))
            await waiting(made, i + 1)
        held.may.set()
        done = await asyncio.gather(first, *twins)
        assert [each.status for each in done] == [200, 200, 200]
        assert [each.headers["x-request-id"] for each in done[1:]] == ["twin", "twin"]

    queued(play, queue_timeout_s=1.0)


# Clients that leave


@pytest.mark.parametrize(
    ("phase", "prefill", "decode"),
    [
        ("prefill", silent, decodes),
        ("transfer", prefills, silent),
        ("transfer", prefills, events(ROLE, then="silent")),
        ("decode", prefills, events(ROLE, chunk({"content": "x"}), then="silent")),
    ],
    ids=["prefill", "sent", "role", "decode"],
)
@pytest.mark.parametrize("half", [False, True], ids=["closed", "half"])
def test_a_client_that_leaves_ends_all_its_work(phase, prefill, decode, half):
    async def play(made: Cluster) -> None:
        async with made.edge.client() as (reader, writer):
            writer.write(request(json.dumps(STREAMED).encode()))
            where = "p0" if phase == "prefill" else "d0"
            await until(lambda: made.engines[where].active)
            if phase == "decode":
                await read_head(reader)
                assert await read_chunk(reader)
            if half:
                writer.write_eof()
            else:
                writer.transport.abort()
            outcome = await made.outcome()
        assert (outcome.code, outcome.disconnect_phase) == (499, phase)
        await until(lambda: not made.engines[where].active, timeout_s=1.0)
        # Whatever the engine has begun to fetch, nobody else fetches.
        assert len(made.bodies("d")) == (0 if phase == "prefill" else 1)

    played(play, prefill=[prefill], decode=[decode])


def test_a_client_that_leaves_while_it_waits_is_forgotten():
    async def play(made: Cluster, held: Held) -> None:
        first = await occupied(made)
        async with made.edge.client() as (_, writer):
            writer.write(request(json.dumps(BIG).encode()))
            await waiting(made, 1)
            writer.transport.abort()
            outcome = await made.outcome()
        assert (outcome.code, outcome.disconnect_phase) == (499, "waiting")
        assert made.fleet.scheduler.depth == 0
        held.may.set()
        assert (await first).status == 200
        assert len(made.bodies("d")) == 1

    queued(play)


Script = Callable[[Receiver], None]


def says(body: JSON | bytes) -> Script:
    """A whole answer."""

    def script(receiver: Receiver) -> None:
        receiver.on_head(200, ((b"content-type", b"application/json"),))
        receiver.on_data(body if isinstance(body, bytes) else json.dumps(body).encode())
        receiver.on_end()

    return script


def fails(failure: WorkerFailure) -> Script:
    return lambda receiver: receiver.on_failure(failure)


def is_silent(receiver: Receiver) -> None:
    """No answer."""


def breaks_off(failure: WorkerFailure) -> Script:
    """A stream that has begun, and fails."""

    def script(receiver: Receiver) -> None:
        receiver.on_head(200, ((b"content-type", b"text/event-stream"),))
        receiver.on_data(ROLE + chunk({"content": "Hel"}))
        receiver.on_failure(failure)

    return script


def answers_500(receiver: Receiver) -> None:
    receiver.on_head(500, ((b"content-type", b"application/json"),))
    receiver.on_data(b"{}")
    receiver.on_end()


class Hand:
    """A worker's pool of connections, played by hand: each request runs the next of `scripts`,
    the last one over and over. `opening` runs when a connection is asked for, `answering` and
    `answered` in the very turn of the loop in which an answer comes in."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.sent: list[JSON] = []
        self.cancelled: list[float] = []  # with which grace
        self.opening: Callable[[], Awaitable[None]] | None = None
        self.answering: Callable[[], None] | None = None
        self.answered: Callable[[], None] | None = None

    async def open(self) -> Hand:
        if self.opening is not None:
            await self.opening()
        return self

    async def connect(self) -> Hand:
        return await self.open()

    def post(self, path: bytes, headers: bytes, body: bytes, receiver: Receiver) -> None:
        self.sent.append(json.loads(body))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        asyncio.get_running_loop().call_soon(self._reply, script, receiver)

    def _reply(self, script: Script, receiver: Receiver) -> None:
        if self.answering is not None:
            self.answering()
        script(receiver)
        if self.answered is not None:
            self.answered()

    def cancel(self, receiver: Receiver, grace_s: float = 0.0) -> None:
        self.cancelled.append(grace_s)

    def hang_up(self, receiver: Receiver) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Hands:
    """Stands for all connections to workers: p for prefill, d0 and d1 for decode."""

    def __init__(self, decoders: int = 1) -> None:
        self.p = Hand(*(says(prefilled(number)) for number in range(1, 9)))
        self.d = [Hand(says(completion())) for _ in range(decoders)]

    def worker(self, url: str) -> Hand:
        name = urlsplit(url).hostname
        assert name is not None
        return self.p if name == "p" else self.d[int(name[1:])]


@dataclass(slots=True)
class Table:
    """A dispatcher before `Hands`."""

    hands: Hands
    fleet: Fleet
    dispatcher: Dispatcher
    outcomes: list[Outcome]
    edge: Edge

    def client_leaves(self) -> None:
        self.edge.protocols[0].cycle.gone()

    async def over(self) -> Outcome:
        """The call has ended, and all that it left to be done."""
        await until(lambda: self.outcomes and not self.dispatcher._background)
        assert not self.fleet.scheduler.leases
        (outcome,) = self.outcomes
        return outcome


def by_hand(
    play: Callable[[Table], Any],
    hands: Hands,
    *,
    max_attempts: int = 3,
    body: JSON = CALL | {"max_tokens": 50},
) -> None:
    """Send one call and play; a test looks at what its hands hold afterwards."""

    async def scenario() -> None:
        outcomes: list[Outcome] = []
        urls = [f"http://d{i}:1" for i in range(len(hands.d))]
        fleet = fleet_of(model_config(["http://p:1"], urls), hands)
        for worker in fleet.workers:
            fleet.apply(worker.id, UP)
        dispatcher = Dispatcher(
            {"short": fleet},
            keys=frozenset(),
            max_attempts=max_attempts,
            handoff_gap_s=20.0,
            observe=outcomes.append,
            suspect=lambda worker: None,
        )
        async with listening(dispatcher.serve) as edge, edge.client() as (_, writer):
            writer.write(request(json.dumps(body).encode()))
            await play(Table(hands, fleet, dispatcher, outcomes, edge))

    uvloop.run(scenario())


def number_of(leg: JSON) -> int:
    """Which prefill a decode leg fetches from, by `handoff_params`; 0 for none."""
    params = leg.get("kv_transfer_params")
    (number,) = [n for n in range(9) if params == (handoff_params(n) if n else None)]
    return number


def releases(hand: Hand) -> list[int]:
    """The prefills whose KV was taken over only to be let go."""
    legs = [leg for leg in hand.sent if leg["max_tokens"] == 1]
    assert not any(leg["stream"] for leg in legs)
    return [number_of(leg) for leg in legs]


def leaving_at(moment: str, hands: Hands) -> Callable[[Table], Any]:
    """Let the client leave at a moment of its call."""

    async def play(table: Table) -> None:
        async def leaves_and_waits() -> None:
            hands.d[0].opening = None
            table.client_leaves()
            await asyncio.Event().wait()

        if moment == "as prefill ends":
            hands.p.answered = table.client_leaves
        elif moment == "just before prefill ends":
            hands.p.answering = table.client_leaves
        else:
            hands.d[0].opening = leaves_and_waits
        outcome = await table.over()
        phase = "transfer" if moment == "as decode connects" else "prefill"
        assert (outcome.code, outcome.disconnect_phase) == (499, phase)

    return play


@pytest.mark.parametrize(
    "moment", ["as prefill ends", "just before prefill ends", "as decode connects"]
)
def test_kv_is_taken_over_when_the_client_leaves_between_the_legs(moment):
    """Within the very turn of the loop in which the prefill worker answers, before or behind it,
    or while the connection to the decode worker is being made."""
    hands = Hands()
    by_hand(leaving_at(moment, hands), hands)
    assert releases(hands.d[0]) == [1]
    assert len(hands.d[0].sent) == 1


@pytest.mark.parametrize("answer", [completion(), b"not json", b"[]", b""])
def test_nothing_is_taken_over_where_prefill_kept_nothing(answer):
    hands = Hands()
    hands.p = Hand(says(answer))
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert hands.d[0].sent == []


def test_a_prefill_that_fails_as_the_client_leaves_leaves_nothing():
    hands = Hands()
    hands.p = Hand(fails(Disconnected("disconnected")))
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert hands.d[0].sent == []


def test_a_prefill_that_says_no_more_is_stopped():
    hands = Hands()
    hands.p = Hand(is_silent)
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert hands.p.cancelled == [0.0]
    assert hands.d[0].sent == []


async def refuses() -> None:
    raise ConnectFailed("connect")


async def lets_wait() -> None:
    raise TimedOut("connect_timeout")


async def to_its_end(table: Table) -> None:
    await table.over()


@pytest.mark.parametrize("opening", [refuses, lets_wait])
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_kv_that_decode_could_not_be_asked_to_fetch_is_released_by_another(opening, max_attempts):
    hands = Hands(decoders=2)
    hands.d[0].opening = opening
    by_hand(to_its_end, hands, max_attempts=max_attempts)
    assert hands.d[0].sent == []
    assert releases(hands.d[1]) == [1]
    served = [number_of(leg) for leg in hands.d[1].sent if leg["max_tokens"] == 50]
    assert served == [2][: max_attempts - 1]


@pytest.mark.parametrize(
    ("failing", "again"),
    [
        (fails(Disconnected("disconnected")), 2),
        (fails(TimedOut("first_byte_timeout")), 2),
        # An engine that hangs up without a word looks the same, and may have seen the leg.
        (fails(StaleConnection("stale_connection")), 2),
        # Where the engine says that it failed, its prefill worker is doubted too.
        (answers_500, 0),
    ],
)
def test_kv_that_decode_may_have_begun_to_fetch_is_left_to_the_engines(failing, again):
    """Another fetch could come when its blocks are another prompt's already."""
    hands = Hands(decoders=2)
    hands.d[0].scripts.insert(0, failing)
    by_hand(to_its_end, hands)
    assert [releases(hand) for hand in hands.d] == [[], []]
    assert [number_of(leg) for hand in hands.d for leg in hand.sent] == [1, again]


@pytest.mark.parametrize(
    ("script", "sent"),
    [
        (fails(Disconnected("disconnected")), 1),
        (fails(TimedOut("first_byte_timeout")), 1),
        (says(b"not json"), 1),
    ],
)
def test_a_release_that_fails_ends_there(script, sent):
    """The prefill engine's own lease is the last resort."""
    hands = Hands()
    hands.d[0].scripts = [script]
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert releases(hands.d[0]) == [1] * sent


@pytest.mark.parametrize("opening", [refuses, lets_wait])
def test_a_release_without_a_connection_ends_there(opening):
    hands = Hands()
    hands.d[0].opening = opening
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert hands.d[0].sent == []


def test_a_release_that_nobody_answers_ends_in_time(monkeypatch):
    monkeypatch.setattr(dispatch, "_RELEASE_TIMEOUT_S", 0.02)
    hands = Hands()
    hands.d[0].scripts = [is_silent]
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert releases(hands.d[0]) == [1]
    assert hands.d[0].cancelled == [0.0]


def test_a_release_that_gets_no_connection_ends_in_time(monkeypatch):
    monkeypatch.setattr(dispatch, "_RELEASE_TIMEOUT_S", 0.02)

    async def never() -> None:
        await asyncio.Event().wait()

    hands = Hands()
    hands.d[0].opening = never
    by_hand(leaving_at("as prefill ends", hands), hands)
    assert hands.d[0].sent == []
    assert hands.d[0].cancelled == []


@pytest.mark.parametrize(
    ("failure", "code", "error"),
    [
        (Disconnected("disconnected"), 502, "workers_failed"),
        (TimedOut("idle_timeout"), 504, "workers_timed_out"),
    ],
)
def test_a_stream_that_breaks_off_has_the_code_of_the_error_that_ends_it(failure, code, error):
    hands = Hands()
    hands.d[0].scripts = [breaks_off(failure)]

    async def play(table: Table) -> None:
        outcome = await table.over()
        assert (outcome.code, outcome.error, outcome.rejected) == (code, error, "")
        assert (outcome.retries, outcome.disconnect_phase) == ([], "")

    by_hand(play, hands, body=STREAMED)
    assert len(hands.d[0].sent) == 1


def test_many_calls_at_once_end_once_each():
    async def play(made: Cluster) -> None:
        async def one(i: int) -> int:
            return (await made.ask(STREAMED if i % 2 else CALL)).status

        statuses: Sequence[int] = await asyncio.gather(*(one(i) for i in range(60)))
        assert set(statuses) == {200}
        assert len({outcome.request_id for outcome in made.outcomes}) == len(made.outcomes) == 60

    failing = in_turn(whole(500, {}), hang_up, decodes)
    played(play, decode=[failing, decodes])


def test_a_connection_serves_call_after_call():
    async def play(made: Cluster) -> None:
        async with made.edge.client() as (reader, writer):
            for i in range(6):
                writer.write(request(json.dumps(STREAMED if i % 2 else CALL).encode()))
                assert (await read_response(reader)).status == 200

    played(play)


def test_failures_are_no_part_of_the_answer():
    """Names of workers and prompts stay inside."""

    async def play(made: Cluster) -> None:
        response = await made.ask(CALL)
        assert b"127.0.0.1" not in response.body
        assert b"Hello" not in response.body

    played(play, prefill=[], decode=[whole(500, {"error": "Hello"})])
