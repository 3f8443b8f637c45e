"""Block hashes: equal up to the first difference, different from there on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.hashing import chain_blocks, mix, salt_seed, sequence_identity

ids = st.lists(st.integers(0, 2**32 - 1), min_size=0, max_size=120)


def tokens(values):
    return np.array(values, dtype=np.uint32)


@given(ids, ids, st.integers(1, 20))
def test_hashes_agree_exactly_as_far_as_the_blocks_do(left, right, size):
    one, two = chain_blocks(tokens(left), size, 0), chain_blocks(tokens(right), size, 0)
    assert len(one.hashes) == len(left) // size
    for i, (a, b) in enumerate(zip(one.hashes, two.hashes, strict=False)):
        same = left[: (i + 1) * size] == right[: (i + 1) * size]
        assert (a == b) == same


@given(ids, st.integers(1, 20), st.integers(0, 120))
def test_a_chain_can_be_continued(values, size, cut):
    first = min(cut, len(values)) // size
    start = chain_blocks(tokens(values[: first * size]), size, 7)
    rest = chain_blocks(tokens(values[first * size :]), size, start.total, first)
    whole = chain_blocks(tokens(values), size, 7)
    assert start.hashes + rest.hashes == whole.hashes
    assert rest.total == whole.total


@given(ids, ids)
def test_identity_tells_sequences_apart(left, right):
    def identity(values):
        chain = chain_blocks(tokens(values), 4, 0)
        return sequence_identity(chain.total, tokens(values)[len(chain.hashes) * 4 :])

    assert (identity(left) == identity(right)) == (left == right)


def test_blocks_that_differ_in_one_bit_differ():
    base = np.zeros(16, dtype=np.uint32)
    seen = {chain_blocks(base, 16, 0).hashes[0]}
    for place in range(16):
        for bit in range(32):
            other = base.copy()
            other[place] = np.uint32(1 << bit)
            seen.add(chain_blocks(other, 16, 0).hashes[0])
    assert len(seen) == 1 + 16 * 32


def test_exchanged_tokens_and_exchanged_blocks_are_seen():
    values = list(range(1, 33))
    swapped = [values[1], values[0], *values[2:]]
    assert chain_blocks(tokens(values), 16, 0).hashes != chain_blocks(tokens(swapped), 16, 0).hashes
    turned = values[16:] + values[:16]
    assert chain_blocks(tokens(values), 16, 0).total != chain_blocks(tokens(turned), 16, 0).total


def test_salts_share_no_block():
    values = tokens(range(64))
    chains = [chain_blocks(values, 16, salt_seed(salt)) for salt in (None, "a", "b")]
    assert len({key for chain in chains for key in chain.hashes}) == 12
    assert salt_seed("a") == salt_seed("a")


def test_mix_is_a_bijection_on_a_sample():
    assert len({mix(value) for value in range(10_000)}) == 10_000
