"""Which plan is the cheapest, and that it is the one chosen."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Lease, Placement, Scheduler, WorkerState
from scheduler.placement import has_room, place, prefill_wait_ms
from tests.scheduler.fleets import PRICES, fleet, job, scheduler_of, worker


def placed(workers: dict[str, WorkerState], call: Any) -> Placement:
    placement = place(call, list(workers.values()), PRICES, 0.0)
    assert placement is not None
    return placement


def prefill_of(workers: dict[str, WorkerState], call: Any) -> str:
    placement = placed(workers, call)
    assert placement.prefill is not None
    return placement.prefill.id


def busy(each: WorkerState, tokens: int) -> None:
    """Give a worker the books of one running prefill of `tokens`."""
    each.prefill_jobs += 1
    each.prefill_work_tokens += tokens
    each.prefill_work_ms += PRICES.prefill(tokens, 0)


@pytest.mark.parametrize("warm", ["p0", "p1", "p2"])
def test_the_warm_worker_wins_when_idle(warm):
    assert prefill_of(fleet(3, 2), job(8000, held={warm: 4000})) == warm


@pytest.mark.parametrize("warm", ["p0", "p1"])
def test_the_longest_prefix_wins(warm):
    held = {"p0": 2000, "p1": 2000} | {warm: 6000}
    assert prefill_of(fleet(2, 1), job(8000, held=held)) == warm


@pytest.mark.parametrize("held", [16, 32, 256])
def test_there_is_no_least_length_of_a_prefix(held):
    for warm in ("p0", "p1"):
        assert prefill_of(fleet(2, 1), job(8000, held={warm: held})) == warm


def test_a_call_that_repeats_is_warm_the_second_time():
    """No threshold keeps the first one from being remembered where it ran."""
    workers = fleet(4, 1)
    scheduler = scheduler_of(workers)
    first = scheduler.submit(job(8000), 0.0)
    assert first is not None
    assert first.placement.prefill is not None
    warm = first.placement.prefill.id
    scheduler.close(first)
    second = scheduler.submit(job(8000, held={warm: 8000}), 10.0)
    assert second is not None
    assert second.placement.prefill is first.placement.prefill
    assert second.placement.cached_tokens == 7999


def test_the_warm_worker_loses_when_its_wait_is_worth_more_than_the_prefix():
    workers = fleet(2, 1)
    busy(workers["p0"], 50_000)
    assert prefill_of(workers, job(8000, held={"p0": 4000})) == "p1"


def test_the_warm_worker_wins_when_its_wait_is_worth_less_than_the_prefix():
    workers = fleet(2, 1)
    busy(workers["p0"], 2000)
    assert prefill_of(workers, job(20_000, held={"p0": 16_000})) == "p0"


@pytest.mark.parametrize("idle", ["p0", "p1"])
def test_an_idle_worker_beats_a_busy_one_where_neither_holds_anything(idle):
    workers = fleet(2, 1)
    busy(workers["p1" if idle == "p0" else "p0"], 8000)
    assert prefill_of(workers, job(4000)) == idle


def test_equals_take_turns():
    scheduler = scheduler_of(fleet(4, 4))
    seen: Counter[str] = Counter()
    for i in range(40):
        lease = scheduler.submit(job(1000), float(i))
        assert lease is not None
        assert lease.placement.prefill is not None
        seen[lease.placement.prefill.id] += 1
        seen[lease.placement.decode.id] += 1
        scheduler.close(lease)
    assert set(seen.values()) == {10}


def test_a_worker_that_is_down_is_never_placed():
    workers = fleet(2, 2)
    workers["p0"].up = workers["d1"].up = False
    placement = placed(workers, job(8000, held={"p0": 8000, "d1": 8000}))
    assert placement.prefill is workers["p1"]
    assert placement.decode is workers["d0"]


def test_without_a_decode_worker_there_is_no_plan():
    assert place(job(), list(fleet(3, 0).values()), PRICES, 0.0) is None
    down = fleet(1, 1)
    down["d0"].up = False
    assert place(job(), list(down.values()), PRICES, 0.0) is None
    assert place(job(), [], PRICES, 0.0) is None


def test_without_a_prefill_worker_decode_serves_alone():
    placement = placed(fleet(0, 2), job())
    assert placement.prefill is None


def test_a_call_that_must_not_be_split_is_not():
    placement = placed(fleet(4, 2), job(50_000, decode_only=True, held={"p0": 50_000}))
    assert placement.prefill is None
    assert placement.cached_tokens == 0


def test_a_long_prompt_is_split_and_a_held_one_is_not():
    workers = fleet(2, 2)
    assert placed(workers, job(20_000)).prefill is not None
    held = placed(workers, job(20_000, held={"d1": 20_000}))
    assert (held.prefill, held.decode.id, held.cached_tokens) == (None, "d1", 19_999)


def test_excluded_prefill_workers_are_left_out_however_warm():
    call = job(8000, held={"p0": 8000}, excluded=frozenset({"p0"}))
    assert prefill_of(fleet(2, 1), call) == "p1"


def test_where_all_prefill_workers_are_excluded_decode_serves_alone():
    call = job(8000, excluded=frozenset({"p0", "p1"}))
    assert placed(fleet(2, 1), call).prefill is None


def test_excluded_decode_workers_are_the_last_resort():
    workers = fleet(1, 2)
    one = job(excluded=frozenset({"d0"}))
    assert placed(workers, one).decode.id == "d1"
    both = job(excluded=frozenset({"d0", "d1"}))
    assert placed(workers, both).decode.id in ("d0", "d1")


def test_decode_room_is_prompt_and_output_beside_what_is_promised():
    full = worker("d0", "decode", capacity_tokens=10_000)
    full.decode_jobs, full.decode_work_tokens = 1, 7000
    assert has_room(job(2900, 100), full)
    assert not has_room(job(2901, 100), full)
    full.capacity_tokens = None
    assert has_room(job(1_000_000, 100), full)


def test_an_idle_worker_takes_a_call_of_any_size():
    assert has_room(job(1_000_000, 1), worker("d0", "decode", capacity_tokens=100))


def test_the_wait_is_what_is_left_of_the_work():
    each = worker("p0", "prefill")
    assert prefill_wait_ms(each, 5.0) == 0.0
    each.prefill_jobs, each.prefill_work_ms, each.prefill_since_s = 1, 800.0, 5.0
    assert prefill_wait_ms(each, 5.0) == pytest.approx(800)
    assert prefill_wait_ms(each, 5.5) == pytest.approx(300)
    assert prefill_wait_ms(each, 9.0) == 0.0


def test_parts_sum_up_to_the_price():
    workers = fleet(3, 3)
    busy(workers["p1"], 4000)
    placement = placed(workers, job(9000, 500, held={"p0": 64, "d1": 128}))
    for half in placement.candidates:
        assert len(half) == 3
        for candidate in half:
            assert candidate[0] == pytest.approx(sum(candidate[3]))


loads = st.tuples(
    st.integers(0, 3),  # prefill jobs
    st.integers(0, 30_000),  # their tokens
    st.integers(0, 4),  # decode jobs
    st.integers(0, 40_000),  # their tokens
    st.integers(0, 100_000),  # recent tokens
    st.sampled_from([0.5, 1.0, 3.0]),
)


def random_fleet(data: Any, roles: list[Any]) -> dict[str, WorkerState]:
    workers = {}
    for i in range(data.draw(st.integers(1, 6))):
        role = data.draw(st.sampled_from(roles))
        each = worker(f"w{i}", role, capacity_tokens=50_000)
        prefills, prefill_tokens, decodes, decode_tokens, recent, weight = data.draw(loads)
        each.weight = weight
        if role != "decode":
            each.prefill_jobs, each.recent_prefill_tokens = prefills, recent
            each.prefill_work_ms = PRICES.prefill(prefill_tokens, 0) if prefills else 0.0
        if role != "prefill":
            each.decode_jobs, each.decode_work_tokens = decodes, decode_tokens if decodes else 0
        each.up = data.draw(st.integers(0, 5)) > 0
        each.last_placed = i
        workers[each.id] = each
    return workers


def random_job(data: Any, workers: dict[str, WorkerState]) -> Any:
    names = st.sampled_from(sorted(workers))
    return job(
        data.draw(st.integers(1, 40_000)),
        data.draw(st.integers(1, 4000)),
        held=data.draw(st.dictionaries(names, st.integers(0, 40_000), max_size=4)),
        decode_only=data.draw(st.integers(0, 4)) == 0,
        excluded=frozenset(data.draw(st.sets(names, max_size=2))),
    )


def check_cheapest(data: Any, roles: list[Any]) -> None:
    workers = random_fleet(data, roles)
    call = random_job(data, workers)
    placement = place(call, list(workers.values()), PRICES, 0.0)
    if placement is None:
        assert not [w for w in workers.values() if w.up and w.can_decode and has_room(call, w)]
        return
    first, second, alone = placement.candidates
    pairs = [p[0] + d[0] for p in first for d in second if p[2] is not d[2]]
    assert placement.price == pytest.approx(min(pairs + [each[0] for each in alone]))
    computes = placement.prefill or placement.decode
    assert placement.cached_tokens == call.cached_tokens(computes.id)
    assert placement.decode.up
    assert placement.decode.can_decode
    assert has_room(call, placement.decode)
    if placement.prefill is not None:
        assert placement.prefill.up
        assert placement.prefill.can_prefill
        assert placement.prefill.id not in call.excluded
        assert not call.decode_only


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_cheapest_of_all_plans_is_chosen(data):
    check_cheapest(data, ["prefill", "decode"])


def test_workers_of_both_roles_split_a_call_where_that_is_cheapest():
    workers = {name: worker(name, "both") for name in ("w0", "w1")}
    placement = placed(workers, job(20_000))
    first, second, alone = placement.candidates
    pairs = [p[0] + d[0] for p in first for d in second if p[2] is not d[2]]
    assert placement.price == pytest.approx(min(pairs + [each[0] for each in alone]))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_equal_books_give_equal_plans(data):
    workers = random_fleet(data, ["prefill", "decode"])
    call = random_job(data, workers)
    plans = [place(call, list(workers.values()), PRICES, 3.0) for _ in range(2)]
    assert plans[0] == plans[1]


class VirtualCluster:
    """Workers that prefill one call after the other, in virtual time, and keep all they saw."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.free_at_s: dict[str, float] = {}
        self.ends: list[tuple[float, int, Lease]] = []
        self.count = 0
        self.ttft_s: list[float] = []

    def arrive(self, at_s: float, call: Any) -> Lease:
        while self.ends and self.ends[0][0] <= at_s:
            end_s, _, lease = heapq.heappop(self.ends)
            self.scheduler.prefill_done(lease, end_s)
            self.scheduler.close(lease)
        found = self.scheduler.submit(call, at_s)
        assert found is not None
        assert found.placement.prefill is not None
        name = found.placement.prefill.id
        begin_s = max(at_s, self.free_at_s.get(name, 0.0))
        end_s = self.free_at_s[name] = begin_s + found.prefill_ms / 1000
        self.count += 1
        heapq.heappush(self.ends, (end_s, self.count, found))
        self.ttft_s.append(end_s - at_s)
        return found


