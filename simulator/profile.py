"""How long a GPU takes: the constants of one kind of worker, and the forms they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

JSON = dict[str, Any]

SHIPPED_DIR = Path(__file__).with_name("profiles")


class ProfileError(Exception):
    """A profile that cannot be found or read; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute `u` prompt tokens on top of `c` that are in KV.

    `a + max(floor, b u) + d u (c + u/2) + e c`: a constant, the matrices (never faster than
    `floor`, the time to read the weights), attention, and reading the context.
    """

    a: float
    b: float
    d: float
    e: float
    floor: float = 0.0

    def seconds(self, new_tokens: int, context_tokens: int) -> float:
        attention = self.d * new_tokens * (context_tokens + new_tokens / 2)
        return self.a + max(self.floor, self.b * new_tokens) + attention + self.e * context_tokens


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one step that gives each of `batch` sequences a token.

    `a + b batch + max(d batch, floor) context`, where `context` is their mean length: attention
    over one long sequence does not fill the device, so its time has a floor per token.
    """

    a: float
    b: float
    d: float
    floor: float = 0.0

    def seconds(self, batch: int, context_tokens: float) -> float:
        return self.a + self.b * batch + max(self.d * batch, self.floor) * context_tokens

    def run_seconds(self, steps: int, batch: int, context_tokens: int) -> float:
        """`steps` steps in a row, behind one that starts with `context_tokens` over all."""
        rate = max(self.d * batch, self.floor) / batch
        context = context_tokens * steps + batch * steps * (steps + 1) / 2
        return (self.a + self.b * batch) * steps + rate * context


@dataclass(frozen=True, slots=True)
class TransferCost:
    """KV pulled from another worker: `handshake_s` once per pair, then latency and bandwidth."""

    latency_s: float
    bytes_per_s: float
    handshake_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of worker."""

    name: str
    prefill: PrefillCost
    decode: DecodeCost
    transfer: TransferCost
    kv_bytes_per_token: int
    capacity_tokens: int
    max_model_len: int
    max_running: int
    max_batched_tokens: int
    notes: tuple[str, ...] = ()

    def step_seconds(
        self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int
    ) -> float:
        """One step: prefill `chunks`, each (new tokens, tokens in KV), and `batch` decode tokens.

        `context_tokens` is the sum over the decoding ones. The constant of the two forms is paid
        once, and the weights are read once for all chunks.
        """
        decode, cost = self.decode, self.prefill
        seconds = decode.seconds(batch, context_tokens / batch) if batch else 0.0
        if chunks:
            new = sum(size for size, _ in chunks)
            attention = sum(
                cost.d * size * (before + size / 2) + cost.e * before for size, before in chunks
            )
            seconds += max(cost.floor, cost.b * new) + attention
            seconds += cost.a - (min(cost.a, decode.a) if batch else 0.0)
        return seconds


def parse(data: Mapping[str, Any], source: str) -> Profile:
    known = {field.name for field in fields(Profile)}
    unknown, missing = set(data) - known, known - set(data) - {"notes"}
    if unknown or missing:
        raise ProfileError(f"{source}: unknown keys {sorted(unknown)}, missing {sorted(missing)}")
    try:
        return Profile(
            **{
                **data,
                "prefill": PrefillCost(**data["prefill"]),
                "decode": DecodeCost(**data["decode"]),
                "transfer": TransferCost(**data["transfer"]),
                "notes": tuple(data.get("notes", ())),
            }
        )
    except TypeError as error:
        raise ProfileError(f"{source}: {error}") from error


def load(name: str) -> Profile:
    """A shipped profile by name, or a profile file by path."""
    shipped = SHIPPED_DIR / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in SHIPPED_DIR.glob("*.json")))
        raise ProfileError(f"no profile {name!r}: give one of {names}, or a file")
    try:
        data = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ProfileError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: a profile is a JSON object")
    return parse(data, str(path))


def resized(
    profile: Profile,
    *,
    capacity_tokens: int | None = None,
    max_model_len: int | None = None,
    max_running: int | None = None,
    max_batched_tokens: int | None = None,
) -> Profile:
    """`profile` with other limits; the window never exceeds the KV capacity."""
    capacity = capacity_tokens or profile.capacity_tokens
    return replace(
        profile,
        capacity_tokens=capacity,
        max_model_len=min(max_model_len or profile.max_model_len, capacity),
        max_running=max_running or profile.max_running,
        max_batched_tokens=max_batched_tokens or profile.max_batched_tokens,
    )
