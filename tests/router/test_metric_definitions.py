"""The list of metrics is complete and well formed."""

from __future__ import annotations

import dataclasses
import re

from router import metric_definitions as defs
from router.outcome import Outcome


def test_names_labels_and_buckets_are_well_formed():
    names = [metric.name for metric in defs.definitions()]
    assert len(names) == len(set(names))
    for metric in defs.definitions():
        assert re.fullmatch(r"pdrouter_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
        assert "\n" not in metric.help


def test_every_definition_of_the_module_is_listed():
    defined = {value for value in vars(defs).values() if isinstance(value, defs.MetricDef)}
    assert defined == set(defs.definitions())


def test_every_time_is_a_field_of_an_outcome():
    fields = {field.name for field in dataclasses.fields(Outcome)}
    assert {name for name, _ in defs.TIMES} <= fields


def test_first_token_buckets_reach_from_a_millisecond_to_five_minutes():
    assert defs.TTFT.buckets[0] == 0.001
    assert defs.TTFT.buckets[-1] == 300.0


def test_the_table_has_one_row_per_metric():
    table = defs.reference_table()
    assert len(table.splitlines()) == 2 + len(defs.definitions())
    assert "| `pdrouter_prefix_tokens_total` | counter | `model`, `kind` |" in table
