"""A call's way over scripted engines: what each of them gets, and what the client hears."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import uvloop

from router.dispatch import COMPLETIONS, Dispatcher
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
from tests.router.wire import listening, read_chunk, read_head, read_response, request, until

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


@pytest.mark.parametrize("then", ["cut", "end"])
def test_a_stream_that_breaks_off_is_not_begun_again(then):
    async def play(made: Cluster) -> None:
        response = await made.ask(STREAMED)
        assert response.status == 200
        *seen, last = response.body.removesuffix(b"\n\n").split(b"\n\n")
        assert [each + b"\n\n" for each in seen] == [ROLE, chunk({"content": "Hel"})]
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
        assert DONE not in response.body
        assert len(made.bodies("d")) == 1
        outcome = await made.outcome()
        assert outcome.error == "workers_failed"
        assert outcome.retries == []

    behaviour = events(ROLE, chunk({"content": "Hel"}), then=then)
    played(play, decode=[behaviour, behaviour])


@pytest.mark.xfail(strict=True, reason="the error's status counts, though 200 was sent")
def test_the_code_of_a_stream_that_breaks_off_is_the_one_sent():
    async def play(made: Cluster) -> None:
        assert (await made.ask(STREAMED)).status == 200
        assert (await made.outcome()).code == 200

    played(play, decode=[events(ROLE, chunk({"content": "Hel"}))])


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
        done = await asyncio.gather(first, *twins, return_exceptions=True)
        for lease in list(made.fleet.scheduler.leases):
            made.fleet.scheduler.close(lease)  # so that only the answers are judged
        assert [getattr(each, "status", each) for each in done] == [200, 200, 200]

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


class Hand:
    """A worker's pool of connections, played by hand. Every request is answered with `answer`;
    `opening` and `answered` run when a connection is asked for, and when an answer is in."""

    def __init__(self, answer: JSON) -> None:
        self.answer = json.dumps(answer).encode()
        self.sent: list[JSON] = []
        self.opening: Callable[[], Any] | None = None
        self.answered: Callable[[], None] | None = None

    async def open(self) -> Hand:
        if self.opening is not None:
            await self.opening()
        return self

    def post(self, path: bytes, headers: bytes, body: bytes, receiver: Receiver) -> None:
        self.sent.append(json.loads(body))
        asyncio.get_running_loop().call_soon(self._reply, receiver)

    def _reply(self, receiver: Receiver) -> None:
        receiver.on_head(200, ((b"content-type", b"application/json"),))
        receiver.on_data(self.answer)
        receiver.on_end()
        if self.answered is not None:
            self.answered()

    def abandon(self, grace_s: float) -> None: ...

    def abort(self) -> None: ...


class Hands:
    """Stands for all connections to workers: p for prefill, d for decode."""

    def __init__(self) -> None:
        self.prefill, self.decode = Hand(prefilled()), Hand(completion())

    def worker(self, url: str) -> Hand:
        return self.prefill if url.startswith("http://p") else self.decode


@pytest.mark.parametrize("moment", ["as prefill ends", "as decode connects"])
def test_kv_is_taken_over_when_the_client_leaves_between_the_legs(moment):
    """Within the very turn of the loop in which the prefill worker has answered, or while the
    connection to the decode worker is being made."""

    async def scenario() -> None:
        hands = Hands()
        outcomes: list[Outcome] = []
        fleet = fleet_of(model_config(["http://p:1"], ["http://d:1"]), hands)
        for worker in fleet.workers:
            fleet.apply(worker.id, UP)
        dispatcher = Dispatcher(
            {"short": fleet},
            keys=frozenset(),
            max_attempts=3,
            handoff_gap_s=20.0,
            observe=outcomes.append,
            suspect=lambda worker: None,
        )
        async with listening(dispatcher.serve) as edge, edge.client() as (_, writer):

            def leaves() -> None:
                edge.protocols[0].cycle.gone()

            async def leaves_and_waits() -> None:
                hands.decode.opening = None
                leaves()
                await asyncio.Event().wait()

            if moment == "as prefill ends":
                hands.prefill.answered = leaves
            else:
                hands.decode.opening = leaves_and_waits
            writer.write(request(json.dumps(CALL | {"max_tokens": 50}).encode()))
            await until(lambda: outcomes and hands.decode.sent)
        (leg,) = hands.decode.sent
        assert leg["kv_transfer_params"] == handoff_params()
        assert (leg["max_tokens"], leg["stream"]) == (1, False)
        assert (outcomes[0].code, outcomes[0].disconnect_phase) in [
            (499, "prefill"),
            (499, "transfer"),
        ]
        assert not fleet.scheduler.leases
        await until(lambda: not dispatcher._background)

    uvloop.run(scenario())


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
