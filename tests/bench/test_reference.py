from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import reference, traces
from bench.traces import Row

# Token hit rates, in percent, published for these traces with 2 and 4 workers of 1,048,576 tokens.
PUBLISHED = {
    "agent_coding": (36.9, 74.3),
    "mooncake_conversation": (9.0, 17.9),
    "tau_airline": (95.9, 95.9),
    "bfcl_live": (65.9, 65.9),
}


class NaiveLru:
    """The same cache, one entry at a time."""

    def __init__(self, capacity):
        self._capacity = capacity
        self._held = OrderedDict()

    def match(self, ids):
        count = 0
        while count < len(ids) and ids[count] in self._held:
            count += 1
        return count

    def touch(self, ids):
        for block in reversed(ids):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


chains = st.lists(st.lists(st.integers(0, 40), max_size=12, unique=True), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(chains, st.integers(1, 20))
def test_agrees_with_a_cache_that_moves_one_block_at_a_time(sequence, capacity):
    ours, naive = reference.BlockLru(capacity), NaiveLru(capacity)
    for ids in sequence:
        array = np.asarray(ids, dtype=np.int64)
        assert ours.match(array) == naive.match(ids)
        ours.touch(array)
        naive.touch(ids)
        assert ours.held <= capacity


def row(runs, input_tokens, block_size=16):
    return Row(0.0, None, None, input_tokens, 1, block_size, runs)


def test_a_partial_last_block_counts_only_its_tokens():
    rows = [row(((0, 2),), 20), row(((0, 2),), 20)]
    assert reference.pooled(rows, 1, 1024).hit_tokens == 20


def test_a_chain_loses_its_tail_first():
    rows = [row(((0, 3),), 48), row(((9, 1),), 16), row(((0, 3),), 48)]
    assert reference.row_hits(rows, 3 * 16) == [0, 0, 32]


def test_rows_without_blocks_reuse_nothing():
    rows = [Row(0.0, None, None, 50, 1, None, None)] * 2
    assert reference.pooled(rows, 2, 1024) == reference.Reuse(100, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_reproduces_the_published_rates(shared, name):
    trace = traces.read(shared(f"traces/{name}.jsonl.gz"))
    for workers, percent in zip((2, 4), PUBLISHED[name], strict=True):
        found = reference.pooled(trace.rows, workers, 1 << 20)
        assert 100 * found.hit_rate == pytest.approx(percent, abs=0.3)
