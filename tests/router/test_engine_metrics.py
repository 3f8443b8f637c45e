"""The figures, from texts as real servers send them and from damaged ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router.engine_metrics import EngineFigures, read_figures

CONFIG = b'vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="%s"} 1.0\n'


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_recorded_texts_give_what_a_full_parser_finds(shared, role):
    text = shared(f"fixtures/vllm/http/metrics_{role}.txt").read_text()
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    cache = samples["vllm:cache_config_info"].labels
    assert read_figures(text.encode()) == EngineFigures(
        started_at=samples["process_start_time_seconds"].value,
        running=int(samples["vllm:num_requests_running"].value),
        waiting=int(samples["vllm:num_requests_waiting"].value),
        kv_usage=samples["vllm:kv_cache_usage_perc"].value,
        block_tokens=int(cache["block_size"]),
        capacity_tokens=int(cache["kv_cache_size_tokens"]),
    )


def test_counts_and_capacity_add_up_over_engines_and_usage_is_their_mean():
    text = b"".join(
        (
            b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4\n',
            b'vllm:num_requests_waiting{engine="0"} 1.0\nvllm:num_requests_waiting{engine="1"} 0\n',
            b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 100\n',
            b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n',
            CONFIG % (0, b"1000"),
            CONFIG % (1, b"500"),
        )
    )
    figures = read_figures(text)
    assert (figures.running, figures.waiting) == (7, 1)
    assert figures.kv_usage == pytest.approx(0.3)
    assert (figures.block_tokens, figures.capacity_tokens) == (16, 24_000)


def test_names_without_labels_and_of_older_versions_are_read():
    text = b"vllm:gpu_cache_usage_perc 0.5\nprocess_start_time_seconds 1.5e+09 1700000000000"
    assert read_figures(text) == EngineFigures(started_at=1.5e9, kv_usage=0.5)


def test_a_label_value_may_look_like_anything():
    text = b'vllm:num_requests_running{model_name="a} 9\\"b",engine="0"} 2.0\n'
    assert read_figures(text).running == 2


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>busy</html>",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{",
        b'vllm:num_requests_running{engine="0"} \n',
        b"vllm:num_requests_running x\n",
        b"process_start_time_seconds NaN\nvllm:kv_cache_usage_perc +Inf\n",
        b"# TYPE vllm:num_requests_running gauge\n",
        CONFIG % (0, b"None"),
    ],
)
def test_what_is_not_said_is_none(text):
    figures = read_figures(text)
    assert figures.started_at is figures.running is figures.kv_usage is None
    assert figures.capacity_tokens is None


@settings(deadline=None)  # a busy machine is not a failure
@given(st.binary(max_size=200), st.integers(0, 60))
def test_no_text_makes_it_fail(noise, cut):
    whole = b'vllm:num_requests_running{engine="0"} 3.0\n' + CONFIG % (0, b"10")
    read_figures(noise)
    read_figures(whole[:cut] + noise + whole[cut:])
