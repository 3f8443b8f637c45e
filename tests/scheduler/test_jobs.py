from __future__ import annotations

from scheduler import Job


def test_what_nobody_holds_is_not_cached():
    assert Job("j", 1000, 10).cached_tokens("a") == 0


def test_the_last_prompt_token_never_counts_as_cached():
    job = Job("j", 1000, 10, {"a": 1000, "b": 5000, "c": 999, "d": 16})
    assert [job.cached_tokens(worker) for worker in "abcd"] == [999, 999, 999, 16]


def test_a_prompt_of_one_token_is_computed():
    assert Job("j", 1, 10, {"a": 16}).cached_tokens("a") == 0
