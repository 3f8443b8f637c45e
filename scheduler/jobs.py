"""What the scheduler places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Job:
    """One call, as far as placing it is concerned.

    `held_tokens` maps a worker's id to the leading prompt tokens it holds; absent means none.
    `decode_only` says that the call must not be split over two workers. `excluded` are workers on
    which it failed before.
    """

    id: str
    prompt_tokens: int
    expected_output_tokens: int
    held_tokens: Mapping[str, int] = field(default_factory=dict)
    decode_only: bool = False
    excluded: frozenset[str] = frozenset()

    def cached_tokens(self, worker_id: str) -> int:
        """Prompt tokens that `worker_id` need not compute. The last one never counts as cached:
        an engine computes it again to have something to sample from."""
        return min(self.held_tokens.get(worker_id, 0), max(self.prompt_tokens - 1, 0))
