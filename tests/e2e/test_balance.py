"""Load and prefixes together: nobody is piled upon, nobody is forgotten, and charges move."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import pytest

from scheduler import PROFILES
from tests.e2e.cluster import chat, prompt, until
from tests.e2e.virtual import Fleet

CALLS = 1500
# Until every worker has met the prefix.
WARM_UP = 300


def tokens(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(1 << 16) for _ in range(size)]


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def shared_prefix_load(fleet: Fleet, calls: int, utilisation: float) -> None:
    """Calls with one prefix of 2,000 tokens and tails of their own of 500."""
    dice = random.Random(3)
    prefix = tokens(dice, 2000)
    # What a tail costs where the prefix is held, by the profile: 8 ms and 0.108 ms a token.
    rate = utilisation * fleet.prefill / (0.008 + 500 * 0.000108 + 0.002)
    at_s = 0.0
    for number in range(calls):
        at_s += dice.expovariate(rate)
        call = prefix + tokens(dice, 500)
        fleet.at(at_s, partial(fleet.arrive, f"call-{number}", call))
    fleet.run()


def test_a_prefix_that_all_share_is_served_by_all():
    """One prefix in front of all traffic spreads to every worker, at no cost in time."""
    ours, least_load = Fleet(8), Fleet(8, least_load=True)
    for fleet in (ours, least_load):
        shared_prefix_load(fleet, CALLS, 0.9)
        assert len(fleet.ttft_s) == CALLS
    assert min(ours.placed[f"p{i}"] for i in range(8)) >= 0.06 * CALLS
    assert p95(ours.ttft_s[WARM_UP:]) <= 1.2 * p95(least_load.ttft_s[WARM_UP:])


@pytest.mark.parametrize("utilisation", [0.02, 0.7], ids=["idle", "busy"])
def test_a_restarted_worker_is_no_magnet_for_new_prefixes(utilisation):
    """Among workers whose caches are full, an empty one gets at most 1.5 times its share."""
    fleet = Fleet(4, capacity_tokens=100_000)
    dice = random.Random(5)
    rate = utilisation * 4 / (0.008 + 1000 * 0.000108)
    calls, at_s = 800, 0.0
    for number in range(calls):
        at_s += dice.expovariate(rate)
        if number == calls // 2:
            fleet.at(at_s, partial(fleet.restart, "p0"))
        fleet.at(at_s, partial(fleet.arrive, f"call-{number}", tokens(dice, 1000)))
    fleet.run()
    # From the restart on, and not only in the long run.
    first = fleet.since_restart[:60]
    assert first.count("p0") <= 1.5 * 60 / 4
    assert fleet.since_restart.count("p0") <= 1.5 * calls / 2 / 4


def test_a_new_prefix_goes_to_an_idle_worker_however_much_it_holds():
    """Held prefixes neither draw nor repel a prompt that shares none of them."""
    fleet = Fleet(2, capacity_tokens=200_000)
    dice = random.Random(1)
    # p1 has a large index, and nothing to do.
    for number in range(10):
        held = tokens(dice, 10_000)
        job = fleet.job(f"old-{number}", held)
        fleet.workers["p0"].up = False
        fleet.scheduler.close(fleet.place(job))
    fleet.workers["p0"].up = True
    # p0 has a small one, and is busy.
    fleet.workers["p1"].up = False
    for number in range(3):
        busy = tokens(dice, 8000)
        fleet.place(fleet.job(f"busy-{number}", busy))
    fleet.workers["p1"].up = True
    new = tokens(dice, 4000)
    placement = fleet.place(fleet.job("new", new)).placement
    assert placement.prefill is not None
    assert placement.prefill.id == "p1"


def test_a_placed_prompt_makes_its_worker_dearer_by_its_own_work():
    fleet = Fleet(2)
    dice = random.Random(2)
    for size in (200, 2000, 20_000):
        before = {name: worker.prefill_work_tokens for name, worker in fleet.workers.items()}
        call = tokens(dice, size)
        lease = fleet.place(fleet.job(f"of-{size}", call))
        worker = lease.placement.prefill
        assert worker is not None
        assert worker.prefill_work_tokens == before[worker.id] + size
        probe = tokens(dice, 100)
        priced = fleet.place(fleet.job(f"probe-{size}", probe))
        waits = {half.id: parts[0] for _, _, half, parts in priced.placement.candidates[0]}
        own_ms = PROFILES["b300-tp4"].prefill(size, 0)
        assert waits[worker.id] >= own_ms
        fleet.scheduler.close(priced)
        fleet.scheduler.close(lease)
        assert worker.prefill_work_tokens == before[worker.id]


def test_a_long_conversation_is_warm_from_its_second_call_on(gateway):
    """Affinity begins with the first call, whatever the length; 2,000 words are some 8,000
    tokens."""
    for words in (60, 2000):
        body = chat(prompt(f"seeded-{words}", words), max_tokens=2)
        first, second = (gateway.post(body).json()["usage"] for _ in range(2))
        assert first["prompt_tokens_details"]["cached_tokens"] < 32
        assert second["prompt_tokens_details"]["cached_tokens"] > second["prompt_tokens"] - 32


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_header_tells_what_was_cached_whatever_the_plan(gateway, stream):
    body = chat(prompt(f"told-{stream}", 2000), max_tokens=2, stream=stream)
    gateway.post(body)
    for _ in range(2):
        again = gateway.post(body)
        assert int(again.headers["x-pdrouter-cached-tokens"]) > 4000


def test_turns_of_a_conversation_stay_where_their_prefix_is(gateway):
    body = chat(prompt("turns", 500), max_tokens=8)
    seen = set()
    for turn in range(6):
        reply = gateway.post(body)
        if turn:
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
        # A call may find all of its prefix where it decodes, and need no prefill.
        seen |= {reply.headers["x-pdrouter-prefill"]} - {""}
        body["messages"] += [
            reply.json()["choices"][0]["message"],
            {"role": "user", "content": prompt(f"turn-{turn}", 30)},
        ]
    assert len(seen) == 1


# -- gauges ----------------------------------------------------------------------------------------

PATHS = {
    "/v1/chat/completions": lambda name, **more: chat(prompt(name, 60), **more),
    "/v1/completions": lambda name, **more: {"model": "sim", "prompt": prompt(name, 60), **more},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 2], ids=["pd", "alone"])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_counts_its_load_while_it_runs(gateway, path, n, stream):
    body = PATHS[path](f"gauge-{n}-{stream}", max_tokens=150, stream=stream, n=n)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(gateway.post, body, path)
        page = until(
            lambda: (p := gateway.page).total("pdrouter_worker_work_tokens", stage="decode") and p,
            5,
            "work charged",
        )
        assert page.total("pdrouter_leases") == 1
        assert page.total("pdrouter_worker_running", role="decode") == 1
        assert call.result(20).status_code == 200
    until(gateway.at_rest, 2, "charges returned")


def test_prefill_is_charged_its_tokens_until_it_answers_and_no_longer(gateway):
    """Long prefill, long decode: the first charge ends with the first phase."""
    body = chat(prompt("charged", 5000), max_tokens=600)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(gateway.post, body)
        charged = until(
            lambda: gateway.page.total("pdrouter_worker_work_tokens", stage="prefill"), 5, "charged"
        )
        until(
            lambda: gateway.page.total("pdrouter_worker_work_tokens", stage="prefill") == 0,
            10,
            "prefill's charge returned",
        )
        page = gateway.page
        assert page.total("pdrouter_worker_work_tokens", stage="decode") > 0
        assert page.total("pdrouter_leases") == 1
        usage = call.result(30).json()["usage"]
    assert 0.5 < charged / usage["prompt_tokens"] < 2


def test_a_prefill_worker_is_not_counted_as_running_what_decodes(gateway):
    body = chat(prompt("prefill-idle"), max_tokens=600)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(gateway.post, body)
        until(lambda: gateway.page.total("pdrouter_worker_running", role="decode"), 5, "runs")
        until(
            lambda: gateway.page.total("pdrouter_worker_work_tokens", stage="prefill") == 0,
            5,
            "prefill has answered",
        )
        running = gateway.page.total("pdrouter_worker_running", role="prefill")
        assert gateway.page.total("pdrouter_worker_running", role="decode") == 1
        assert call.result(30).status_code == 200
    assert running == 0


def test_unique_prompts_are_spread_evenly_over_decode_workers(gateway, sims):
    """256 calls at once, one prefill worker and five that decode."""
    decoders = sims.group(*(f"w{i}" for i in range(5)))
    for sim in decoders:
        sim.fault(slow=40)

    async def hold(number: int, arrived: asyncio.Event) -> None:
        data = json.dumps(
            chat(prompt(f"wide-{number}", 12), "wide", stream=True, max_tokens=4000)
        ).encode()
        parts = urlsplit(gateway.url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(data), data)
        )
        await arrived.wait()
        writer.close()

    async def active() -> list[int]:
        states = [await asyncio.to_thread(getattr, sim, "state") for sim in decoders]
        return [state["running"] + state["waiting"] for state in states]

    async def crowd() -> list[int]:
        arrived = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(256):
                group.create_task(hold(number, arrived))
            async with asyncio.timeout(25):
                # Another process is waited for; it can only be asked.
                while sum(counts := await active()) < 256:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            arrived.set()
        return counts

    counts = asyncio.run(crowd())
    assert max(counts) / min(counts) <= 1.3
