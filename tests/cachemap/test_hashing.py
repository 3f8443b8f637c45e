"""Blocks: equal hashes mean equal prefixes, on every machine and in every release."""

from __future__ import annotations

import json
import subprocess
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import Prompt, hash_blocks, read_prompt
from cachemap.hashing import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES

# A busy machine is not a failure.
quick = settings(deadline=None, max_examples=50)

ROOT = Path(__file__).resolve().parents[2]

BODIES: dict[str, dict[str, Any]] = {
    "one message": {"messages": [{"role": "user", "content": "Hello"}]},
    "text": {"prompt": "The quick brown fox jumps over the lazy dog. " * 8},
    "token ids": {"prompt": list(range(100))},
    "conversation": {
        "messages": [
            {"role": "system", "content": "You are a careful assistant. " * 12},
            {"role": "user", "content": "Wie heißt die Hauptstadt von Österreich? 東京 🚀" * 6},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "cache_salt": "s",
    },
}
# (end, hash) of the first and last blocks, and the number of blocks. Replicas share these keys: a
# release that changes them makes every shared map worthless.
GOLDEN: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "one message": (
        1,
        [
            (11, 1451277117293583438),
        ],
    ),
    "text": (
        3,
        [
            (128, 14756157972459506010),
            (256, 2246189526541851217),
            (360, 8627022481812693962),
        ],
    ),
    "token ids": (
        4,
        [
            (128, 16144943947042350359),
            (256, 531873206326134733),
            (384, 12965140074034777454),
            (400, 17992907078300022040),
        ],
    ),
    "conversation": (
        7,
        [
            (128, 5725524759777524481),
            (256, 1717817271003827167),
            (768, 2271075165299812357),
            (888, 4374749618520967608),
        ],
    ),
}


def keys(name: str) -> tuple[int, list[tuple[int, int]]]:
    blocks = hash_blocks(read_prompt(BODIES[name], "m"))
    pairs = list(zip(blocks.ends, blocks.hashes, strict=True))
    return len(pairs), pairs if len(pairs) < 4 else pairs[:2] + pairs[-2:]


@st.composite
def prompts(draw):
    body = draw(st.binary(max_size=3000))
    cuts = draw(st.lists(st.integers(1, max(len(body), 1)), max_size=12))
    ends = sorted({cut for cut in cuts if cut <= len(body)})
    return Prompt(body, tuple(ends), seed=7)


def extended(prompt: Prompt, data: bytes, gaps: list[int]) -> Prompt:
    """A prompt that begins with all of `prompt`, with more messages behind it."""
    ends = list(prompt.message_ends)
    for gap in gaps:
        ends.append(max(ends[-1] if ends else 0, len(prompt.data)) + gap)
    whole = prompt.data + data
    return Prompt(whole, tuple(end for end in ends if end <= len(whole)), prompt.seed)


def common_prefix(first: bytes, second: bytes) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def common_hashes(first: Any, second: Any) -> int:
    count = 0
    for one, other in zip(first.hashes, second.hashes, strict=False):
        if one != other:
            break
        count += 1
    return count


def test_an_empty_prompt_has_no_blocks():
    assert list(hash_blocks(Prompt(b"", (), 0)).hashes) == []


@quick
@given(prompts())
def test_ends_ascend_to_the_end_of_the_prompt(prompt):
    blocks = hash_blocks(prompt)
    ends = list(blocks.ends)
    assert ends == sorted(set(ends))
    assert len(blocks.hashes) == len(ends)
    assert (ends[-1] if ends else 0) == len(prompt.data)
    assert all(0 <= block < 2**64 for block in blocks.hashes)


