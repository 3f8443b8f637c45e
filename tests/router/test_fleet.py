"""A model's workers: places for its calls, and what is learned of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cachemap import Blocks, Prompt, hash_blocks, read_prompt
from router.config import ModelConfig
from router.errors import NoWorkers, QueueOverflow, QueueTimeout
from router.fleet import Fleet
from router.upstream import Upstreams
from router.worker_monitor import WorkerReport
from scheduler import Job, Lease
from tests.router.clusters import UP, fleet_of, model_config
from tests.router.wire import until

TEXT = "word " * 2000


def fleet(prefill: int = 2, decode: int = 2, report: WorkerReport = UP, **more: Any) -> Fleet:
    """Workers p0:1, p1:1, ... and d0:1, ..., all of them as `report` says."""
    config = model_config(
        [f"http://p{i}:1" for i in range(prefill)], [f"http://d{i}:1" for i in range(decode)]
    )
    made = fleet_of(config, Upstreams(1, 1, 1), **more)
    for worker in made.workers:
        made.apply(worker.id, report)
    return made


def prompt_of(body: Any) -> tuple[Prompt, Blocks]:
    prompt = read_prompt(body, "full-name")
    return prompt, hash_blocks(prompt)


def job_of(made: Fleet, body: Any, name: str = "job", limit: int | None = 100) -> Job:
    prompt, blocks = prompt_of(body)
    held = made.held(prompt, blocks)
    return made.job(name, held, limit, decode_only=False, excluded=frozenset())


def bare(name: str, prompt_tokens: int = 300) -> Job:
    return Job(name, prompt_tokens, 100)


async def acquired(made: Fleet, job: Job, body: Any = None, body_bytes: int = 0) -> Lease:
    """A place for a call; without `body` it has no prompt that others could share."""
    prompt, blocks = prompt_of(body or {})
    lease, _ = await made.acquire(job, blocks, made.held(prompt, blocks), body_bytes)
    return lease


def one_at_a_time(**more: Any) -> Fleet:
    """Room for one call of `bare`."""
    return fleet(0, 1, replace(UP, capacity_tokens=500), **more)


# Places


def test_a_place_is_given_at_once_where_there_is_room():
    async def scenario() -> None:
        made = fleet()
        lease = await acquired(made, bare("one"))
        assert lease.job.id == "one"
        made.release(lease)
        made.release(lease)  # twice is once
        assert not made.scheduler.leases

    asyncio.run(scenario())


def test_a_place_that_is_given_back_goes_to_who_waits_longest():
    async def scenario() -> None:
        made = one_at_a_time()
        lease = await acquired(made, bare("first"))
        order: list[str] = []

        async def one(name: str) -> None:
            place = await acquired(made, bare(name))
            order.append(name)
            made.release(place)

        tasks = [asyncio.create_task(one(f"job-{i}")) for i in range(5)]
        await until(lambda: made.scheduler.depth == 5)
        made.release(lease)
        await asyncio.gather(*tasks)
        assert order == [f"job-{i}" for i in range(5)]
        assert not made.scheduler.leases

    asyncio.run(scenario())


def test_nobody_waits_longer_than_allowed():
    async def scenario() -> None:
        made = one_at_a_time(queue_timeout_s=0.02)
        lease = await acquired(made, bare("first"))
        with pytest.raises(QueueTimeout) as caught:
            await acquired(made, bare("second"))
        assert caught.value.retry_after_s == 1
        assert made.scheduler.depth == 0
        made.release(lease)

    asyncio.run(scenario())


def test_no_more_wait_than_allowed():
    async def scenario() -> None:
        made = one_at_a_time(max_waiting=0)
        lease = await acquired(made, bare("first"))
        with pytest.raises(QueueOverflow, match="max_waiting") as caught:
            await acquired(made, bare("second"))
        assert caught.value.retry_after_s
        made.release(lease)

    asyncio.run(scenario())


@pytest.mark.parametrize("report", [replace(UP, ready=False), WorkerReport(False, False)])
def test_without_a_worker_that_decodes_there_is_no_waiting(report):
    async def scenario() -> None:
        made = fleet(1, 1)
        made.apply("d0:1", report)
        with pytest.raises(NoWorkers, match="full-name"):
            await acquired(made, bare("one"))
        assert made.scheduler.depth == 0

    asyncio.run(scenario())


def test_a_worker_that_comes_up_serves_who_waits():
    async def scenario() -> None:
        made = one_at_a_time()
        lease = await acquired(made, bare("first"))
        second = asyncio.create_task(acquired(made, bare("second")))
        await until(lambda: made.scheduler.depth == 1)
        made.apply("d0:1", replace(UP, capacity_tokens=5000))
        made.release(await second)
        made.release(lease)
        assert not made.scheduler.leases

    asyncio.run(scenario())


def test_who_leaves_while_waiting_is_not_placed():
    async def scenario() -> None:
        made = one_at_a_time()
        lease = await acquired(made, bare("first"))
        second = asyncio.create_task(acquired(made, bare("second")))
        await until(lambda: made.scheduler.depth == 1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        made.release(lease)
        assert not made.scheduler.leases
        assert made.scheduler.depth == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("placed_first", [True, False])
def test_a_place_given_to_who_just_left_goes_on_to_the_next(placed_first):
    """Leaving and the place's coming free fall into one turn of the loop, in either order."""

    async def scenario() -> None:
        made = one_at_a_time()
        lease = await acquired(made, bare("first"))
        leaving = asyncio.create_task(acquired(made, bare("leaving")))
        await until(lambda: made.scheduler.depth == 1)
        staying = asyncio.create_task(acquired(made, bare("staying")))
        await until(lambda: made.scheduler.depth == 2)
        if placed_first:
            made.release(lease)
            leaving.cancel()
        else:
            leaving.cancel()
            made.release(lease)
        try:
            async with asyncio.timeout(0.5):
                made.release(await staying)
        finally:
            await asyncio.gather(leaving, staying, return_exceptions=True)
        assert not made.scheduler.leases

    asyncio.run(scenario())


