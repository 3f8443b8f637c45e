"""The metrics page: counts that add up, read by an independent parser."""

from __future__ import annotations

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from simulator.engine import Engine, RemoteKv, Request
from simulator.metrics import Histogram, Observations, render
from simulator.profile import load, resized

PROFILE = resized(load("h200-llama8b"), capacity_tokens=4096)


def samples(engine, observed):
    page = render(engine, observed, "tiny", 123.5).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            found[sample.name, *sorted(labels.values())] = sample.value
    return found


def finish(engine, observed):
    while (due_s := engine.next_event_s()) is not None and (engine.running or engine.waiting):
        for sequence in engine.advance(due_s).sequences:
            if sequence.reason is not None:
                observed.observe(sequence)


def test_prompt_tokens_add_up_by_source():
    engine, observed = Engine(PROFILE), Observations()
    tokens = np.arange(1000, dtype=np.uint32)
    for name in ("a", "b"):
        engine.submit(Request(name, tokens, max_tokens=5), engine.now_s)
        finish(engine, observed)
    remote = RemoteKv("p", "r", tuple(range(63)), cached_tokens=0)
    engine.submit(Request("c", tokens + np.uint32(7), max_tokens=5, remote=remote), engine.now_s)
    engine.advance(engine.now_s)
    engine.pulled("c", [0] * 63, engine.now_s)
    finish(engine, observed)
    found = samples(engine, observed)
    by_source = {
        source: found["vllm:prompt_tokens_by_source_total", source]
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source == {
        "local_compute": 1000 + 8,
        "local_cache_hit": 992,
        "external_kv_transfer": 1000,
    }
    assert found["vllm:prompt_tokens_total",] == sum(by_source.values()) == 3000
    assert found["vllm:generation_tokens_total",] == 15
    assert found["vllm:request_success_total", "length"] == 3
    assert found["vllm:external_prefix_cache_hits_total",] == 1000
    assert found["vllm:nixl_bytes_transferred_count",] == 1
    assert found["vllm:nixl_bytes_transferred_sum",] == 1008 * PROFILE.kv_bytes_per_token
    assert found["vllm:time_to_first_token_seconds_count",] == 3
    assert found["vllm:inter_token_latency_seconds_count",] == 12


def test_load_and_capacity_are_told():
    engine, observed = Engine(PROFILE), Observations()
    engine.submit(Request("a", np.arange(2048, dtype=np.uint32), max_tokens=5), 0.0)
    found = samples(engine, observed)
    assert found["vllm:num_requests_running",] == 1
    assert found["vllm:kv_cache_usage_perc",] == 0.5
    assert found["process_start_time_seconds",] == 123.5
    info = next(key for key in found if key[0] == "vllm:cache_config_info")
    assert {"16", "256", "4096"} <= set(info)


def test_histogram_buckets_hold_values_up_to_their_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(1.0, 3)
    assert histogram.counts == [5, 2, 1]
    assert histogram.sum == 17.0
