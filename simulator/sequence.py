"""What an engine works on: requests, the sequences they become, and what drivers are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from simulator.hashing import Chain, Tokens


class State(Enum):
    WAITING = "waiting"
    PULLING = "pulling"
    LOADED = "loaded"
    "KV has arrived; waits for its place in the batch."
    RUNNING = "running"
    FINISHED = "finished"


class Reason(Enum):
    """Why a sequence ended. The first two are what an API calls finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """A decode leg's claim on blocks of a prefill engine. `engine_id` None: a malformed claim."""

    engine_id: str | None
    request_id: str
    blocks: tuple[int, ...]
    host: str = ""
    port: int = 0
    cached_tokens: int | None = None
    "What the prefill engine found in its own cache, if it said so."
    push: bool = False
    "The prefill engine sends when it has finished `request_id`, whose blocks nobody names."


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What to generate. `max_tokens` None: until the answer ends by itself."""

    id: str
    tokens: Tokens
    max_tokens: int | None = None
    min_tokens: int = 0
    salt: str | None = None
    choice: int = 0
    keep_kv: bool = False
    "Pin the KV for another engine after the last token (`do_remote_decode`)."
    remote: RemoteKv | None = None
    "Pull the prompt's KV from another engine (`do_remote_prefill`)."


class Sequence:
    """One request inside the engine. Drivers read it; only the engine changes it."""

    __slots__ = (
        "arrival_s",
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "external_tokens",
        "finished_s",
        "first_token_s",
        "generated",
        "hits",
        "identity",
        "key",
        "limit",
        "natural",
        "own_cached",
        "preemptions",
        "prompt_len",
        "published",
        "reason",
        "reported",
        "request",
        "scheduled_s",
        "state",
        "touched",
    )

    def __init__(self, request: Request, chain: Chain, identity: int, limit: int, now_s: float):
        self.request = request
        self.chain = chain
        self.identity = identity
        self.key = identity
        "Identity of what the KV really holds; settled with the first token."
        self.limit = limit
        self.natural = False
        "The limit is where the answer ends by itself."
        self.prompt_len = len(request.tokens)
        self.state = State.WAITING
        self.reason: Reason | None = None
        self.blocks: list[int] = []
        self.hits = 0
        self.published = 0
        self.computed = 0
        self.generated = 0
        self.reported = 0
        "Tokens the driver has taken note of; the driver's to write."
        self.cached_tokens: int | None = None
        "What the request's usage reports: the prefill engine's number on a decode engine."
        self.own_cached = 0
        "Prompt tokens found in this engine's own cache."
        self.external_tokens = 0
        self.preemptions = 0
        self.arrival_s = now_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.touched = False

    def __repr__(self) -> str:
        return (
            f"<{self.request.id} {self.state.value} computed {self.computed}"
            f" of {self.prompt_len} + {self.generated}>"
        )


@dataclass(frozen=True, slots=True)
class Pull:
    """Read `remote` blocks and answer with `pulled` or `pull_failed`."""

    sequence: Sequence
    remote: RemoteKv


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the other engine that its blocks are not needed any more."""

    remote: RemoteKv


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Tell the other engine that its blocks are still wanted."""

    remote: RemoteKv


Action = Pull | Release | Heartbeat


@dataclass(slots=True)
class Progress:
    """What happened: sequences with new tokens or an end, and what the driver has to do."""

    sequences: list[Sequence] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class Pin:
    """Blocks kept for a decode engine until `expires_s`."""

    blocks: list[int]
    expires_s: float


@dataclass(slots=True)
class Totals:
    """Counters since the engine started. Tokens unless the name says otherwise."""

    requests: int = 0
    prompt: int = 0
    output: int = 0
    computed: int = 0
    "Prompt tokens computed here, recomputation after a preemption included."
    cached: int = 0
    external: int = 0
    local_compute: int = 0
    "Prompt tokens of finished prefills that neither a cache nor a transfer supplied."
    cache_queries: int = 0
    cache_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0
    aborted: int = 0
    expired: int = 0
    late_releases: int = 0
    transfers: int = 0
    transfer_failures: int = 0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    steps: int = 0
    busy_s: float = 0.0