def test_calls_that_wait_are_bounded_in_bytes_too():
    async def scenario() -> None:
        made = one_at_a_time(max_waiting_bytes=1000)
        lease = await acquired(made, bare("first"), body_bytes=5000)  # does not wait
        second = asyncio.create_task(acquired(made, bare("second"), body_bytes=600))
        await until(lambda: made.scheduler.depth == 1)
        for too_many in (401, 5000):
            with pytest.raises(QueueOverflow, match=r"queue\.max_waiting_bytes") as caught:
                await acquired(made, bare(f"with {too_many}"), body_bytes=too_many)
            assert caught.value.retry_after_s
            assert made.scheduler.depth == 1
        third = asyncio.create_task(acquired(made, bare("third"), body_bytes=400))
        await until(lambda: made.scheduler.depth == 2)
        made.release(lease)
        made.release(await second)
        made.release(await third)
        assert not made.scheduler.leases

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["placed", "left", "timed out", "no workers"])
def test_the_bytes_of_who_waits_no_more_are_free(ending):
    async def scenario() -> None:
        made = one_at_a_time(max_waiting_bytes=1000, queue_timeout_s=0.05)
        lease = await acquired(made, bare("first"))
        made.scheduler.workers["d0:1"].up = ending != "no workers"
        second = asyncio.create_task(acquired(made, bare("second"), body_bytes=1000))
        if ending != "no workers":
            await until(lambda: made.scheduler.depth == 1)
        if ending == "placed":
            made.release(lease)
            lease = await second
        elif ending == "left":
            second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        made.scheduler.workers["d0:1"].up = True
        third = asyncio.create_task(acquired(made, bare("third"), body_bytes=1000))
        await until(lambda: made.scheduler.depth == 1)
        made.release(lease)
        made.release(await third)

    asyncio.run(scenario())


def test_two_calls_that_wait_are_matched_when_their_turn_comes():
    """The second has its prefix where the first went, though neither was held on arrival."""

    async def scenario() -> None:
        made = fleet(2, 2, replace(UP, capacity_tokens=50_000))
        running = [await acquired(made, bare(f"running-{i}", 49_000)) for i in range(2)]
        body = {"prompt": TEXT * 4}
        prompt, blocks = prompt_of(body)
        held = made.held(prompt, blocks)
        assert held.by_worker == {}
        tasks = []
        for i in range(2):
            job = job_of(made, body, f"job-{i}")
            tasks.append(asyncio.create_task(made.acquire(job, blocks, held, 0)))
        await until(lambda: made.scheduler.depth == 2)
        for lease in running:
            made.scheduler.close(lease)
        made.wake()
        (first, first_held), (second, second_held) = await asyncio.gather(*tasks)
        went = (first.placement.prefill, first.placement.decode)
        assert first.placement.cached_tokens == 0
        assert first_held.by_worker == {}
        assert second.placement.cached_tokens >= second.job.prompt_tokens - 16
        assert (second.placement.prefill or second.placement.decode) in went
        assert second.placement.decode is first.placement.decode
        assert set(second_held.by_worker) == {worker.id for worker in went if worker}
        # A second that fails takes nothing from the first.
        made.not_arrived(second.placement.decode, blocks, second_held)
        assert made.held_now(held, blocks).by_worker == second_held.by_worker

    asyncio.run(scenario())


