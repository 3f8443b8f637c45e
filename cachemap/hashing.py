"""Canonical prompt bytes -> blocks, the unit of prefix identity.

The hash of a block is the XXH3-64 of everything from the start of the prompt to the block's end,
so equal hashes mean equal prefixes. Blocks end at offsets that depend on the bytes before them
alone: at fixed offsets, whose distance grows with depth, and at the end of each message. A match is
thus known to about 1/16 of its length at worst with some tens of blocks, and exactly between the
turns of a conversation.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import xxhash

from cachemap.prompt import Prompt

MIN_BLOCK_BYTES = 64  # one engine block of 16 tokens, at about 4 bytes a token
MAX_BLOCK_BYTES = 4096
_GROWTH = 16  # a block is at most 1/16 of what stands before it


@dataclass(frozen=True, slots=True)
class Blocks:
    """`hashes[i]` identifies the prompt's first `ends[i]` bytes; both ascend in depth."""

    hashes: tuple[int, ...]
    ends: tuple[int, ...]


def _fixed_cuts(limit: int) -> list[int]:
    cuts = []
    offset = 0
    while offset < limit:
        step = offset // _GROWTH // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        offset += min(max(step, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)
        cuts.append(offset)
    return cuts


_TABLE_BYTES = 1 << 20
_CUTS = _fixed_cuts(_TABLE_BYTES)  # behind it, every MAX_BLOCK_BYTES


def hash_blocks(prompt: Prompt) -> Blocks:
    """Cut `prompt` and hash each prefix. An empty prompt has no blocks."""
    view = memoryview(prompt.data)
    ends = block_ends(len(prompt.data), prompt.message_ends)
    state = xxhash.xxh3_64(seed=prompt.seed)
    update, digest = state.update, state.intdigest
    hashes = []
    start = 0
    for end in ends:
        update(view[start:end])
        hashes.append(digest())
        start = end
    return Blocks(tuple(hashes), tuple(ends))


def block_ends(size: int, message_ends: tuple[int, ...]) -> list[int]:
    """Offsets at which the blocks of a prompt of `size` bytes end; the last one is `size`."""
    cuts = _CUTS[: bisect_right(_CUTS, size)]
    if size > _CUTS[-1]:
        cuts += range(_CUTS[-1] + MAX_BLOCK_BYTES, size + 1, MAX_BLOCK_BYTES)
    cuts += message_ends
    if not message_ends or message_ends[-1] != size:
        cuts.append(size)
    cuts.sort()
    ends = []
    last = 0
    for cut in cuts:
        # Two cuts closer than an engine's block say nothing that one does not. Which of them
        # stays depends on the bytes before it only: equal prefixes keep equal cuts.
        if cut - last >= MIN_BLOCK_BYTES or (cut == size and cut > last):
            ends.append(cut)
            last = cut
    return ends