@quick
@given(prompts(), prompts(), st.integers(0, 3000))
def test_common_hashes_are_as_long_as_the_common_blocks(first, second, shared):
    """Random prompts that agree on their first `shared` bytes and the message ends in them."""
    shared = min(shared, len(first.data))
    ends = [end for end in first.message_ends if end <= shared]
    ends += [end + shared for end in second.message_ends]
    second = Prompt(first.data[:shared] + second.data, tuple(ends), first.seed)
    one, other = hash_blocks(first), hash_blocks(second)
    agree = common_prefix(first.data, second.data)
    equal_blocks = 0
    for end, also in zip(one.ends, other.ends, strict=False):
        if end != also or end > agree:
            break
        equal_blocks += 1
    assert common_hashes(one, other) == equal_blocks


@quick
@given(prompts(), st.binary(max_size=2000), st.lists(st.integers(1, 400), max_size=6))
def test_cuts_depend_on_the_bytes_before_them_only(prompt, data, gaps):
    """All cuts of a prompt are cuts of whatever extends it, but for the one at its very end."""
    longer = extended(prompt, data, gaps)
    short, long = hash_blocks(prompt), hash_blocks(longer)
    kept = bisect_right(long.ends, len(prompt.data))
    inner = list(short.ends[:-1])
    assert list(long.ends[: len(inner)]) == inner
    assert kept in (len(inner), len(short.ends))
    assert list(long.hashes[: len(inner)]) == list(short.hashes[:-1])


@quick
@given(prompts(), st.binary(min_size=1, max_size=2000), st.lists(st.integers(1, 400), max_size=6))
def test_message_ends_are_exact_to_an_engines_block(prompt, data, gaps):
    for end in prompt.message_ends:
        ends = hash_blocks(extended(prompt, data, gaps)).ends
        cuts = [cut for cut in ends if cut <= end]
        assert end - (cuts[-1] if cuts else 0) < MIN_BLOCK_BYTES


@quick
@given(st.integers(0, 3 << 20), st.lists(st.integers(1, 3 << 20), max_size=4))
def test_blocks_are_bounded_and_grow_with_depth(size, ends):
    prompt = Prompt(bytes(size), tuple(sorted({end for end in ends if end <= size})), 0)
    start = 0
    for end in hash_blocks(prompt).ends:
        # A block that begins at a message end reaches to the second fixed cut behind it, at most.
        most = max(2 * MIN_BLOCK_BYTES, start // 16 + MIN_BLOCK_BYTES)
        assert end - start <= min(most, MAX_BLOCK_BYTES + MIN_BLOCK_BYTES)
        start = end


@quick
@given(prompts(), st.integers(0, 2**64 - 1))
def test_seeds_separate_every_block(prompt, seed):
    first = hash_blocks(prompt)
    second = hash_blocks(Prompt(prompt.data, prompt.message_ends, seed ^ 0x5555))
    if seed ^ 0x5555 != prompt.seed:
        assert common_hashes(first, second) == 0


@pytest.mark.parametrize("at", [0, 63, 64, 1000, 1999])
def test_one_changed_byte_changes_every_block_from_there_on(at):
    data = bytes(range(250)) * 8
    changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    first, second = (hash_blocks(Prompt(each, (), 0)) for each in (data, changed))
    assert first.ends == second.ends
    before = sum(end <= at for end in first.ends)
    assert common_hashes(first, second) == before
    assert not set(first.hashes[before:]) & set(second.hashes[before:])


@pytest.mark.parametrize("name", BODIES)
def test_keys_are_those_of_earlier_releases(name):
    assert keys(name) == GOLDEN[name]


def test_keys_are_those_of_other_processes():
    """Under another seed of Python's own hash."""
    code = (
        "import json, sys; from cachemap import hash_blocks, read_prompt\n"
        "bodies = json.load(sys.stdin)\n"
        "print(json.dumps([list(hash_blocks(read_prompt(b, 'm')).hashes) for b in bodies]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)},
        input=json.dumps(list(BODIES.values())),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    here = [list(hash_blocks(read_prompt(body, "m")).hashes) for body in BODIES.values()]
    assert json.loads(answer.stdout) == here
