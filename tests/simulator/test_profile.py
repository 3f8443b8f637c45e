"""Profiles: forms, shipped files, and what is said about bad ones."""

from __future__ import annotations

import orjson
import pytest

from simulator.profile import (
    SHIPPED_DIR,
    DecodeCost,
    PrefillCost,
    ProfileError,
    TransferCost,
    load,
    resized,
)


def test_prefill_form():
    cost = PrefillCost(a=1, b=2, d=3, e=5)
    assert cost.seconds(10, 4) == 1 + 20 + 3 * 10 * (4 + 5) + 20
    assert PrefillCost(a=1, b=2, d=0, e=0, floor=50).seconds(10, 0) == 51


def test_decode_form():
    assert DecodeCost(a=1, b=2, d=3).seconds(4, 10) == 1 + 8 + 120
    assert DecodeCost(a=1, b=2, d=3, floor=100).seconds(4, 10) == 1 + 8 + 1000


def test_a_run_of_decode_steps_is_the_sum_of_its_steps():
    cost = DecodeCost(a=1, b=2, d=3, floor=100)
    steps = [cost.seconds(4, (40 + 4 * i) / 4) for i in range(1, 6)]
    assert cost.run_seconds(5, 4, 40) == pytest.approx(sum(steps))


def test_a_step_of_both_kinds_pays_the_constant_once():
    profile = load("b300-tp4")
    prefill, decode = profile.prefill, profile.decode
    assert profile.step_seconds([(1000, 50)], 0, 0) == pytest.approx(prefill.seconds(1000, 50))
    assert profile.step_seconds([], 4, 400) == decode.seconds(4, 100)
    both = prefill.seconds(1000, 50) + decode.seconds(4, 100) - min(prefill.a, decode.a)
    assert profile.step_seconds([(1000, 50)], 4, 400) == pytest.approx(both)


def test_transfer_form():
    assert TransferCost(latency_s=1, bytes_per_s=10, handshake_s=7).seconds(50) == 6


@pytest.mark.parametrize("path", sorted(SHIPPED_DIR.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_profiles_load_and_say_where_their_numbers_come_from(path):
    profile = load(path.stem)
    assert profile.name == path.stem
    assert any("ssumed" in note for note in profile.notes)
    assert profile.prefill.seconds(1000, 0) < profile.prefill.seconds(1000, 50_000)
    assert profile.decode.seconds(1, 1000) < profile.decode.seconds(64, 1000)


def test_b300_prefill_rate():
    profile = load("b300-tp4")
    first, rest = profile.max_batched_tokens, 10_000 - profile.max_batched_tokens
    seconds = profile.prefill.seconds(first, 0) + profile.prefill.seconds(rest, first)
    assert seconds == pytest.approx(1.19, abs=0.01)
    assert 10_000 / seconds == pytest.approx(8400, rel=0.01)


def test_a_profile_file(tmp_path):
    data = orjson.loads((SHIPPED_DIR / "b300-tp4.json").read_bytes()) | {"name": "mine"}
    path = tmp_path / "mine.json"
    path.write_bytes(orjson.dumps(data))
    assert load(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"name": "x", "speed": 1}', "unknown keys"),
    ],
)
def test_bad_profile_files_are_explained(tmp_path, text, said):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=said):
        load(str(path))


def test_a_wrong_constant_is_explained(tmp_path):
    data = orjson.loads((SHIPPED_DIR / "b300-tp4.json").read_bytes())
    data["decode"]["slope"] = 1
    path = tmp_path / "bad.json"
    path.write_bytes(orjson.dumps(data))
    with pytest.raises(ProfileError, match="slope"):
        load(str(path))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ProfileError, match="b300-tp4, h200-llama8b"):
        load("h100")


def test_limits_can_be_changed():
    profile = resized(load("b300-tp4"), capacity_tokens=4096, max_running=3)
    assert (profile.capacity_tokens, profile.max_model_len) == (4096, 4096)
    assert profile.max_running == 3
    assert profile.max_batched_tokens == load("b300-tp4").max_batched_tokens
