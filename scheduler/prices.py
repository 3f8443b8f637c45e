"""What work costs, in milliseconds: the constants of one kind of worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """Cost model of one kind of worker; all results are milliseconds.

    prefill(u, c) = a + b u + d u (c + u/2) + e c   for u tokens to compute behind c cached ones
    decode_step(n, x) = a + b n + d x                for n calls with x tokens of context together
    transfer(t) = latency + t * per token            for t tokens of KV moved
    """

    prefill_a: float
    prefill_b: float
    prefill_d: float
    prefill_e: float
    decode_a: float
    decode_b: float
    decode_d: float
    transfer_latency: float
    transfer_per_token: float
    # A prefill on a decode worker stalls the calls that stream there: how much dearer it is, at
    # rest and for each of them.
    interference_base: float = 2.0
    interference_per_call: float = 1.0

    def prefill(self, uncached_tokens: int, cached_tokens: int) -> float:
        u, c = uncached_tokens, cached_tokens
        return (
            self.prefill_a
            + self.prefill_b * u
            + self.prefill_d * u * (c + u / 2)
            + self.prefill_e * c
        )

    def decode_step(self, calls: float, context_tokens: float) -> float:
        return self.decode_a + self.decode_b * calls + self.decode_d * context_tokens

    def transfer(self, tokens: int) -> float:
        return self.transfer_latency + self.transfer_per_token * tokens

    def interference(self, calls: int) -> float:
        return self.interference_base + self.interference_per_call * calls


# The measurements and fits behind these numbers: docs/simulator.md.
PROFILES: Mapping[str, Prices] = {
    "h200-llama8b": Prices(
        prefill_a=4.829,
        prefill_b=0.01995,
        prefill_d=1.668e-6,
        prefill_e=9.369e-4,
        decode_a=5.098,
        decode_b=0.01339,
        decode_d=3.025e-5,
        transfer_latency=2.0,
        transfer_per_token=0.0026,
    ),
    "b300-tp4": Prices(
        prefill_a=9.0,
        prefill_b=0.1103,
        prefill_d=1.8e-6,
        prefill_e=2.0e-4,
        decode_a=9.0,
        decode_b=0.03,
        decode_d=1.0e-5,
        transfer_latency=3.0,
        transfer_per_token=0.0015,
    ),
}
