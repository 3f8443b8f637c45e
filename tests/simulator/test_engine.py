"""The engine core: its time is the profile's, its cache is exact, and it loses nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import (
    Engine,
    EngineDeadError,
    Heartbeat,
    Pull,
    Reason,
    Release,
    RemoteKv,
    Request,
    State,
)
from simulator.hashing import chain_blocks
from simulator.profile import DecodeCost, PrefillCost, Profile, TransferCost
from simulator.text import Answer

PROFILE = Profile(
    name="test",
    prefill=PrefillCost(a=0.010, b=1e-4, d=1e-9, e=1e-7),
    decode=DecodeCost(a=0.005, b=1e-4, d=1e-8),
    transfer=TransferCost(latency_s=0.002, bytes_per_s=1e9, handshake_s=0.0),
    kv_bytes_per_token=1000,
    capacity_tokens=16_000,
    max_model_len=8_000,
    max_running=8,
    max_batched_tokens=512,
)
BLOCK = 16


def engine(**limits):
    options = {
        key: limits.pop(key) for key in ("lease_s", "recompute_failed_loads") if key in limits
    }
    name = limits.pop("engine_id", "e")
    return Engine(replace(PROFILE, **limits), engine_id=name, block_tokens=BLOCK, **options)


def prompt(length, kind=0):
    """`length` tokens; prompts of one kind are prefixes of each other."""
    return np.arange(length, dtype=np.uint32) + np.uint32(1_000_000 * kind)


def text(sequence):
    return Answer(sequence.key, sequence.request.choice).text(sequence.generated)


def run(one, until_s=None):
    """Run an engine step by step until it rests, or until a time."""
    while (due_s := one.next_event_s()) is not None and (until_s is None or due_s <= until_s):
        one.advance(due_s)
        if until_s is None and not one.running and not one.waiting:
            break


# -- time ---------------------------------------------------------------------------------------


def test_a_cold_prompt_takes_the_profiles_time():
    one = engine(max_batched_tokens=8192)
    sequence = one.submit(Request("a", prompt(5000), max_tokens=1), 3.0)
    run(one)
    assert sequence.first_token_s - 3.0 == pytest.approx(PROFILE.prefill.seconds(5000, 0))


def test_chunks_take_the_time_of_their_parts():
    one = engine(max_batched_tokens=512)
    sequence = one.submit(Request("a", prompt(1200), max_tokens=1), 0.0)
    run(one)
    parts = [(512, 0), (512, 512), (176, 1024)]
    expected = sum(PROFILE.prefill.seconds(*part) for part in parts)
    assert sequence.first_token_s == pytest.approx(expected)
    assert one.totals.steps == 3


def test_a_warm_prompt_takes_the_time_of_what_is_not_cached():
    one = engine()
    one.submit(Request("a", prompt(500), max_tokens=1), 0.0)
    run(one)
    second = one.submit(Request("b", prompt(400), max_tokens=1), 10.0)
    run(one)
    assert second.cached_tokens == 384
    assert second.first_token_s - 10 == pytest.approx(PROFILE.prefill.seconds(16, 384))


def test_decode_takes_the_profiles_time():
    one = engine()
    group = [one.submit(Request(f"r{i}", prompt(100, i), max_tokens=50), 0.0) for i in range(4)]
    while not all(s.generated for s in group):
        one.advance(one.next_event_s())
    start_s, contexts = one.now_s, []
    for _ in range(20):
        contexts.append(sum(s.computed for s in group) / 4)
        one.advance(one.next_event_s())
    expected = sum(PROFILE.decode.seconds(4, context) for context in contexts)
    assert one.now_s - start_s == pytest.approx(expected)


def test_prefill_slows_decode_that_runs_beside_it():
    one = engine(max_batched_tokens=8192)
    early = one.submit(Request("a", prompt(100), max_tokens=1000), 0.0)
    one.advance(1.0)
    before = early.generated
    one.submit(Request("b", prompt(4000, 1), max_tokens=1), 1.0)
    one.advance(1.0 + PROFILE.prefill.seconds(4000, 0) / 2)
    assert early.generated - before <= 1


def test_pace_scales_time():
    slow = engine()
    slow.pace = 4.0
    sequence = slow.submit(Request("a", prompt(500), max_tokens=1), 0.0)
    run(slow)
    assert sequence.finished_s == pytest.approx(4 * PROFILE.prefill.seconds(500, 0))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 80), st.integers(0, 400)), max_size=12),
    st.integers(600, 6000),
)
def test_one_long_advance_equals_many_short_ones(calls, capacity):
    requests = [
        Request(f"r{i}", prompt(length, i % 3), max_tokens=output)
        for i, (length, output, _) in enumerate(calls)
    ]
    ends = []
    for long in (False, True):
        one = engine(capacity_tokens=max(capacity, 1000))
        now_s, sequences = 0.0, []
        for request, (_, _, gap_ms) in zip(requests, calls, strict=True):
            now_s += gap_ms / 1e3
            if not long:
                run(one, now_s)
            sequences.append(one.submit(request, now_s))
        if long:
            one.advance(1e6)
        else:
            run(one)
        ends.append([(s.first_token_s, s.finished_s, s.cached_tokens) for s in sequences])
    assert ends[0] == [pytest.approx(row) for row in ends[1]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=12))
def test_virtual_time_sees_every_end_when_it_happens(calls):
    one = engine()
    for i, (length, output) in enumerate(calls):
        one.submit(Request(f"r{i}", prompt(length, i), max_tokens=output), 0.0)
    while (due_s := one.next_change_s()) is not None:
        for sequence in one.advance(due_s).sequences:
            if sequence.finished_s is not None:
                assert sequence.finished_s == pytest.approx(due_s)
    assert one.running == one.waiting == 0


# -- the batch ----------------------------------------------------------------------------------


def test_first_come_first_served_within_the_batch_limit():
    one = engine(max_running=2)
    sequences = [one.submit(Request(f"r{i}", prompt(50, i), max_tokens=20), 0.0) for i in range(6)]
    one.advance(0.02)
    assert (one.running, one.waiting) == (2, 4)
    run(one)
    starts = [s.scheduled_s for s in sequences]
    assert starts == sorted(starts)
    assert starts[0] < starts[2] < starts[4]


def test_a_long_prompt_does_not_stop_those_that_decode():
    one = engine(max_batched_tokens=64)
    early = one.submit(Request("a", prompt(16), max_tokens=200), 0.0)
    one.advance(0.1)
    one.submit(Request("b", prompt(2000, 1), max_tokens=1), 0.1)
    before = early.generated
    one.advance(0.4)
    assert early.generated > before + 5


def test_the_last_prompt_token_is_always_computed():
    one = engine()
    for name, length in (("a", 64), ("b", 64), ("c", 65)):
        sequence = one.submit(Request(name, prompt(length), max_tokens=1), one.now_s)
        run(one)
    first_again = one.submit(Request("d", prompt(64), max_tokens=1), one.now_s)
    run(one)
    assert first_again.cached_tokens == 48
    assert sequence.cached_tokens == 64


def test_salts_do_not_share_a_cache():
    one = engine()
    cached = []
    for i, salt in enumerate([None, "a", "b", "a", None]):
        sequence = one.submit(Request(f"r{i}", prompt(65), max_tokens=1, salt=salt), one.now_s)
        run(one)
        cached.append(sequence.cached_tokens)
    assert cached == [0, 0, 0, 64, 64]


def test_the_next_turn_finds_the_answer_in_the_cache():
    one = engine()
    first = one.submit(Request("a", prompt(100), max_tokens=60), 0.0)
    run(one)
    answer = np.array(Answer(first.key).token_ids(0, 60), dtype=np.uint32)
    turn = np.concatenate([prompt(100), answer, prompt(30, 9)])
    second = one.submit(Request("b", turn, max_tokens=1), one.now_s)
    run(one)
    assert second.cached_tokens == 144  # whole blocks of 159 computed tokens: the last has no KV


def test_siblings_that_come_together_share_what_the_first_computes():
    one = engine(max_batched_tokens=4096)
    group = [one.submit(Request(f"r{i}", prompt(321), max_tokens=1), 0.0) for i in range(5)]
    run(one)
    assert sorted(s.cached_tokens for s in group) == [0, 320, 320, 320, 320]
    assert one.totals.computed == 321 + 4


def test_an_answer_without_a_limit_stops_by_itself():
    one = engine()
    sequence = one.submit(Request("a", prompt(40)), 0.0)
    run(one)
    assert sequence.reason is Reason.STOP
    assert 64 <= sequence.generated <= 575


def test_cap_ends_an_answer_early():
    one = engine()
    sequence = one.submit(Request("a", prompt(40), max_tokens=100), 0.0)
    one.advance(0.1)
    one.cap(sequence, sequence.generated + 5, 0.1)
    run(one)
    assert (sequence.reason, sequence.generated) == (Reason.STOP, sequence.limit)
    late = one.submit(Request("b", prompt(40), max_tokens=10), one.now_s)
    run(one)
    one.cap(late, 4, one.now_s)
    assert (late.reason, late.generated) == (Reason.STOP, 4)
    one.blocks.check(one.holders())


@pytest.mark.parametrize("length", [0, 8000, 9000])
def test_a_prompt_that_can_never_run_is_refused(length):
    with pytest.raises(ValueError, match="prompt"):
        engine().submit(Request("a", prompt(length), max_tokens=1), 0.0)


def test_a_request_id_is_used_once_at_a_time():
    one = engine()
    one.submit(Request("a", prompt(10), max_tokens=5), 0.0)
    with pytest.raises(ValueError, match="already running"):
        one.submit(Request("a", prompt(10), max_tokens=5), 0.0)


# -- room ---------------------------------------------------------------------------------------


def test_preemption_costs_time_and_no_token():
    lengths = [(300, 120), (300, 120), (300, 120)]
    tight, wide = engine(capacity_tokens=1008, max_model_len=900), engine()
    texts = []
    for one in (tight, wide):
        group = [
            one.submit(Request(f"r{i}", prompt(n, i), max_tokens=out), 0.0)
            for i, (n, out) in enumerate(lengths)
        ]
        run(one)
        texts.append([text(s) for s in group])
        assert all(s.generated == 120 for s in group)
        one.blocks.check(one.holders())
    assert tight.totals.preemptions > 0
    assert wide.totals.preemptions == 0
    assert texts[0] == texts[1]
    assert tight.now_s > wide.now_s


def test_cached_blocks_are_evicted_least_recent_first():
    one = engine(capacity_tokens=1600, max_model_len=1600)
    for kind in (0, 1, 2):
        one.submit(Request(f"r{kind}", prompt(480, kind), max_tokens=1), one.now_s)
        run(one)
    again = one.submit(Request("again", prompt(480, 0), max_tokens=1), one.now_s)
    run(one)
    assert again.cached_tokens == 464
    one.submit(Request("new", prompt(480, 5), max_tokens=1), one.now_s)
    run(one)
    kept = [
        len(one.blocks.match(chain_blocks(prompt(480, kind), BLOCK, 0).hashes, 30))
        for kind in (0, 1, 2)
    ]
    # The last block of the first prompt was not reused: its last token is computed anew.
    assert kept == [29, 11, 30]


def test_reset_forgets_the_cache_unless_something_runs():
    one = engine()
    one.submit(Request("a", prompt(100), max_tokens=50), 0.0)
    assert not one.reset_cache(0.01)
    run(one)
    assert one.reset_cache(one.now_s)
    again = one.submit(Request("b", prompt(100), max_tokens=1), one.now_s)
    run(one)
    assert again.cached_tokens == 0


# -- prefill here, decode there -----------------------------------------------------------------


class Pair:
    """A prefill and a decode engine that reach each other at once."""

    def __init__(self, **limits):
        self.p = engine(engine_id="p", **limits)
        self.d = engine(engine_id="d", **limits)
        self.reachable = True
        self.heartbeats = 0

    def tick(self, now_s):
        self.p.advance(now_s)
        while True:
            actions = self.d.advance(now_s).actions
            for action in actions:
                self.act(action, now_s)
            if not self.d.has_news:
                return

    def act(self, action, now_s):
        if isinstance(action, Pull):
            name = action.sequence.request.id
            if self.reachable:
                self.d.pulled(name, self.p.contents.read(action.remote.blocks), now_s)
            else:
                self.d.pull_failed(name, now_s)
        elif isinstance(action, Release):
            self.p.release_pin(action.remote.request_id, now_s)
        elif isinstance(action, Heartbeat):
            self.heartbeats += 1
            self.p.extend_pin(action.remote.request_id, now_s)

    def run(self):
        while True:
            due = [s for s in (self.p.next_event_s(), self.d.next_event_s()) if s is not None]
            if not due or not (self.d.running or self.d.waiting or self.p.running):
                return
            self.tick(min(due))

    def prefill(self, name, tokens, now_s=0.0):
        sequence = self.p.submit(Request(name, tokens, max_tokens=1, keep_kv=True), now_s)
        run(self.p)
        return sequence

    def claim(self, sequence):
        blocks = tuple(sequence.blocks)
        return RemoteKv("p", sequence.request.id, blocks, cached_tokens=sequence.cached_tokens)

    def decode(self, name, tokens, remote, now_s, max_tokens=20):
        sequence = self.d.submit(Request(name, tokens, max_tokens=max_tokens, remote=remote), now_s)
        self.tick(now_s)
        self.run()
        return sequence

    def check(self):
        for one in (self.p, self.d):
            one.blocks.check(one.holders())


def plain_text(tokens, max_tokens=20):
    one = engine()
    sequence = one.submit(Request("plain", tokens, max_tokens=max_tokens), 0.0)
    run(one)
    return text(sequence)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(0, 3), st.integers(1, 40)),
        min_size=1,
        max_size=8,
    )
)
def test_text_over_two_engines_is_that_of_one(calls):
    pair = Pair()
    for i, (length, kind, output) in enumerate(calls):
        tokens = prompt(length, kind)
        now_s = max(pair.p.now_s, pair.d.now_s)
        kept = pair.prefill(f"p{i}", tokens, now_s)
        assert pair.p.pins
        now_s = max(pair.p.now_s, pair.d.now_s)
        answer = pair.decode(f"d{i}", tokens, pair.claim(kept), now_s, output)
        assert text(answer) == plain_text(tokens, output)
        assert answer.cached_tokens == kept.cached_tokens
        assert not pair.p.pins
        pair.check()
    assert pair.d.totals.computed == len(calls)  # the last token of each prompt, nothing more


def test_only_what_the_decode_engine_lacks_moves():
    pair = Pair()
    first = pair.prefill("p0", prompt(320))
    pair.decode("d0", prompt(320), pair.claim(first), pair.p.now_s)
    moved = pair.d.totals.transfer_bytes
    assert moved == 320 * PROFILE.kv_bytes_per_token
    second = pair.prefill("p1", prompt(400), pair.d.now_s)
    answer = pair.decode("d1", prompt(400), pair.claim(second), pair.p.now_s)
    assert pair.d.totals.transfer_bytes - moved == (400 - 320) * PROFILE.kv_bytes_per_token
    assert answer.external_tokens == 80
    assert answer.cached_tokens == 320


def test_a_transfer_takes_latency_and_bandwidth_and_shares_the_link():
    pair = Pair()
    kept = [pair.prefill(f"p{i}", prompt(480, i), pair.p.now_s) for i in range(2)]
    now_s = pair.p.now_s
    for i, sequence in enumerate(kept):
        pair.d.submit(
            Request(f"d{i}", prompt(480, i), max_tokens=1, remote=pair.claim(sequence)), now_s
        )
    pair.tick(now_s)
    pair.run()
    part_s = 480 * PROFILE.kv_bytes_per_token / PROFILE.transfer.bytes_per_s
    assert pair.d.totals.transfer_s == pytest.approx(2 * PROFILE.transfer.latency_s + 3 * part_s)


def test_a_lease_ends_and_is_counted():
    pair = Pair(lease_s=30.0)
    kept = pair.prefill("p0", prompt(100))
    end_s = kept.finished_s + 30.0
    pair.p.advance(end_s - 0.01)
    assert pair.p.pins
    pair.p.advance(end_s + 0.01)
    assert not pair.p.pins
    assert pair.p.totals.expired == 1
    pair.check()


def test_heartbeats_keep_a_lease_while_the_decode_engine_is_busy():
    pair = Pair(lease_s=3.0, max_running=1)
    pair.d.submit(Request("long", prompt(50, 7), max_tokens=3000), 0.0)
    kept = pair.prefill("p0", prompt(100))
    now_s = pair.p.now_s
    answer = pair.decode("d0", prompt(100), pair.claim(kept), now_s)
    assert pair.heartbeats > 10
    assert answer.scheduled_s - now_s > 10
    assert text(answer) == plain_text(prompt(100))
    assert pair.p.totals.expired == 0


def test_a_claim_after_the_lease_on_reused_blocks_is_a_wrong_text():
    pair = Pair(lease_s=1.0, capacity_tokens=960, max_model_len=900)
    kept = pair.prefill("p0", prompt(480))
    claim = pair.claim(kept)
    pair.p.submit(Request("other", prompt(900, 4)[:890], max_tokens=1), kept.finished_s + 2)
    run(pair.p)
    answer = pair.decode("d0", prompt(480), claim, pair.p.now_s)
    assert answer.reason is Reason.LENGTH
    assert text(answer) != plain_text(prompt(480))
    # The wrong KV is cached under the right prompt's hashes, and is wrong for the next as well.
    again = pair.d.submit(Request("again", prompt(480), max_tokens=20), pair.d.now_s)
    pair.run()
    assert again.cached_tokens > 0
    assert text(again) != plain_text(prompt(480))
    pair.check()


def test_a_claim_after_the_lease_on_untouched_blocks_is_right():
    pair = Pair(lease_s=1.0)
    kept = pair.prefill("p0", prompt(480))
    claim = pair.claim(kept)
    pair.p.advance(kept.finished_s + 5)
    answer = pair.decode("d0", prompt(480), claim, pair.p.now_s)
    assert text(answer) == plain_text(prompt(480))
    assert pair.p.totals.late_releases == 1


def test_another_prompts_claim_is_a_wrong_text():
    pair = Pair()
    kept = pair.prefill("p0", prompt(300, 1))
    answer = pair.decode("d0", prompt(300, 2), pair.claim(kept), pair.p.now_s)
    assert text(answer) not in (plain_text(prompt(300, 1)), plain_text(prompt(300, 2)))


def test_a_failed_load_fails_the_request():
    pair = Pair()
    pair.reachable = False
    kept = pair.prefill("p0", prompt(300))
    now_s = pair.p.now_s
    answer = pair.decode("d0", prompt(300), pair.claim(kept), now_s)
    assert (answer.reason, answer.generated) == (Reason.ERROR, 0)
    assert answer.finished_s - now_s == pytest.approx(4.5)
    pair.check()


def test_a_failed_load_is_recomputed_under_that_policy():
    pair = Pair(recompute_failed_loads=True)
    pair.reachable = False
    kept = pair.prefill("p0", prompt(300))
    answer = pair.decode("d0", prompt(300), pair.claim(kept), pair.p.now_s)
    assert text(answer) == plain_text(prompt(300))
    assert answer.cached_tokens == 0
    assert pair.d.totals.computed == 300
    pair.check()


def test_an_abort_before_the_load_frees_the_prefill_engine():
    pair = Pair(max_running=1)
    pair.d.submit(Request("long", prompt(50, 7), max_tokens=3000), 0.0)
    kept = pair.prefill("p0", prompt(100))
    now_s = pair.p.now_s
    pair.d.submit(Request("d0", prompt(100), max_tokens=5, remote=pair.claim(kept)), now_s)
    pair.tick(now_s)
    assert pair.p.pins
    pair.d.abort("d0", now_s + 0.1)
    pair.tick(now_s + 0.1)
    assert not pair.p.pins
    assert pair.p.totals.expired == 0
    pair.check()


def test_a_malformed_claim_hangs_and_its_abort_kills_the_engine():
    one = engine()
    other = one.submit(Request("other", prompt(50), max_tokens=500), 0.0)
    hung = one.submit(Request("a", prompt(50, 1), max_tokens=5, remote=RemoteKv(None, "", ())), 0.0)
    one.advance(1.0)
    assert hung.state is State.PULLING
    one.abort("a", 1.0)
    assert one.dead
    assert other.reason is Reason.ERROR
    with pytest.raises(EngineDeadError):
        one.submit(Request("b", prompt(5), max_tokens=1), 2.0)


# -- nothing is lost ----------------------------------------------------------------------------

operations = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "keep", "claim", "abort", "wait", "wait", "release"]),
        st.integers(1, 500),
        st.integers(0, 3),
        st.integers(1, 60),
    ),
    max_size=40,
)


class Random:
    """A pair of engines that things happen to."""

    def __init__(self, pair):
        self.pair = pair
        self.now_s = 0.0
        self.kept = []
        self.known = []

    def submit(self, size, kind, output):
        one = self.pair.p if kind == 0 else self.pair.d
        self.start(one, Request(self.name(), prompt(size, kind), output))

    def keep(self, size, kind, output):
        request = Request(self.name(), prompt(size, kind), 1, keep_kv=True)
        self.kept.append(self.start(self.pair.p, request))

    def claim(self, size, kind, output):
        chosen = self.kept[size % len(self.kept)] if self.kept else None
        if chosen is not None and chosen.blocks:
            claim = self.pair.claim(chosen)
            request = Request(self.name(), chosen.request.tokens, output, remote=claim)
            self.start(self.pair.d, request)

    def abort(self, size, kind, output):
        if self.known:
            one, name = self.known[size % len(self.known)]
            one.abort(name, self.now_s)

    def release(self, size, kind, output):
        if self.kept:
            self.pair.p.release_pin(self.kept[size % len(self.kept)].request.id, self.now_s)

    def wait(self, size, kind, output):
        self.now_s += size / 1000

    def name(self):
        return f"r{len(self.known)}"

    def start(self, one, request):
        self.known.append((one, request.id))
        return one.submit(request, self.now_s)

    def drain(self):
        for _ in range(5000):
            due = [s for s in (self.pair.p.next_event_s(), self.pair.d.next_event_s()) if s]
            if not due:
                return
            self.pair.tick(min(due))


@settings(max_examples=200, deadline=None)
@given(operations, st.booleans(), st.integers(0, 3))
def test_no_block_is_lost_or_freed_twice_whatever_happens(steps, recompute, cut_off_every):
    limits = {"capacity_tokens": 1600, "max_model_len": 700, "max_running": 4, "lease_s": 0.5}
    pair = Pair(**limits, recompute_failed_loads=recompute)
    world = Random(pair)
    for i, (what, size, kind, output) in enumerate(steps):
        pair.reachable = not cut_off_every or i % (cut_off_every + 1) != 0
        getattr(world, what)(size, kind, output)
        pair.tick(world.now_s)
        pair.check()
    world.drain()
    pair.check()
    for one in (pair.p, pair.d):
        assert (one.running, one.waiting, one.pulling) == (0, 0, 0)
        assert not one.pins
        assert one.blocks.held == 0
