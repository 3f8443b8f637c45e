"""The engine core: continuous batching over a paged KV cache, driven by a clock it is given.

Nothing here reads a clock, does I/O or rolls dice. A driver calls `submit`, `abort` and `advance`
with the engine's time and carries out the `Action`s that come back (reading KV from another
engine, telling it that its blocks are free). The same class serves sockets in real time and whole
fleets in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from simulator.batch import Batch, Link, Queue, Step, Timers
from simulator.blocks import BlockManager
from simulator.hashing import chain_blocks, salt_seed, sequence_identity
from simulator.kv_contents import KvContents
from simulator.profile import Profile
from simulator.sequence import (
    Action,
    Heartbeat,
    Pin,
    Progress,
    Pull,
    Reason,
    Release,
    RemoteKv,
    Request,
    Sequence,
    State,
    Totals,
)
from simulator.text import natural_length

__all__ = [
    "Action",
    "Engine",
    "EngineDeadError",
    "Heartbeat",
    "Progress",
    "Pull",
    "Reason",
    "Release",
    "RemoteKv",
    "Request",
    "Sequence",
    "State",
    "Totals",
]

DEFAULT_LEASE_S = 30.0
_HEARTBEATS_PER_LEASE = 6
_LEASE_PER_HEARTBEAT = 2 / 3
# A peer that cannot be reached: at once where a connection existed, else after its time-outs.
KNOWN_PEER_FAILS_S = 0.1
UNKNOWN_PEER_FAILS_S = 4.5


class EngineDeadError(Exception):
    """The engine core has died; nothing can be submitted until a restart."""


class Engine:
    """One worker's scheduler and KV cache. All times are seconds of the engine's own clock."""

    def __init__(
        self,
        profile: Profile,
        *,
        engine_id: str = "engine",
        block_tokens: int = 16,
        lease_s: float = DEFAULT_LEASE_S,
        recompute_failed_loads: bool = False,
        record_kv_events: bool = False,
    ) -> None:
        self.profile = profile
        self.engine_id = engine_id
        self.block_tokens = block_tokens
        self.lease_s = lease_s
        self.recompute_failed_loads = recompute_failed_loads
        self.blocks = BlockManager(profile.capacity_tokens // block_tokens)
        self.contents = KvContents(self.blocks, block_tokens, record_events=record_kv_events)
        self.max_model_len = min(profile.max_model_len, self.blocks.capacity * block_tokens)
        self.totals = Totals()
        self.pace = 1.0
        "Factor on the time of every step: 2 is half as fast."
        self.dead = False
        self.pins: dict[str, Pin] = {}
        self._sequences: dict[str, Sequence] = {}
        self._queue = Queue()
        self._batch = Batch()
        self._full = False
        "The last look at the queue found no room; only an end, a release or a timer makes some."
        self._step: Step | None = None
        self._timers = Timers()
        self._now_s = 0.0
        self._progress = Progress()
        self._link = Link()

    # -- what a driver asks ---------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._batch.admitted)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def pulling(self) -> int:
        return len(self._queue.pulling)

    @property
    def loaded(self) -> int:
        return len(self._queue.loaded)

    @property
    def prefilling(self) -> int:
        return len(self._batch.prefilling)

    @property
    def now_s(self) -> float:
        return self._now_s

    def next_event_s(self) -> float | None:
        """When `advance` has something to do next; None while nothing is under way."""
        step = self._step.end_s if self._step else inf
        timer = self._timers.next_s
        first = min(step, timer)
        return None if first == inf else first

    def next_change_s(self) -> float | None:
        """When a sequence next starts, gets its first token or ends: what virtual time waits for.

        Never later than the next such moment, and much less often than every step.
        """
        first = self.next_event_s()
        step = self._step
        if first is None or step is None or step.prefill or first < step.end_s:
            return first
        leap = self._leap_limit(step)
        end_s = step.end_s + self._decode_seconds(leap - 1, len(step.decode))
        timer = self._timers.next_s
        return min(end_s, timer)

    @property
    def has_news(self) -> bool:
        """Whether `advance` would hand over anything, however short the time."""
        return bool(self._progress.sequences or self._progress.actions)

    def holders(self) -> Iterator[list[int]]:
        """Every list of blocks that is held: by a sequence or by a lease."""
        for sequence in self._sequences.values():
            yield sequence.blocks
        for pin in self.pins.values():
            yield pin.blocks

    # -- what a driver does ---------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> Sequence:
        """Queue a request. Raises ValueError if it can never run here."""
        if self.dead:
            raise EngineDeadError
        prompt_len = len(request.tokens)
        if prompt_len == 0:
            raise ValueError("the prompt has no tokens")
        if prompt_len >= self.max_model_len:
            raise ValueError("the prompt does not leave room for one token")
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is already running")
        self._run_until(now_s)
        chain = chain_blocks(request.tokens, self.block_tokens, salt_seed(request.salt))
        tail = request.tokens[len(chain.hashes) * self.block_tokens :]
        identity = sequence_identity(chain.total, tail)
        limit = self._limit(request, identity)
        sequence = Sequence(request, chain, identity, limit, self._now_s)
        sequence.natural = request.max_tokens is None
        self._sequences[request.id] = sequence
        self.totals.requests += 1
        remote = request.remote
        if remote is not None and remote.engine_id is None:
            self._queue.hung.add(request.id)
            self._queue.pulling[request.id] = sequence
            sequence.state = State.PULLING
        else:
            if remote is not None:
                self._beat(sequence)
            self._queue.waiting.append(sequence)
            if self._step is None:
                self._start_step()
        return sequence

    def _limit(self, request: Request, identity: int) -> int:
        room = self.max_model_len - len(request.tokens)
        wanted = request.max_tokens
        if wanted is None:
            wanted = max(natural_length(identity), request.min_tokens)
        return max(1, min(wanted, room))

    def abort(self, request_id: str, now_s: float) -> bool:
        """The client has gone. False if the request is not here (any more)."""
        self._run_until(now_s)
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if request_id in self._queue.hung:
            self.kill()
            return True
        self.totals.aborted += 1
        self._withdraw(sequence)
        self._finish(sequence, Reason.ABORT)
        if self._step is None:
            self._start_step()
        return True

    def cap(self, sequence: Sequence, limit: int, now_s: float) -> None:
        """End a sequence after `limit` tokens: a stop string completes there."""
        self._run_until(now_s)
        sequence.natural = True
        sequence.limit = min(sequence.limit, limit)
        if sequence.generated < sequence.limit:
            return
        self.totals.output -= sequence.generated - sequence.limit
        sequence.generated = sequence.limit
        if sequence.state is State.FINISHED:
            sequence.reason = Reason.STOP
            return
        self._withdraw(sequence)
        self._complete(sequence)

    def advance(self, now_s: float) -> Progress:
        """Run everything that is due, and hand over what happened since the last call."""
        self._run_until(now_s)
        progress, self._progress = self._progress, Progress()
        for sequence in progress.sequences:
            sequence.touched = False
        return progress

    def advance_quietly(self, now_s: float) -> None:
        """Run everything that is due; what happened stays for the next `advance`."""
        self._run_until(now_s)

    def pulled(self, request_id: str, contents: Iterable[int], now_s: float) -> None:
        """The other engine let its blocks be read: this is what they hold. The transfer starts."""
        self._run_until(now_s)
        sequence = self._queue.pulling.get(request_id)
        if sequence is None:
            return
        remote = sequence.request.remote
        assert remote is not None
        received = self.contents.receive(sequence, contents)
        cost = self.profile.transfer
        size_bytes = received * self.block_tokens * self.profile.kv_bytes_per_token
        start_s = max(self._now_s, self._link.free_s)
        end_s = start_s + cost.seconds(size_bytes)
        self._link.free_s = start_s + size_bytes / cost.bytes_per_s
        if remote.engine_id is not None and remote.engine_id not in self._link.peers:
            self._link.peers.add(remote.engine_id)
            end_s += cost.handshake_s
        if not remote.push:  # whoever moves the bytes counts them
            self.count_transfer(size_bytes, end_s - self._now_s)
        self._timers.add(end_s, "loaded", sequence)

    def count_transfer(self, size_bytes: int, seconds: float) -> None:
        self.totals.transfers += 1
        self.totals.transfer_bytes += size_bytes
        self.totals.transfer_s += seconds

    def pull_failed(self, request_id: str, now_s: float, *, reached: bool = False) -> None:
        """The blocks cannot be had. `reached`: the other engine answered, so nothing timed out."""
        self._run_until(now_s)
        sequence = self._queue.pulling.get(request_id)
        if sequence is None:
            return
        remote = sequence.request.remote
        known = reached or (remote is not None and remote.engine_id in self._link.peers)
        delay_s = KNOWN_PEER_FAILS_S if known else UNKNOWN_PEER_FAILS_S
        self._timers.add(self._now_s + delay_s, "failed", sequence)

    def extend_pin(self, request_id: str, now_s: float) -> bool:
        """A decode engine's heartbeat. False if the lease is over."""
        self._run_until(now_s)
        pin = self.pins.get(request_id)
        if pin is None:
            return False
        pin.expires_s = max(pin.expires_s, self._now_s + self.lease_s * _LEASE_PER_HEARTBEAT)
        return True

    def release_pin(self, request_id: str, now_s: float) -> bool:
        """A decode engine has what it wants. False if the lease is over."""
        self._run_until(now_s)
        pin = self.pins.pop(request_id, None)
        if pin is None:
            self.totals.late_releases += 1
            return False
        self.blocks.release(pin.blocks)
        if self._step is None:
            self._start_step()
        return True

    def drop_pins(self) -> None:
        """Free what waits for decode engines, without counting it as expired."""
        for pin in self.pins.values():
            self.blocks.release(pin.blocks)
        self.pins.clear()

    def reset_cache(self, now_s: float) -> bool:
        """Forget the prefix cache. False while any block is held."""
        self._run_until(now_s)
        return self.contents.clear_cache()

    def kill(self) -> None:
        """The engine core dies: everything in flight ends in an error."""
        self.dead = True
        for sequence in list(self._sequences.values()):
            self._finish(sequence, Reason.ERROR)
        self._queue = Queue()
        self._batch = Batch()
        self._timers = Timers()
        self._step = None

    # -- time -----------------------------------------------------------------------------------

    def _run_until(self, now_s: float) -> None:
        while not self.dead:
            timer_s = self._timers.next_s
            step = self._step
            step_s = step.end_s if step else inf
            if min(timer_s, step_s) > now_s:
                break
            if step is None or timer_s <= step_s:
                self._now_s = max(self._now_s, timer_s)
                self._fire()
            else:
                self._finish_step(step, min(now_s, timer_s))
            if self._step is None:
                self._start_step()
        self._now_s = max(self._now_s, now_s)

    def _fire(self) -> None:
        what, subject = self._timers.pop()
        if isinstance(subject, str):
            self._expire(subject)
        elif what == "beat":
            self._beat(subject)
        elif what == "loaded":
            self._loaded_kv(subject)
        else:
            self._load_failed(subject)

    def _expire(self, request_id: str) -> None:
        pin = self.pins.get(request_id)
        if pin is None:
            return
        if pin.expires_s > self._now_s:
            self._timers.add(pin.expires_s, "expire", request_id)
            return
        del self.pins[request_id]
        self.blocks.release(pin.blocks)
        self.totals.expired += 1

    def _beat(self, sequence: Sequence) -> None:
        remote = sequence.request.remote
        if remote is None or sequence.external_tokens:
            return
        if sequence.state not in (State.WAITING, State.PULLING):
            return
        self._progress.actions.append(Heartbeat(remote))
        self._timers.add(self._now_s + self.lease_s / _HEARTBEATS_PER_LEASE, "beat", sequence)

    # -- remote KV ------------------------------------------------------------------------------

    def _loaded_kv(self, sequence: Sequence) -> None:
        if sequence.state is not State.PULLING:
            return
        remote = sequence.request.remote
        assert remote is not None
        del self._queue.pulling[sequence.request.id]
        sequence.external_tokens = sequence.prompt_len - sequence.computed
        self.totals.external_hits += sequence.external_tokens
        sequence.computed = sequence.prompt_len - 1
        self.contents.publish(sequence, sequence.prompt_len)
        sequence.state = State.LOADED
        self._queue.loaded.append(sequence)
        self._progress.actions.append(Release(remote))

    def _load_failed(self, sequence: Sequence) -> None:
        if sequence.state is not State.PULLING:
            return
        self.totals.transfer_failures += 1
        del self._queue.pulling[sequence.request.id]
        if not self.recompute_failed_loads:
            self._finish(sequence, Reason.ERROR)
            return
        # The blocks stay with the sequence: it computes into them what it could not load.
        sequence.cached_tokens = sequence.computed
        self.contents.compute(sequence)
        sequence.state = State.LOADED
        self._queue.loaded.append(sequence)

    # -- the batch ------------------------------------------------------------------------------

    def _start_step(self) -> None:
        if self.dead or self._step is not None:
            return
        crowded = self._grow()
        self._full = crowded
        budget = self.profile.max_batched_tokens - len(self._batch.decoding)
        prefill: list[tuple[Sequence, int]] = []
        for sequence in self._batch.prefilling:
            budget -= self._schedule(sequence, budget, prefill)
        while budget > 0 and not self._full:
            admitted = self._admit()
            if admitted is None:
                break
            budget -= self._schedule(admitted, budget, prefill)
        if not prefill and not self._batch.decoding:
            return
        duration_s = self._step_seconds(prefill)
        self._step = Step(
            self._now_s, self._now_s + duration_s, prefill, list(self._batch.decoding)
        )

    def _schedule(
        self, sequence: Sequence, budget: int, prefill: list[tuple[Sequence, int]]
    ) -> int:
        missing = sequence.prompt_len + sequence.generated - sequence.computed
        chunk = min(missing, budget)
        if chunk > 0:
            prefill.append((sequence, chunk))
            self.contents.publish(sequence, sequence.computed + chunk)
        return chunk

    def _step_seconds(self, prefill: list[tuple[Sequence, int]]) -> float:
        """Time of a step. A chunk of one token behind others is as good as a decode step."""
        batch = len(self._batch.decoding)
        context = self._batch.context_tokens
        chunks = []
        for sequence, size in prefill:
            if size == 1 and sequence.computed:
                batch += 1
                context += sequence.computed
            else:
                chunks.append((size, sequence.computed))
        return self.profile.step_seconds(chunks, batch, context) * self.pace

    def _admit(self) -> Sequence | None:
        """The next sequence that joins the batch; starts pulls on the way."""
        if len(self._batch.admitted) >= self.profile.max_running:
            self._full = True
            return None
        if self._queue.loaded:
            sequence = self._queue.loaded.popleft()
            self._join(sequence)
            return sequence
        while self._queue.waiting:
            sequence = self._queue.waiting[0]
            needed = sequence.prompt_len + sequence.generated
            matched = self.blocks.match(sequence.chain.hashes, (needed - 1) // self.block_tokens)
            total = -(-needed // self.block_tokens)
            taken = self.blocks.take(matched, total - len(matched))
            if taken is None:
                self._full = True
                return None
            self._queue.waiting.popleft()
            self._place(sequence, taken, len(matched))
            if sequence.request.remote is None or sequence.cached_tokens is not None:
                self._settle(sequence)
                self._join(sequence)
                return sequence
            self._start_pull(sequence, sequence.request.remote)
        return None

    def _place(self, sequence: Sequence, taken: list[int], matched: int) -> None:
        sequence.blocks = taken
        sequence.hits = sequence.published = matched
        sequence.computed = matched * self.block_tokens
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self._now_s
        self.totals.cache_queries += sequence.prompt_len + sequence.generated
        self.totals.cache_hits += sequence.computed

    def _settle(self, sequence: Sequence) -> None:
        """Blocks are about to be computed here: say what will lie in them."""
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.own_cached = sequence.computed
        self.contents.compute(sequence)

    def _start_pull(self, sequence: Sequence, remote: RemoteKv) -> None:
        sequence.state = State.PULLING
        sequence.cached_tokens = (
            remote.cached_tokens if remote.cached_tokens is not None else sequence.prompt_len
        )
        sequence.own_cached = sequence.computed
        self.totals.external_queries += sequence.prompt_len - sequence.computed
        self._queue.pulling[sequence.request.id] = sequence
        self._progress.actions.append(Pull(sequence, remote))

    def _join(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self._batch.join(sequence)

    def _grow(self) -> bool:
        """Every decoding sequence gets the block its next token needs. True: somebody gave way."""
        tokens = self.block_tokens
        preempted = False
        for sequence in list(self._batch.decoding):
            if sequence.state is not State.RUNNING:
                continue
            while sequence.computed >= len(sequence.blocks) * tokens:
                more = self.blocks.take((), 1)
                if more is not None:
                    sequence.blocks += more
                    continue
                victim = self._batch.admitted[-1]
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    break
        return preempted

    def _preempt(self, victim: Sequence) -> None:
        self.contents.extend_chain(victim)
        self.contents.publish(victim, victim.computed)
        self._withdraw(victim)
        self.blocks.release(victim.blocks)
        victim.blocks = []
        victim.computed = victim.hits = victim.published = 0
        victim.preemptions += 1
        victim.state = State.WAITING
        self.totals.preemptions += 1
        self._queue.waiting.appendleft(victim)

    def _finish_step(self, step: Step, until_s: float) -> None:
        """End the step in flight, and a run of equal ones behind it that end by `until_s`."""
        self._now_s = step.end_s
        self._step = None
        steps = 1 if step.prefill else self._leap(step, until_s)
        self.totals.steps += steps
        self.totals.busy_s += self._now_s - step.start_s
        for sequence, chunk in step.prefill:
            if sequence.state is State.RUNNING:
                self._computed_chunk(sequence, chunk)
        self._decoded(step.decode, steps)

    def _decoded(self, batch: list[Sequence], steps: int) -> None:
        """Give every sequence of the batch that is still there `steps` tokens."""
        touched = self._progress.sequences
        present = [s for s in batch if s.state is State.RUNNING]
        ended = False
        for sequence in present:
            sequence.computed += steps
            sequence.generated += steps
            if not sequence.touched:
                sequence.touched = True
                touched.append(sequence)
            if sequence.generated >= sequence.limit:
                ended = True
        self.totals.output += steps * len(present)
        self._batch.context_tokens += steps * len(present)
        if not ended:
            return
        for sequence in present:
            if sequence.generated >= sequence.limit:
                self._withdraw(sequence)
                self._complete(sequence)

    def _computed_chunk(self, sequence: Sequence, chunk: int) -> None:
        sequence.computed += chunk
        self.totals.computed += min(chunk, max(0, sequence.prompt_len - sequence.computed + chunk))
        if sequence.computed < sequence.prompt_len + sequence.generated:
            return
        self._batch.start_decoding(sequence)
        if sequence.generated == 0:
            sequence.first_token_s = self._now_s
            sequence.key = self.contents.identity(sequence)
            self._count_prompt(sequence)
        sequence.generated += 1
        self.totals.output += 1
        self._touch(sequence)
        if sequence.generated >= sequence.limit:
            self._withdraw(sequence)
            self._complete(sequence)

    def _count_prompt(self, sequence: Sequence) -> None:
        totals = self.totals
        totals.prompt += sequence.prompt_len
        totals.cached += sequence.own_cached
        totals.external += sequence.external_tokens
        totals.local_compute += sequence.prompt_len - sequence.own_cached - sequence.external_tokens

    # -- runs of equal steps --------------------------------------------------------------------

    def _leap_limit(self, step: Step) -> int:
        """Steps, the one in flight included, until a sequence ends or another may join."""
        if self._batch.prefilling or (
            (self._queue.waiting or self._queue.loaded) and not self._full
        ):
            return 1
        left = [s.limit - s.generated for s in step.decode if s.state is State.RUNNING]
        return min(left, default=1)

    def _decode_seconds(self, steps: int, batch: int) -> float:
        """Time of `steps` equal steps behind the one in flight."""
        context = self._batch.context_tokens
        return self.profile.decode.run_seconds(steps, batch, context) * self.pace

    def _leap(self, step: Step, until_s: float) -> int:
        """How many equal steps end by `until_s`; moves the clock to the end of the last."""
        batch = len(step.decode)
        if step.end_s >= until_s or any(s.state is not State.RUNNING for s in step.decode):
            return 1
        low, high = 1, self._leap_limit(step)
        while low < high:
            middle = (low + high + 1) // 2
            if step.end_s + self._decode_seconds(middle - 1, batch) <= until_s:
                low = middle
            else:
                high = middle - 1
        if low == 1 or not self._grow_by(step.decode, low):
            return 1
        self._now_s = step.end_s + self._decode_seconds(low - 1, batch)
        return low

    def _grow_by(self, sequences: list[Sequence], steps: int) -> bool:
        """Give sequences the blocks that `steps` more tokens need; False if room is short."""
        tokens = self.block_tokens
        wanted = [max(0, -(-(s.computed + steps) // tokens) - len(s.blocks)) for s in sequences]
        taken = self.blocks.take((), sum(wanted))
        if taken is None:
            return False
        for sequence, more in zip(sequences, wanted, strict=True):
            if more:
                sequence.blocks += taken[-more:]
                del taken[-more:]
        return True

    # -- ends -----------------------------------------------------------------------------------

    def _touch(self, sequence: Sequence) -> None:
        if not sequence.touched:
            sequence.touched = True
            self._progress.sequences.append(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever queue or batch it is in; it keeps its blocks."""
        if sequence.state is State.RUNNING:
            self._batch.withdraw(sequence)
        else:
            self._queue.withdraw(sequence)

    def _complete(self, sequence: Sequence) -> None:
        self._finish(sequence, Reason.STOP if sequence.natural else Reason.LENGTH)

    def _finish(self, sequence: Sequence, reason: Reason) -> None:
        """Release or pin the blocks. The sequence is out of every queue already."""
        loading = sequence.state in (State.WAITING, State.PULLING)
        self.contents.extend_chain(sequence)
        if sequence.state is State.RUNNING:
            self.contents.publish(sequence, sequence.computed)
        self._sequences.pop(sequence.request.id, None)
        remote = sequence.request.remote
        failed = reason in (Reason.ABORT, Reason.ERROR)
        if failed and loading and remote and remote.engine_id and not self.dead:
            self._progress.actions.append(Release(remote))
        if sequence.request.keep_kv and not failed:
            pin = Pin(sequence.blocks, self._now_s + self.lease_s)
            self.pins[sequence.request.id] = pin
            self._timers.add(pin.expires_s, "expire", sequence.request.id)
        else:
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
        sequence.state = State.FINISHED
        sequence.reason = reason
        sequence.finished_s = self._now_s
        self._touch(sequence)
