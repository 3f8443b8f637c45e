from __future__ import annotations

from router.outcome import Outcome


def test_a_call_that_has_just_begun():
    outcome = Outcome("id", "/v1/completions")
    assert (outcome.plan, outcome.queue, outcome.code) == ("none", "default", 0)
    assert outcome.delivered_tokens is None
    assert outcome.ttft_s is None


def test_outcomes_share_no_list():
    first, second = Outcome("1", "e"), Outcome("2", "e")
    first.retries.append(("prefill", "connect"))
    assert second.retries == []
