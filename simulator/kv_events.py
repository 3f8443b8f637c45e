"""KV cache events: what an engine stored and dropped, as vLLM publishes it.

A batch is a MessagePack array `[time, [event, ...], rank]`; events are maps. The log numbers the
batches and keeps the last ones, for consumers that missed some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

import numpy as np

from simulator.hashing import Tokens

BUFFERED_BATCHES = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """A run of blocks that can be found from now on. `tokens` are all of theirs, in order."""

    hashes: Sequence[int]
    parent: int | None
    tokens: Tokens
    salt: str | None
    "Said with the first block of a chain, which is the one it goes into."

    def as_map(self, block_tokens: int) -> dict[str, Any]:
        first = [[self.salt]] if self.salt is not None and self.parent is None else [None]
        return {
            "type": "BlockStored",
            "block_hashes": self.hashes,
            "parent_block_hash": self.parent,
            "token_ids": self.tokens,
            "block_size": block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": first + [None] * (len(self.hashes) - 1),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was taken for something else."""

    hash: int

    def as_map(self, block_tokens: int) -> dict[str, Any]:
        return {
            "type": "BlockRemoved",
            "block_hashes": [self.hash],
            "medium": "GPU",
            "group_idx": 0,
        }


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was reset."""

    def as_map(self, block_tokens: int) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}


KvEvent = BlocksStored | BlockRemoved | AllBlocksCleared


class KvEventLog:
    """Numbers and renders batches; remembers the last `BUFFERED_BATCHES`."""

    def __init__(self, topic: str, block_tokens: int) -> None:
        self.topic = topic.encode()
        self._block_tokens = block_tokens
        self._next = 0
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED_BATCHES)

    def append(self, events: Sequence[KvEvent], time_s: float) -> list[bytes]:
        """A batch as the frames of one message."""
        maps = [event.as_map(self._block_tokens) for event in events]
        payload = encode([time_s, maps, 0])
        number, self._next = self._next, self._next + 1
        self._batches.append((number, payload))
        return self._frames(number, payload)

    def replay(self, first: int) -> Iterator[list[bytes]]:
        """The remembered batches from number `first` on, then the message that ends a replay."""
        for number, payload in self._batches:
            if number >= first:
                yield self._frames(number, payload)
        yield [b"", b"\xff" * 8, b""]

    def _frames(self, number: int, payload: bytes) -> list[bytes]:
        return [self.topic, number.to_bytes(8, "big"), payload]


# -- MessagePack --------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """MessagePack of None, numbers, text, lists, maps and arrays of 32-bit ids."""
    parts: list[bytes] = []
    _encode(value, parts)
    return b"".join(parts)


def _encode(value: object, parts: list[bytes]) -> None:
    if value is None:
        parts.append(b"\xc0")
    elif isinstance(value, int):
        parts.append(_integer(value))
    elif isinstance(value, float):
        parts.append(pack(">Bd", 0xCB, value))
    elif isinstance(value, str):
        data = value.encode()
        parts.append(_head(len(data), 0xA0, 32, 0xDA, 0xDB) + data)
    elif isinstance(value, np.ndarray):
        parts += (_head(len(value), 0x90, 16, 0xDC, 0xDD), _ids(value))
    else:
        _encode_collection(value, parts)


def _encode_collection(value: object, parts: list[bytes]) -> None:
    if isinstance(value, dict):
        parts.append(_head(len(value), 0x80, 16, 0xDE, 0xDF))
        for key, item in value.items():
            _encode(key, parts)
            _encode(item, parts)
    elif isinstance(value, list | tuple):
        parts.append(_head(len(value), 0x90, 16, 0xDC, 0xDD))
        for item in value:
            _encode(item, parts)
    else:
        raise TypeError(f"no MessagePack of {type(value).__name__}")


def _integer(value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is not an unsigned 64-bit number")
    if value < 128:
        return bytes((value,))
    if value < 1 << 32:
        return pack(">BI", 0xCE, value)
    return pack(">BQ", 0xCF, value)


def _head(size: int, short: int, short_limit: int, medium: int, long: int) -> bytes:
    if size < short_limit:
        return bytes((short | size,))
    if size < 1 << 16:
        return pack(">BH", medium, size)
    return pack(">BI", long, size)


def _ids(tokens: Tokens) -> bytes:
    items = np.empty(len(tokens), dtype=[("head", "u1"), ("id", ">u4")])
    items["head"] = 0xCE
    items["id"] = tokens
    return items.tobytes()
