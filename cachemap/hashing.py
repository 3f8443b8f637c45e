"""Canonical prompt bytes -> blocks, the unit of prefix identity.

A block's hash is the XXH3-64 of its bytes, seeded with the hash of the block before it, so equal
hashes mean equal prefixes. Blocks end at offsets that depend on the bytes before them
alone: at fixed offsets, whose distance grows with depth, and at the end of each message. A match is
thus known to about 1/16 of its length at worst with some tens of blocks, and exactly between the
turns of a conversation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from cachemap.prompt import Prompt

MIN_BLOCK_BYTES = 128  # two engine blocks of 16 tokens, at about 4 bytes a token
MAX_BLOCK_BYTES = 4096
_GROWTH = 16  # a block is at most 1/16 of what stands before it


@dataclass(frozen=True, slots=True)
class Blocks:
    """`hashes[i]` identifies the prompt's first `ends[i]` bytes; both ascend in depth."""

    hashes: Sequence[int]
    ends: Sequence[int]


def _fixed_cuts(limit: int) -> list[int]:
    cuts = []
    offset = 0
    while offset < limit:
        step = offset // _GROWTH // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        offset += min(max(step, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)
        cuts.append(offset)
    return cuts


_TABLE_BYTES = 1 << 20
_CUTS = _fixed_cuts(_TABLE_BYTES)


def hash_blocks(prompt: Prompt) -> Blocks:
    """Cut `prompt` and hash each prefix. An empty prompt has no blocks."""
    data, digest = prompt.data, xxhash.xxh3_64_intdigest
    ends = block_ends(len(data), prompt.message_ends)
    hashes = []
    chained = prompt.seed
    for block in map(data.__getitem__, map(slice, (0, *ends), ends)):
        chained = digest(block, chained)
        hashes.append(chained)
    return Blocks(hashes, ends)


def block_ends(size: int, message_ends: Sequence[int]) -> list[int]:
    """Offsets at which the blocks of a prompt of `size` bytes end; the last one is `size`.

    Of two cuts closer than MIN_BLOCK_BYTES the first stays, whichever it is, so equal prefixes
    keep equal cuts.
    """
    ends: list[int] = []
    last = 0
    fixed = _CUTS if size <= _TABLE_BYTES else _fixed_cuts(size)
    position = 0
    for message_end in message_ends:
        stop = bisect_left(fixed, message_end, position)
        if stop > position:
            ends += fixed[position:stop]
            last = ends[-1]
            position = stop
        if message_end - last >= MIN_BLOCK_BYTES:
            ends.append(message_end)
            last = message_end
            position = bisect_left(fixed, last + MIN_BLOCK_BYTES, position)
    ends += fixed[position : bisect_left(fixed, size, position)]
    if size and (not ends or ends[-1] != size):
        ends.append(size)
    return ends
