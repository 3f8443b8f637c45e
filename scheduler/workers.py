"""The scheduler's books: what each worker is, and what runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker: identity, what its engine reported last, and the sum of our leases on it.

    Reported: `up`, `epoch` (counts restarts), `block_tokens`, `capacity_tokens` (KV cache; None is
    not known), `kv_usage` (0 to 1), `engine_running`, `engine_waiting`.
    Charged by leases: `running` (calls that prefill here, or decode here or will), `prefill_jobs`,
    `prefill_work_tokens` and `prefill_work_ms` (prompt still to compute), `decode_jobs`,
    `decode_work_tokens` (prompt and expected output of calls that decode or will). Only placing and
    finishing a lease write these.
    """

    id: str
    url: str
    model: str
    pool: str
    role: Role
    weight: float = 1.0

    up: bool = False
    epoch: int = 0
    block_tokens: int = 16
    capacity_tokens: int | None = None
    kv_usage: float | None = None
    engine_running: int = 0
    engine_waiting: int = 0

    running: int = 0
    prefill_jobs: int = 0
    prefill_work_tokens: int = 0
    prefill_work_ms: float = 0.0
    decode_jobs: int = 0
    decode_work_tokens: int = 0
    # When this worker became busy with prefill or finished one last: work done since then is not
    # in the books yet.
    prefill_since_s: float = 0.0
    # Tokens of prefill placed here, fading with the work placed on the whole stage.
    recent_prefill_tokens: float = 0.0
    # Number of the last placement: among equals, the one longest without work is next.
    last_placed: int = 0

    @property
    def can_prefill(self) -> bool:
        return self.role != "decode"

    @property
    def can_decode(self) -> bool:
        return self.role != "prefill"
