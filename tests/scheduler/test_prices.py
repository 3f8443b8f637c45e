from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import PROFILES, Prices

tokens = st.integers(0, 200_000)
profiles = st.sampled_from(sorted(PROFILES))
quick = settings(deadline=None, max_examples=50)

ROUND = Prices(
    prefill_a=10,
    prefill_b=0.1,
    prefill_d=1e-6,
    prefill_e=1e-3,
    decode_a=5,
    decode_b=0.5,
    decode_d=1e-5,
    transfer_latency=2,
    transfer_per_token=0.01,
    interference_base=2,
    interference_per_call=1,
)


def test_formulas():
    assert ROUND.prefill(1000, 2000) == pytest.approx(10 + 100 + 2.5 + 2)
    assert ROUND.decode_step(4, 10_000) == pytest.approx(5 + 2 + 0.1)
    assert ROUND.transfer(1000) == pytest.approx(12)
    assert [ROUND.interference(calls) for calls in (0, 3)] == [2, 5]


@quick
@given(profiles, tokens, tokens, st.integers(1, 1000))
def test_more_work_is_dearer(name, uncached, cached, more):
    prices = PROFILES[name]
    assert prices.prefill(uncached + more, cached) > prices.prefill(uncached, cached)
    assert prices.prefill(uncached, cached + more) > prices.prefill(uncached, cached)
    assert prices.transfer(uncached + more) > prices.transfer(uncached)
    assert prices.decode_step(1, cached + more) > prices.decode_step(1, cached)
    assert prices.interference(more) > prices.interference(0) >= 1


@quick
@given(profiles, st.integers(1, 200_000), st.data())
def test_a_held_prefix_never_makes_a_prompt_dearer(name, prompt, data):
    held = data.draw(st.integers(0, prompt - 1))
    prices = PROFILES[name]
    assert prices.prefill(prompt - held, held) <= prices.prefill(prompt, 0)


def test_the_large_worker_prefills_as_fast_as_it_does():
    """About 1.2 s for 10k tokens."""
    assert 1000 < PROFILES["b300-tp4"].prefill(10_000, 0) < 1400
