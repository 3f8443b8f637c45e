"""The documentation table says something about every key."""

from __future__ import annotations

from router.config_reference import keys, reference_table


def test_every_key_is_described_and_has_a_default_or_is_required():
    for key in keys():
        assert key.description, key.path
        assert key.description.endswith("."), key.path
        assert key.default or key.type == "mapping", key.path


def test_keys_are_listed_by_their_full_path():
    paths = [key.path for key in keys()]
    assert "models[].pools[].workers[].url" in paths
    assert "models[].prices.prefill.base_ms" in paths
    assert len(paths) == len(set(paths))


def test_the_table_has_one_row_per_key():
    lines = reference_table().splitlines()
    assert len(lines) == 2 + len(list(keys()))
    assert "| `queue.max_waiting` | integer | `8192` |" in reference_table()
    assert "`true`" in reference_table()
