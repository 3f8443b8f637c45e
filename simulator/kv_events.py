"""KV cache events: what an engine stored and dropped, in the members that vLLM publishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.hashing import Tokens


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
            "token_ids": self.tokens.tolist(),
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
