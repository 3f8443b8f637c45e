"""Identity of KV blocks: a chained 64-bit hash, computed for a whole prompt at once.

Each block's hash covers all tokens before it. The chain is a sum of block digests weighted by
their position, so numpy computes every link of a 32k-token prompt in a few hundred microseconds.
The identity is this package's own; nothing outside has to agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15
_DIGEST = 0xD6E8FEB86659FD93
_LINK = 0xC2B2AE3D27D4EB4F
_POSITION = 0x5851F42D4C957F2D
_LONGEST_BLOCK = 4096


def mix(value: int) -> int:
    """A bijection on 64-bit integers whose every output bit depends on every input bit."""
    value &= _MASK
    value ^= value >> 32
    value = value * _DIGEST & _MASK
    value ^= value >> 29
    value = value * _LINK & _MASK
    return value ^ value >> 32


@lru_cache(maxsize=64)
def _weights(count: int) -> npt.NDArray[np.uint64]:
    """Odd multipliers, one for each place in a block."""
    return np.array([mix(_SPREAD * (i + 1)) | 1 for i in range(count)], dtype=np.uint64)


@lru_cache(maxsize=64)
def _positions(count: int) -> npt.NDArray[np.uint64]:
    """Powers of an odd constant, one for each block of a chain."""
    powers = np.full(count, _POSITION, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Chain:
    """Hashes of the whole blocks of a token sequence, and what it takes to continue them."""

    hashes: list[int]
    total: int
    "Sum of the weighted digests so far, before the last mix."


def salt_seed(salt: str | None) -> int:
    """Where a chain starts. Sequences under different salts share no block."""
    if salt is None:
        return 0
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")


def chain_blocks(tokens: Tokens, block_tokens: int, total: int, first_block: int = 0) -> Chain:
    """Chain the whole blocks of `tokens`, the first of which is block `first_block` of the chain.

    `total` is a salt seed, or the `total` of the chain so far.
    """
    count = len(tokens) // block_tokens
    if count == 0:
        return Chain([], total)
    spread = tokens[: count * block_tokens].astype(np.uint64)
    spread *= np.uint64(_SPREAD)
    spread ^= spread >> np.uint64(32)
    digests = spread.reshape(count, block_tokens) @ _weights(block_tokens)
    digests ^= digests >> np.uint64(31)
    digests *= np.uint64(_DIGEST)
    digests ^= digests >> np.uint64(29)
    size = 1 << (first_block + count - 1).bit_length()
    digests *= _positions(size)[first_block : first_block + count]
    totals = np.cumsum(digests, dtype=np.uint64)
    totals += np.uint64(total)
    links = totals ^ (totals >> np.uint64(32))
    links *= np.uint64(_LINK)
    links ^= links >> np.uint64(29)
    return Chain(links.tolist(), int(totals[-1]))


def sequence_identity(total: int, tail: Tokens) -> int:
    """Identity of a sequence: of its chained blocks and the `tail` that fills no block."""
    value = total ^ _SPREAD
    for token, weight in zip(tail.tolist(), _tail_weights(), strict=False):
        value += (token + 1) * weight
    return mix(value)


@lru_cache(maxsize=1)
def _tail_weights() -> list[int]:
    weights: list[int] = _weights(_LONGEST_BLOCK).tolist()
    return weights