def shared_prefix(prefix: int, calls: int, rate: float) -> tuple[Counter[str], list[float]]:
    """`calls` that share `prefix` tokens before 500 of their own; calls per worker, and waits."""
    cluster = VirtualCluster(scheduler_of(fleet(8, 8)))
    held: dict[str, int] = {}
    share: Counter[str] = Counter()
    for i in range(calls):
        lease = cluster.arrive(i / rate, job(prefix + 500, 10, held=dict(held)))
        assert lease.placement.prefill is not None
        held[lease.placement.prefill.id] = prefix
        share[lease.placement.prefill.id] += 1
    return share, cluster.ttft_s


def test_a_prefix_that_everybody_shares_gets_holders_on_all_workers_under_load():
    """2,000 shared tokens at a rate that one worker cannot take: nobody is left out."""
    share, _ = shared_prefix(prefix=2000, calls=800, rate=80)
    assert len(share) == 8
    assert min(share.values()) >= 0.06 * 800


def test_a_hot_prefix_gets_a_second_holder_before_its_first_is_full():
    share, waits = shared_prefix(prefix=4000, calls=300, rate=8)
    assert len(share) >= 2
    assert sorted(waits)[int(0.95 * len(waits))] < 1.5 * PRICES.prefill(4500, 0) / 1000


