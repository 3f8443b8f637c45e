"""What calls leave in the exposition text, read by an independent parser."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router import __version__, metrics
from router.metric_definitions import definitions
from router.metrics import FleetSnapshot, Metrics
from router.outcome import Outcome


@dataclass
class Worker:
    id: str
    model: str = "glm"
    pool: str = "pool-a"
    role: str = "decode"
    up: bool = True
    running: int = 0
    prefill_work_tokens: int = 0
    decode_work_tokens: int = 0
    kv_usage: float | None = None


def outcome(**fields) -> Outcome:
    return Outcome(**{"request_id": "r", "model": "glm", "endpoint": "/v1/completions", **fields})


def samples(subject: Metrics) -> dict[tuple[object, ...], float]:
    families = text_string_to_metric_families(subject.render().decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(subject: Metrics, name: str, **labels: str) -> float | None:
    return samples(subject).get((name, *sorted(labels.items())))


def test_calls_are_counted_by_model_queue_plan_and_code():
    subject = Metrics(["glm"])
    for code in (200, 200, 499):
        subject.observe(outcome(plan="pd", code=code))
    name, labels = "pdrouter_requests_total", {"model": "glm", "queue": "default", "plan": "pd"}
    assert value(subject, name, **labels, code="200") == 2
    assert value(subject, name, **labels, code="499") == 1


def test_a_name_that_no_model_has_never_becomes_a_label():
    subject = Metrics(["glm"])
    for number in range(5):
        subject.observe(outcome(model=f"made-up-{number}", code=404))
    text = subject.render().decode()
    assert "made-up" not in text
    labels = {"model": "unknown", "queue": "default", "plan": "none", "code": "404"}
    assert value(subject, "pdrouter_requests_total", **labels) == 5


def test_label_values_are_bounded_even_if_a_reason_is_not(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_SERIES", 10)
    subject = Metrics(["glm"])
    for number in range(100):
        subject.observe(outcome(retries=[("prefill", f"reason {number}")]))
    found = {key: n for key, n in samples(subject).items() if key[0] == "pdrouter_retries_total"}
    assert len(found) == 11
    assert sum(found.values()) == 100
    assert value(subject, "pdrouter_retries_total", stage="other", reason="other") == 90


@settings(deadline=None, max_examples=30)  # a busy machine is not a failure
@given(st.lists(st.floats(0, 1000), max_size=50))
def test_a_histogram_agrees_with_a_plain_count(times):
    subject = Metrics(["glm"])
    for ttft_s in times:
        subject.observe(outcome(ttft_s=ttft_s))
    found = samples(subject)
    name, model = "pdrouter_ttft_seconds", ("model", "glm")
    assert found[f"{name}_count", model] == len(times)
    assert found[f"{name}_sum", model] == pytest.approx(sum(times))
    for bound in ("0.001", "0.5", "1.0", "300.0"):
        expected = sum(ttft_s <= float(bound) for ttft_s in times)
        assert found[f"{name}_bucket", ("le", bound), model] == expected


def test_a_time_that_was_not_reached_is_not_counted():
    subject = Metrics(["glm"])
    subject.observe(outcome(e2e_s=1.0))
    assert value(subject, "pdrouter_ttft_seconds_count", model="glm") == 0
    assert value(subject, "pdrouter_e2e_seconds_count", model="glm") == 1


def test_prefix_tokens_are_counted_by_kind_and_the_ratio_follows_the_engine():
    subject = Metrics(["glm"])
    counts = {"available_tokens": 90, "captured_tokens": 80, "predicted_tokens": 70}
    subject.observe(outcome(prompt_tokens=100, delivered_tokens=60, **counts))
    subject.observe(outcome(prompt_tokens=1000, delivered_tokens=None, **counts))
    # The engine that said nothing takes no part: the four are over the same calls.
    kinds = {"available": 90, "captured": 80, "predicted": 70, "delivered": 60}
    for kind, tokens in kinds.items():
        assert value(subject, "pdrouter_prefix_tokens_total", model="glm", kind=kind) == tokens
    assert value(subject, "pdrouter_prefix_hit_ratio", model="glm") == 0.6
    assert value(subject, "pdrouter_prompt_tokens_total", model="glm") == 1100


def test_the_ratio_is_absent_until_an_engine_has_reported():
    subject = Metrics(["glm"])
    subject.observe(outcome(prompt_tokens=100))
    assert value(subject, "pdrouter_prefix_hit_ratio", model="glm") is None


def test_failures_are_counted_by_their_reason():
    subject = Metrics(["glm"])
    subject.observe(
        outcome(
            rejected="queue_full",
            disconnect_phase="prefill",
            missing_transfer_params=True,
            retries=[("prefill", "refused"), ("decode", "5xx"), ("prefill", "refused")],
        )
    )
    assert value(subject, "pdrouter_rejected_total", reason="queue_full") == 1
    assert value(subject, "pdrouter_disconnects_total", phase="prefill") == 1
    assert value(subject, "pdrouter_disconnects_total", phase="decode") == 0
    assert value(subject, "pdrouter_missing_transfer_params_total", model="glm") == 1
    assert value(subject, "pdrouter_retries_total", stage="prefill", reason="refused") == 2
    assert value(subject, "pdrouter_retries_total", stage="decode", reason="5xx") == 1


def test_gauges_show_the_fleet_at_the_time_of_the_scrape():
    workers = [
        Worker("http://p", role="prefill", up=False, prefill_work_tokens=5),
        Worker("http://d", running=3, decode_work_tokens=7, kv_usage=0.25),
    ]
    subject = Metrics(["glm"])
    subject.snapshot = lambda: FleetSnapshot(workers, {"default": 4}, 3, {"http://p": 11}, 999)
    prefill = {"model": "glm", "pool": "pool-a", "role": "prefill", "worker": "http://p"}
    decode = {"model": "glm", "pool": "pool-a", "role": "decode", "worker": "http://d"}
    assert value(subject, "pdrouter_worker_up", **prefill) == 0
    assert value(subject, "pdrouter_worker_up", **decode) == 1
    assert value(subject, "pdrouter_worker_running", **decode) == 3
    assert value(subject, "pdrouter_worker_work_tokens", **prefill, stage="prefill") == 5
    assert value(subject, "pdrouter_worker_work_tokens", **prefill, stage="decode") is None
    assert value(subject, "pdrouter_worker_work_tokens", **decode, stage="decode") == 7
    assert value(subject, "pdrouter_worker_kv_usage_ratio", **decode) == 0.25
    assert value(subject, "pdrouter_worker_kv_usage_ratio", **prefill) is None
    assert value(subject, "pdrouter_queue_depth", queue="default") == 4
    assert value(subject, "pdrouter_leases") == 3
    assert value(subject, "pdrouter_cachemap_blocks", worker="http://p") == 11
    assert value(subject, "pdrouter_cachemap_bytes") == 999


def test_a_removed_worker_leaves_no_series():
    workers = [Worker("http://gone"), Worker("http://stays")]
    subject = Metrics(["glm"], lambda: FleetSnapshot(workers))
    assert b"http://gone" in subject.render()
    del workers[0]
    assert b"http://gone" not in subject.render()


def test_label_values_are_escaped():
    awkward = 'a"b\\c\nd'
    subject = Metrics([awkward])
    subject.observe(outcome(model=awkward, prompt_tokens=1))
    assert value(subject, "pdrouter_prompt_tokens_total", model=awkward) == 1


def test_the_text_holds_every_defined_metric_with_its_type_and_labels():
    subject = Metrics(["glm"], lambda: FleetSnapshot([Worker("http://d", kv_usage=0.1)]))
    subject.observe(outcome(prompt_tokens=1, delivered_tokens=1))
    families = {f.name: f for f in text_string_to_metric_families(subject.render().decode())}
    for metric in definitions():
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    ours = [name for name in families if name.startswith("pdrouter_")]
    assert len(ours) == len(definitions())


def test_the_process_and_the_build_are_shown():
    found = samples(Metrics())
    assert any(("version", __version__) in key for key in found)
    assert ("process_resident_memory_bytes",) in found


def test_two_instances_share_nothing():
    first, second = Metrics(["glm"]), Metrics(["glm"])
    first.observe(outcome(prompt_tokens=5))
    assert value(second, "pdrouter_prompt_tokens_total", model="glm") == 0


@pytest.mark.skipif(sys.gettrace() is not None, reason="a traced run says nothing about cost")
def test_observing_a_call_is_cheap():
    subject = Metrics(["glm"])
    call = outcome(
        plan="pd",
        code=200,
        prompt_tokens=9,
        delivered_tokens=5,
        ttft_s=0.6,
        tpot_s=0.02,
        prefill_s=0.5,
        queue_wait_s=0.001,
        decision_s=0.0001,
    )
    best_s = min(_observe_s(subject, call) for _ in range(10))
    assert best_s < 20e-6


def _observe_s(subject: Metrics, call: Outcome, count: int = 500) -> float:
    began = time.perf_counter()
    for _ in range(count):
        subject.observe(call)
    return (time.perf_counter() - began) / count
