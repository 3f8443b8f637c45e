"""What became of one call: the record that metrics, the access log and later feedback read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Filled step by step while a call runs, observed once when it ends.

    `plan` is "pd" (prefill and decode apart), "decode" (one worker for both) or "none" (never
    placed). `code` is the HTTP status sent, or that of the error that ended a stream, or 499 where
    the client left first. The four prefix counts are prompt tokens: some worker held / the chosen
    one held / it was expected to reuse / the engine says it reused (None: it did not say). Times
    are None where the call never got so far; `ended_at` is Unix time.
    `retries` holds (stage, reason) of each failed attempt; `error` names a failure in one word.
    """

    request_id: str
    endpoint: str
    model: str = "unknown"
    queue: str = "default"
    plan: str = "none"
    code: int = 0
    stream: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    available_tokens: int = 0
    captured_tokens: int = 0
    predicted_tokens: int = 0
    delivered_tokens: int | None = None
    queue_wait_s: float | None = None
    decision_s: float | None = None
    prefill_s: float | None = None
    handoff_gap_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float = 0.0
    ended_at: float = 0.0
    retries: list[tuple[str, str]] = field(default_factory=list)
    rejected: str = ""
    disconnect_phase: str = ""
    missing_transfer_params: bool = False
    error: str = ""