def test_a_rare_prefix_stays_where_it_is():
    """A conversation of ten turns on an idle fleet goes back to the worker that holds it."""
    cluster = VirtualCluster(scheduler_of(fleet(2, 2)))
    held: dict[str, int] = {}
    seen = set()
    for turn in range(10):
        size = 1000 * (turn + 1)
        lease = cluster.arrive(10.0 * turn, job(size, 10, held=dict(held)))
        assert lease.placement.prefill is not None
        seen.add(lease.placement.prefill.id)
        held[lease.placement.prefill.id] = size
    assert len(seen) == 1


def test_unique_prompts_spread_evenly():
    cluster = VirtualCluster(scheduler_of(fleet(4, 5)))
    prefills: Counter[str] = Counter()
    for i in range(400):
        lease = cluster.arrive(i * 0.1, job(1000 + 37 * (i % 50), 50))
        assert lease.placement.prefill is not None
        prefills[lease.placement.prefill.id] += lease.prefill_tokens
    assert max(prefills.values()) <= 1.1 * min(prefills.values())


def test_open_calls_spread_over_decode_workers():
    """1 prefill and 5 decode workers, 256 calls at once."""
    workers = fleet(1, 5)
    scheduler = scheduler_of(workers)
    for i in range(256):
        assert scheduler.submit(job(500 + i % 7, 200), i * 0.001) is not None
    running = [each.decode_jobs for each in workers.values() if each.can_decode]
    assert max(running) <= 1.3 * min(running)