# Prefixes


def stored(made: Fleet, body: Any) -> Lease:
    return asyncio.run(acquired(made, job_of(made, body), body))


def test_what_was_placed_is_held_in_whole_engine_blocks():
    made = fleet(1, 1)
    body = {"prompt": TEXT}
    stored(made, body)
    job = job_of(made, body)
    assert set(job.held_tokens) == {"p0:1", "d0:1"}
    for tokens in job.held_tokens.values():
        assert tokens % 16 == 0
        assert job.prompt_tokens - 16 < tokens <= job.prompt_tokens


def test_a_failed_call_takes_back_what_it_stored():
    made = fleet(1, 1)
    body = {"prompt": TEXT}
    prompt, blocks = prompt_of(body)
    held = made.held(prompt, blocks)
    lease = stored(made, body)
    for worker in (lease.placement.prefill, lease.placement.decode):
        assert worker is not None
        made.not_arrived(worker, blocks, held)
    assert made.held_now(held, blocks).by_worker == {}


def test_what_was_held_before_stays():
    made = fleet(1, 1)
    start = {"prompt": TEXT}
    stored(made, start)
    longer = {"prompt": TEXT + "more " * 2000}
    prompt, blocks = prompt_of(longer)
    held = made.held(prompt, blocks)
    assert held.by_worker
    lease = stored(made, longer)
    assert lease.placement.prefill is not None
    made.not_arrived(lease.placement.prefill, blocks, held)
    assert made.held_now(held, blocks).by_worker["p0:1"] == held.by_worker["p0:1"]


def test_an_engine_that_restarted_holds_nothing():
    made = fleet(1, 1, replace(UP, started_at=1.0))
    stored(made, {"prompt": TEXT})
    made.apply("p0:1", replace(UP, started_at=1.0))
    assert job_of(made, {"prompt": TEXT}).held_tokens["p0:1"]
    made.apply("p0:1", replace(UP, started_at=2.0))
    assert set(job_of(made, {"prompt": TEXT}).held_tokens) == {"d0:1"}
    assert [worker.epoch for worker in made.workers] == [1, 0]


def test_an_engine_that_was_away_and_did_not_restart_holds_what_it_held():
    made = fleet(1, 1, replace(UP, started_at=1.0))
    stored(made, {"prompt": TEXT})
    made.apply("p0:1", WorkerReport(False, False, started_at=1.0))
    made.apply("p0:1", replace(UP, started_at=1.0))
    assert "p0:1" in job_of(made, {"prompt": TEXT}).held_tokens


def test_reports_are_taken_over():
    made = fleet(1, 1)
    report = WorkerReport(
        up=True,
        ready=True,
        block_tokens=32,
        capacity_tokens=6400,
        engine_running=3,
        engine_waiting=4,
        kv_usage=0.5,
        max_model_len=8000,
    )
    made.apply("p0:1", report)
    made.apply("d0:1", replace(report, max_model_len=4000))
    worker = made.scheduler.workers["p0:1"]
    assert (worker.up, worker.block_tokens, worker.capacity_tokens) == (True, 32, 6400)
    assert (worker.engine_running, worker.engine_waiting, worker.kv_usage) == (3, 4, 0.5)
    assert made.max_model_len == 4000
    made.apply("p0:1", WorkerReport(up=True, ready=False))
    assert (worker.up, worker.capacity_tokens, worker.block_tokens) == (False, 6400, 32)


def test_reports_of_strangers_are_ignored():
    made = fleet(1, 1)
    made.apply("stranger:1", UP)
    assert made.max_model_len is None
    assert len(made.workers) == 2


def test_capacity_bounds_what_a_worker_is_thought_to_hold():
    made = fleet(1, 1)
    made.apply("p0:1", replace(UP, capacity_tokens=160))
    stored(made, {"prompt": TEXT})
    held = job_of(made, {"prompt": TEXT}).held_tokens
    assert held["p0:1"] <= 160 < held["d0:1"]


# Learning


def test_tokens_are_counted_by_bytes_until_more_is_known():
    assert job_of(fleet(), {"prompt": "x" * 4000}).prompt_tokens == 1000


def test_token_ids_count_themselves():
    made = fleet()
    prompt, blocks = prompt_of({"prompt": list(range(1000))})
    for _ in range(200):
        made.learn(made.held(*prompt_of({"prompt": "x" * 4000})), 500, 10)
        made.learn(made.held(prompt, blocks), 1000, 10)
    assert job_of(made, {"prompt": list(range(1000))}).prompt_tokens == 1000


