"""The queue and the books: what is charged is what open leases hold, at every moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler import Job, Lease, QueueFull, Role, Scheduler, WorkerState
from scheduler.placement import prefill_wait_ms
from tests.scheduler.fleets import PRICES, fleet, job, scheduler_of, worker


def submitted(scheduler: Scheduler, call: Job, now_s: float = 0.0) -> Lease:
    lease = scheduler.submit(call, now_s)
    assert lease is not None
    return lease


def books(each: WorkerState) -> tuple[int, ...]:
    return (
        each.running,
        each.prefill_jobs,
        each.prefill_work_tokens,
        each.decode_jobs,
        each.decode_work_tokens,
    )


NOTHING = (0, 0, 0, 0, 0)


def take(scheduler: Scheduler, step: str, lease: Lease, now_s: float) -> None:
    """Move a lease: its prefill ends, its decode starts, or it is over."""
    if step == "prefill":
        scheduler.prefill_done(lease, now_s)
    elif step == "decode":
        scheduler.decode_started(lease, now_s)
    else:
        scheduler.close(lease)


def owed(each: WorkerState, leases: set[Lease]) -> tuple[int, ...]:
    """The sum of what `leases` hold on one worker."""
    mine = [x for x in leases if each in (x.placement.prefill, x.placement.decode)]
    prefills = [
        x
        for x in mine
        if x.phase == "prefill" and each is (x.placement.prefill or x.placement.decode)
    ]
    decodes = [x for x in mine if x.placement.decode is each]
    return (
        len({*prefills, *decodes}),
        len(prefills),
        sum(x.job.prompt_tokens - x.placement.cached_tokens for x in prefills),
        len(decodes),
        sum(x.job.prompt_tokens + x.job.expected_output_tokens for x in decodes),
    )


def test_a_placement_raises_the_work_of_its_workers():
    workers = fleet(1, 1)
    scheduler = scheduler_of(workers)
    submitted(scheduler, job(8000, 200, held={"p0": 3200}))
    assert books(workers["p0"]) == (1, 1, 4800, 0, 0)
    assert books(workers["d0"]) == (1, 0, 0, 1, 8200)
    assert workers["p0"].prefill_work_ms == pytest.approx(PRICES.prefill(4800, 3200))


@pytest.mark.parametrize("prompt", [1, 700, 30_000])
def test_prefill_work_rises_by_the_tokens_to_compute(prompt):
    """Placement after placement, all of them open."""
    workers = fleet(3, 1)
    scheduler = scheduler_of(workers)
    for i in range(12):
        held = {f"p{i % 3}": prompt // 2}
        before = {name: each.prefill_work_tokens for name, each in workers.items()}
        lease = submitted(scheduler, job(prompt, 10, held=held))
        computes = lease.placement.prefill or lease.placement.decode
        uncached = prompt - lease.job.cached_tokens(computes.id)
        assert computes.prefill_work_tokens == before[computes.id] + uncached


def test_the_prefill_charge_ends_with_prefill():
    workers = fleet(1, 1)
    scheduler = scheduler_of(workers)
    lease = submitted(scheduler, job(8000, 200))
    scheduler.prefill_done(lease, 1.0)
    assert books(workers["p0"]) == NOTHING  # while the call decodes elsewhere
    assert workers["p0"].prefill_work_ms == 0.0
    assert books(workers["d0"]) == (1, 0, 0, 1, 8200)
    scheduler.prefill_done(lease, 2.0)  # twice is once
    assert books(workers["p0"]) == NOTHING


def test_phases_go_forward_only():
    scheduler = scheduler_of(fleet(1, 1))
    lease = submitted(scheduler, job(8000))
    phases: list[str] = [lease.phase]
    for step in ("prefill", "decode", "prefill", "close", "decode", "prefill"):
        take(scheduler, step, lease, 1.0)
        phases.append(lease.phase)
    assert phases == ["prefill", "transfer", "decode", "decode", "closed", "closed", "closed"]


def test_decode_that_starts_ends_a_prefill_of_its_own():
    workers = fleet(0, 1)
    scheduler = scheduler_of(workers)
    lease = submitted(scheduler, job(8000, 200))
    assert books(workers["d0"]) == (1, 1, 8000, 1, 8200)
    scheduler.decode_started(lease, 1.0)
    assert books(workers["d0"]) == (1, 0, 0, 1, 8200)


@pytest.mark.parametrize("phase", ["prefill", "transfer", "decode"])
@pytest.mark.parametrize("prefillers", [0, 1])
def test_closing_twice_is_closing_once(phase, prefillers):
    workers = fleet(prefillers, 1)
    scheduler = scheduler_of(workers)
    other = submitted(scheduler, job(500, 20))
    lease = submitted(scheduler, job(8000, 200))
    if phase != "prefill":
        scheduler.prefill_done(lease, 1.0)
    if phase == "decode":
        scheduler.decode_started(lease, 1.0)
    scheduler.close(lease)
    scheduler.close(lease)
    assert scheduler.leases == {other}
    for each in workers.values():
        assert books(each) == owed(each, {other})


def test_calls_wait_for_decode_room_in_their_order():
    workers = fleet(1, 1, capacity_tokens=10_000)
    scheduler = scheduler_of(workers)
    running = submitted(scheduler, job(8000, 1000))
    large, small = job(5000, 1000, id="large"), job(10, 10, id="small")
    assert scheduler.submit(large, 0.0) is None
    # There would be room for the small one, but it came later.
    assert scheduler.submit(small, 0.0) is None
    assert scheduler.depth == 2
    assert list(scheduler.place_waiting(1.0)) == []
    scheduler.close(running)
    assert [lease.job.id for lease in scheduler.place_waiting(2.0)] == ["large", "small"]
    assert scheduler.depth == 0


def test_a_waiting_job_is_brought_up_to_date_when_its_turn_comes():
    """The second is refreshed after the first was placed; the one without room, each time."""
    workers = fleet(2, 1, capacity_tokens=25_000)
    scheduler = scheduler_of(workers)
    running = submitted(scheduler, job(20_000, 1000, id="running"))
    for name in ("first", "second", "third"):
        assert scheduler.submit(job(10_000, 100, id=name), 0.0) is None
    held: dict[str, int] = {}
    refreshed: list[str] = []

    def refresh(call: Job) -> Job:
        refreshed.append(call.id)
        return replace(call, held_tokens=dict(held))

    scheduler.close(running)
    leases = []
    for lease in scheduler.place_waiting(1.0, refresh):
        assert lease.placement.prefill is not None
        held[lease.placement.prefill.id] = 9600
        leases.append(lease)
    first, second = leases
    assert refreshed == ["first", "second", "third"]
    assert (first.placement.cached_tokens, second.placement.cached_tokens) == (0, 9600)
    assert second.placement.prefill is first.placement.prefill
    assert second.prefill_tokens == 400
    assert scheduler.depth == 1
    assert list(scheduler.place_waiting(2.0, refresh)) == []
    assert refreshed[3:] == ["third"]


def test_placing_goes_no_further_than_it_is_taken():
    workers = fleet(0, 1)
    workers["d0"].up = False
    scheduler = scheduler_of(workers)
    for name in ("first", "second"):
        assert scheduler.submit(job(id=name), 0.0) is None
    workers["d0"].up = True
    placing = scheduler.place_waiting(1.0)
    assert next(placing).job.id == "first"
    assert (scheduler.depth, len(scheduler.leases)) == (1, 1)
    assert next(placing).job.id == "second"
    assert (scheduler.depth, len(scheduler.leases)) == (0, 2)


def test_prefill_is_not_spent_before_there_is_room_to_decode():
    workers = fleet(1, 1, capacity_tokens=10_000)
    scheduler = scheduler_of(workers)
    lease = submitted(scheduler, job(8000, 1000))
    scheduler.prefill_done(lease, 1.0)
    assert scheduler.submit(job(5000, 1000), 1.0) is None
    assert books(workers["p0"]) == NOTHING


def test_reserved_room_is_that_of_prompt_and_output():
    scheduler = scheduler_of(fleet(1, 1, capacity_tokens=10_000))
    submitted(scheduler, job(4000, 1000))
    submitted(scheduler, job(4000, 1000))
    assert scheduler.submit(job(1, 1), 0.0) is None


def test_a_full_queue_refuses():
    workers = fleet(1, 1, capacity_tokens=1000)
    scheduler = scheduler_of(workers, max_waiting=2)
    submitted(scheduler, job(900, 100))
    for _ in range(2):
        assert scheduler.submit(job(900, 100), 0.0) is None
    with pytest.raises(QueueFull):
        scheduler.submit(job(900, 100, id="refused"), 0.0)
    assert scheduler.depth == 2


def test_without_a_queue_only_what_has_room_is_taken():
    scheduler = scheduler_of(fleet(1, 1, capacity_tokens=1000), max_waiting=0)
    submitted(scheduler, job(900, 100))
    with pytest.raises(QueueFull):
        scheduler.submit(job(900, 100), 0.0)


def test_a_job_that_is_withdrawn_is_not_placed():
    scheduler = scheduler_of(fleet(1, 1, capacity_tokens=1000))
    running = submitted(scheduler, job(900, 100, id="running"))
    for name in ("first", "second"):
        assert scheduler.submit(job(900, 100, id=name), 0.0) is None
    scheduler.withdraw("first")
    scheduler.withdraw("running")  # does not wait: left alone
    scheduler.withdraw("unheard of")
    assert scheduler.depth == 1
    scheduler.close(running)
    assert [lease.job.id for lease in scheduler.place_waiting(1.0)] == ["second"]


def test_waiting_jobs_are_placed_when_a_worker_comes_up():
    workers = fleet(1, 1)
    workers["d0"].up = False
    scheduler = scheduler_of(workers)
    assert not scheduler.servable()
    assert scheduler.submit(job(), 0.0) is None
    workers["d0"].up = True
    assert scheduler.servable()
    assert len(list(scheduler.place_waiting(1.0))) == 1


@pytest.mark.parametrize(
    ("workers", "servable"),
    [
        ([], False),
        ([worker("p", "prefill")], False),
        ([worker("d", "decode", up=False)], False),
        ([worker("d", "decode")], True),
        ([worker("b", "both")], True),
    ],
)
def test_servable_needs_a_decode_worker_that_is_up(workers, servable):
    assert scheduler_of({each.id: each for each in workers}).servable() is servable


def test_a_lease_outlives_its_workers():
    workers = fleet(1, 1)
    scheduler = scheduler_of(workers)
    lease = submitted(scheduler, job(8000, 200))
    for name in workers:
        scheduler.remove_worker(name)
    again = worker("p0", "prefill")
    scheduler.add_worker(again)
    scheduler.prefill_done(lease, 1.0)
    scheduler.close(lease)
    assert books(workers["p0"]) == books(workers["d0"]) == books(again) == NOTHING
    assert not scheduler.leases


def test_removing_an_unknown_worker_changes_nothing():
    scheduler = scheduler_of(fleet(1, 1))
    scheduler.remove_worker("unheard of")
    assert sorted(scheduler.workers) == ["d0", "p0"]


def test_a_cancelled_call_takes_no_progress_from_the_others():
    """Work of 1 s is 0.9 s old when the call behind it is cancelled: 0.1 s is left."""
    workers = fleet(1, 1)
    scheduler = scheduler_of(workers)
    submitted(scheduler, job(8000), 0.0)
    left_ms = workers["p0"].prefill_work_ms - 900
    behind = submitted(scheduler, job(8000), 0.0)
    scheduler.close(behind)
    assert prefill_wait_ms(workers["p0"], 0.9) <= left_ms + 1


def test_the_wait_shrinks_while_a_worker_computes():
    workers = fleet(1, 1)
    scheduler = scheduler_of(workers)
    lease = submitted(scheduler, job(8000), 100.0)
    whole_ms = prefill_wait_ms(workers["p0"], 100.0)
    assert prefill_wait_ms(workers["p0"], 100.4) == pytest.approx(whole_ms - 400)
    scheduler.prefill_done(lease, 101.0)
    assert prefill_wait_ms(workers["p0"], 101.0) == 0.0


def story(seed: int) -> list[tuple[str | None, str, float]]:
    """A fixed course of events; which workers it led to, at which price."""
    scheduler = scheduler_of(fleet(5, 5, capacity_tokens=200_000))
    told = []
    leases: list[Lease] = []
    for i in range(200):
        prompt = (i * 7919 + seed * 104_729) % 9000 + 1
        held = {f"p{prompt % 5}": prompt // 2}
        lease = scheduler.submit(job(prompt, prompt % 300 + 1, held=held), i * 0.05)
        if lease is not None:
            leases.append(lease)
        if len(leases) > 20:
            scheduler.close(leases.pop(i % 20))
            leases += scheduler.place_waiting(i * 0.05)
        last = leases[-1].placement
        told.append((last.prefill.id if last.prefill else None, last.decode.id, last.price))
    return told


def test_equal_courses_of_events_lead_to_equal_placements():
    assert story(1) == story(1)
    assert story(1) != story(2)


ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "b": "both"}


class RandomLife(RuleBasedStateMachine):
    """Calls come, move on and leave while workers flap, go and come back."""

    names = st.sampled_from(["p0", "p1", "d0", "d1", "b0"])

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(PRICES, max_waiting=4)
        self.every: list[WorkerState] = []
        self.open: set[Lease] = set()
        self.closed: list[Lease] = []
        self.queue: list[Job] = []
        self.now_s = 0.0
        for name in ("p0", "p1", "d0", "d1"):
            self.add(name, 20_000)

    def add(self, name: str, capacity: int | None) -> None:
        each = worker(name, ROLES[name[0]], capacity_tokens=capacity)
        self.every.append(each)
        self.scheduler.add_worker(each)

    def pick(self, data: st.DataObject) -> Lease:
        ordered = sorted(self.open, key=lambda lease: lease.job.id)
        return data.draw(st.sampled_from(ordered))

    @rule(
        prompt=st.integers(1, 12_000),
        output=st.integers(1, 4000),
        held=st.dictionaries(names, st.integers(0, 12_000), max_size=3),
        excluded=st.frozensets(names, max_size=2),
        decode_only=st.booleans(),
    )
    def submit(self, prompt, output, held, excluded, decode_only):
        call = job(prompt, output, held=held, excluded=excluded, decode_only=decode_only)
        full = len(self.queue) == 4
        try:
            lease = self.scheduler.submit(call, self.now_s)
        except QueueFull:
            assert full
            return
        if lease is None:
            assert not full
            self.queue.append(call)
        else:
            assert not self.queue  # nobody overtakes those who wait
            self.open.add(lease)

    @rule()
    def place_waiting(self):
        for lease in self.scheduler.place_waiting(self.now_s):
            assert lease.job is self.queue.pop(0)
            self.open.add(lease)

    @rule(data=st.data())
    @precondition(lambda self: self.queue)
    def withdraw(self, data):
        call = data.draw(st.sampled_from(self.queue))
        self.scheduler.withdraw(call.id)
        self.queue.remove(call)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def prefill_done(self, data):
        self.scheduler.prefill_done(self.pick(data), self.now_s)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def decode_started(self, data):
        self.scheduler.decode_started(self.pick(data), self.now_s)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def close(self, data):
        lease = self.pick(data)
        self.scheduler.close(lease)
        self.open.discard(lease)
        self.closed.append(lease)

    @rule(data=st.data(), step=st.sampled_from(["close", "prefill", "decode"]))
    @precondition(lambda self: self.closed)
    def once_more(self, data, step):
        take(self.scheduler, step, data.draw(st.sampled_from(self.closed)), self.now_s)

    @rule(name=names)
    def flap(self, name):
        if name in self.scheduler.workers:
            self.scheduler.workers[name].up ^= True

    @rule(name=names)
    def remove(self, name):
        self.scheduler.remove_worker(name)

    @rule(name=names, capacity=st.none() | st.integers(1, 30_000))
    def add_again(self, name, capacity):
        if name not in self.scheduler.workers:
            self.add(name, capacity)

    @rule(step_s=st.floats(0, 10))
    def time_passes(self, step_s):
        self.now_s += step_s

    @invariant()
    def the_books_are_the_sum_of_open_leases(self):
        assert self.scheduler.leases == self.open
        assert self.scheduler.depth == len(self.queue)
        for each in self.every:
            assert books(each) == owed(each, self.open)
            assert min(books(each)) >= 0
            assert each.prefill_work_ms >= -1e-6
            assert prefill_wait_ms(each, self.now_s) >= 0

    def teardown(self):
        for lease in list(self.open):
            self.scheduler.close(lease)
        assert not self.scheduler.leases
        for each in self.every:
            assert books(each) == NOTHING
            assert each.prefill_work_ms == 0.0


TestRandomLife = RandomLife.TestCase
TestRandomLife.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