def test_a_wedged_worker_costs_the_others_no_affinity():
    workers = fleet(4, 2)
    busy(workers["p3"], 2_000_000)
    for warm in ("p0", "p1", "p2"):
        assert prefill_of(workers, job(6000, held={warm: 5000})) == warm


def test_a_worker_that_comes_back_empty_does_not_draw_all_new_calls():
    """Its recent work is forgotten, its share of what follows stays within 1.5 of a fair one."""
    workers = fleet(4, 4)
    scheduler = scheduler_of(workers)
    cluster = VirtualCluster(scheduler)
    for i in range(200):
        cluster.arrive(i * 0.2, job(4000, 50))
    scheduler.remove_worker("p0")
    scheduler.add_worker(worker("p0", "prefill"))
    share: Counter[str] = Counter()
    for i in range(200):
        lease = cluster.arrive(40 + i * 0.2, job(4000, 50))
        assert lease.placement.prefill is not None
        share[lease.placement.prefill.id] += 1
    assert share["p0"] <= 1.5 * 200 / 4


def decode_shares(weights: dict[str, float], calls: int, running: int) -> dict[str, float]:
    """Tokens placed per decode pool (a worker's first letter), with `running` calls open."""
    scheduler = scheduler_of({"p": worker("p", "prefill")})
    for name, weight in weights.items():
        scheduler.add_worker(worker(name, "decode", pool=name[0], weight=weight))
    tokens: Counter[str] = Counter()
    leases: list[Lease] = []
    for i in range(calls):
        lease = scheduler.submit(job(1000, 300), float(i))
        assert lease is not None
        tokens[lease.placement.decode.pool] += lease.decode_tokens
        leases.append(lease)
        if len(leases) > running:
            scheduler.close(leases.pop(0))
    total = sum(tokens.values())
    return {pool: tokens[pool] / total for pool in sorted(tokens)}


def test_pools_of_equal_weight_share_equally():
    assert decode_shares({"a": 1, "b": 1}, 400, 64) == {"a": 0.5, "b": 0.5}


def test_a_pool_of_more_weight_gets_more_decode_work():
    shares = decode_shares({"a": 3, "b": 1}, 1000, 256)
    assert shares["a"] > 0.6