def test_the_length_of_tokens_is_learned_and_sizes_the_map():
    made = fleet(1, 1, replace(UP, capacity_tokens=10_000))
    _, blocks = prompt_of({"prompt": "x" * 100_000})
    made.cachemap.store("p0:1", blocks)
    before = made.cachemap.match(blocks)["p0:1"]
    assert before == pytest.approx(40_000, rel=0.01)
    held = made.held(*prompt_of({"prompt": "x" * 4000}))
    for _ in range(600):
        made.learn(held, 2000, 10)  # two bytes a token
    assert job_of(made, {"prompt": "x" * 4000}).prompt_tokens == pytest.approx(2000, rel=0.02)
    assert made.cachemap.match(blocks)["p0:1"] == pytest.approx(before / 2, rel=0.05)


def test_short_prompts_teach_nothing_of_the_text():
    made = fleet()
    for _ in range(600):
        made.learn(made.held(*prompt_of({"prompt": "x" * 40})), 100, 10)
    assert job_of(made, {"prompt": "x" * 4000}).prompt_tokens == 1000


def test_expected_output_is_capped_by_the_client_and_learned():
    made = fleet()
    short, long = {"prompt": "x" * 40}, {"prompt": "x" * 40_000}
    assert job_of(made, short, limit=None).expected_output_tokens == 40
    assert job_of(made, long, limit=None).expected_output_tokens == 1024
    assert job_of(made, long, limit=7).expected_output_tokens == 7
    held = made.held(*prompt_of(long))
    for _ in range(300):
        made.learn(held, 10_000, 200)
    assert job_of(made, short, limit=None).expected_output_tokens == pytest.approx(200, abs=2)
    assert job_of(made, short, limit=50).expected_output_tokens == 50
    assert job_of(made, {"prompt": ""}, limit=1).prompt_tokens == 1


def shares_of_pools(pools: list[tuple[str, float, int]]) -> dict[str, float]:
    """Decode tokens per pool (name, weight, workers) over many open calls."""
    described: list[dict[str, Any]] = [
        {"name": "prefill", "role": "prefill", "workers": [{"url": "http://p:1"}]}
    ]
    for name, weight, count in pools:
        urls = [{"url": f"http://{name}{i}:1"} for i in range(count)]
        described.append({"name": name, "role": "decode", "weight": weight, "workers": urls})
    config = ModelConfig.model_validate({"name": "full-name", "pools": described})
    made = fleet_of(config, Upstreams(1, 1, 1))
    for worker in made.workers:
        made.apply(worker.id, UP)
    tokens: Counter[str] = Counter()
    leases: list[Lease] = []
    for i in range(1500):
        lease = made.scheduler.submit(Job(f"j{i}", 1000, 300), float(i))
        assert lease is not None
        tokens[lease.placement.decode.pool] += lease.decode_tokens
        leases.append(lease)
        if len(leases) > 300:
            made.scheduler.close(leases.pop(0))
    return {name: tokens[name] / sum(tokens.values()) for name, _, _ in pools}


def test_the_weight_is_the_pools_and_the_mean_decode_worker_has_one():
    config = model_config(["http://p:1"], []).model_dump(mode="json")
    for name, weight, count in (("a", 1.0, 3), ("b", 3.0, 1), ("c", 2.0, 4)):
        urls = [{"url": f"http://{name}{i}:1"} for i in range(count)]
        config["pools"].append({"name": name, "role": "decode", "weight": weight, "workers": urls})
    made = fleet_of(ModelConfig.model_validate(config), Upstreams(1, 1, 1))
    weights = {worker.id: worker.weight for worker in made.workers if worker.can_decode}
    assert sum(weights.values()) == pytest.approx(8)
    assert weights["b0:1"] == pytest.approx(9 * weights["a0:1"])
    assert weights["b0:1"] == pytest.approx(6 * weights["c0:1"])


@pytest.mark.parametrize(
    ("weights", "workers"),
    [
        ((1.0, 1.0), (2, 2)),
        ((1.0, 1.0), (3, 1)),
        ((1.0, 1.0), (8, 7)),
        ((3.0, 1.0), (2, 2)),
        ((3.0, 1.0), (1, 4)),
    ],
)
def test_pools_share_decode_work_by_their_weights(weights, workers):
    shares = shares_of_pools(list(zip("ab", weights, workers, strict=True)))
    assert shares["a"] == pytest.approx(weights[0] / sum(weights), abs=0.1)
