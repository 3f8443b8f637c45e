"""One call on its way through a worker: from submitted sequences to the last byte."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING

from simulator.engine import Reason
from simulator.engine import Sequence as EngineSequence
from simulator.http_server import Exchange
from simulator.text import Answer
from simulator.vllm import errors, replies, requests, streams

if TYPE_CHECKING:
    from simulator.worker import Worker

_FINISH = {Reason.LENGTH: "length", Reason.STOP: "stop"}


class Generation:
    """Turns the progress of a call's sequences into its response."""

    __slots__ = (
        "_call",
        "_choices",
        "_exchange",
        "_indexes",
        "_left",
        "_sequences",
        "_stream",
        "_worker",
    )

    def __init__(
        self,
        worker: Worker,
        exchange: Exchange,
        call: requests.Call,
        sequences: list[EngineSequence],
    ) -> None:
        self._worker = worker
        self._exchange = exchange
        self._call = call
        self._sequences = sequences
        self._indexes = {s.request.id: i for i, s in enumerate(sequences)}
        self._choices: list[replies.Choice | None] = [None] * len(sequences)
        self._left = len(sequences)
        self._stream = streams.Stream(call, int(time())) if call.stream else None

    def begin(self) -> None:
        exchange = self._exchange
        for sequence in self._sequences:
            self._worker.own(self, sequence)
        exchange.on_gone = self._gone
        if self._stream is not None:
            exchange.on_writable = self._catch_up
            exchange.open_stream()

    def _gone(self) -> None:
        self._worker.abandon(self._sequences)

    def progress(self, sequence: EngineSequence) -> None:
        """`sequence` has new tokens, or has ended."""
        if self._exchange.done:
            return
        if sequence.reason is Reason.ERROR:
            self._fail(sequence)
            return
        index = self._indexes[sequence.request.id]
        ended = sequence.reason is not None
        choice = self._choice(index, sequence)
        if sequence.reason is not None and not ended:
            return  # a stop string ends it within these tokens: told again, as an end
        if not self._broken(sequence):
            self._pass_on(index, choice, sequence)

    def _pass_on(self, index: int, choice: replies.Choice, sequence: EngineSequence) -> None:
        if sequence.reason is not None:
            self._left -= 1
            choice.finish = _FINISH.get(sequence.reason, "abort")
        if self._stream is None:
            if self._left == 0:
                self._reply()
        elif self._exchange.writable:
            self._send(self._stream, [index])

    def _choice(self, index: int, sequence: EngineSequence) -> replies.Choice:
        choice = self._choices[index]
        if choice is None:
            answer = Answer(sequence.key, sequence.request.choice)
            choice = replies.Choice(index, answer, sequence.request.tokens)
            self._choices[index] = choice
            if self._call.stops:
                self._find_stop(choice, sequence)
        return choice

    def _find_stop(self, choice: replies.Choice, sequence: EngineSequence) -> None:
        call = self._call
        found = choice.answer.stop_at(list(call.stops), sequence.limit, call.min_tokens)
        if found is None:
            return
        tokens, characters, stop = found
        choice.stop = stop
        choice.text_end = characters + (len(stop) if call.include_stop else 0)
        worker = self._worker
        worker.engine.cap(sequence, tokens, worker.now_s)

    def _broken(self, sequence: EngineSequence) -> bool:
        """Whether a fault ends the call here."""
        faults = self._worker.faults
        limits = (faults.error_after_tokens, faults.cut_after_tokens, faults.freeze_after_tokens)
        if limits == (None, None, None):
            return False
        for limit, act in zip(limits, (self._fail_with, self._cut, self._freeze), strict=True):
            if limit is not None and sequence.generated > limit:
                sequence.generated = limit
                act(sequence)
                return True
        return False

    def _fail_with(self, sequence: EngineSequence) -> None:
        if self._stream is not None and sequence.reported < sequence.generated:
            self._send(self._stream, [self._indexes[sequence.request.id]])
        self._fail(sequence)
        self._worker.abandon(self._sequences)

    def _cut(self, sequence: EngineSequence) -> None:
        if self._stream is not None and sequence.reported < sequence.generated:
            self._send(self._stream, [self._indexes[sequence.request.id]])
        self._exchange.cut()
        self._worker.abandon(self._sequences)

    def _freeze(self, sequence: EngineSequence) -> None:
        if self._stream is not None and sequence.reported < sequence.generated:
            self._send(self._stream, [self._indexes[sequence.request.id]])

    # -- what is sent ---------------------------------------------------------------------------

    def _usage(self) -> replies.Usage:
        call = self._call
        tokens = self._worker.config.block_tokens
        parents = self._sequences[:: call.n]
        cached = sum(s.cached_tokens or 0 for s in parents)
        created = None
        if call.endpoint == "chat":
            first = parents[0]
            own = 0 if first.external_tokens else first.prompt_len // tokens * tokens
            created = max(0, own - (first.cached_tokens or 0))
        return replies.Usage(
            prompt_tokens=sum(s.prompt_len for s in parents),
            completion_tokens=sum(s.generated for s in self._sequences),
            cached_tokens=cached,
            created_tokens=created,
        )

    def _reply(self) -> None:
        choices = [choice for choice in self._choices if choice is not None]
        body = replies.reply(
            self._call,
            int(time()),
            choices,
            [sequence.generated for sequence in self._sequences],
            self._usage(),
            self._worker.transfers.handoff(self._sequences[0]),
        )
        self._exchange.reply(200, body)

    def _catch_up(self) -> None:
        if self._stream is not None and not self._exchange.done:
            self._send(self._stream, range(len(self._sequences)))

    def _send(self, stream: streams.Stream, indexes: list[int] | range) -> None:
        events: list[bytes] = []
        for index in indexes:
            events += self._events(stream, index)
        ended = self._left == 0 and all(
            s.reported == s.generated and s.reason is not None for s in self._sequences
        )
        if ended:
            events += stream.closing(self._usage())
        if events:
            self._exchange.send(events, last=ended)

    def _events(self, stream: streams.Stream, index: int) -> list[bytes]:
        choice, sequence = self._choices[index], self._sequences[index]
        if choice is None:
            return []
        first, count = sequence.reported, sequence.generated - sequence.reported
        interval = self._call.stream_interval
        if choice.finish is None and interval > 1 and first:
            count -= count % interval
        if count <= 0:
            return []
        plain = interval == 1 and not self._call.continuous_usage
        usage = _NO_USAGE if plain and choice.opened else self._usage()
        events = [] if choice.opened else stream.opening(choice, usage)
        handoff = self._worker.transfers.handoff(sequence) if choice.finish else None
        sequence.reported = first + count
        return events + stream.tokens(choice, first, count, usage, handoff)

    def _fail(self, sequence: EngineSequence) -> None:
        exchange = self._exchange
        if self._stream is None:
            exchange.reply(500, errors.INTERNAL_ERROR.body())
        else:
            index = self._indexes[sequence.request.id]
            choice = self._choices[index] or replies.Choice(
                index, Answer(0), sequence.request.tokens
            )
            events = [] if choice.opened else self._stream.opening(choice, self._usage())
            exchange.send([*events, errors.ERROR_EVENT, streams.DONE], last=True)
        if len(self._sequences) > 1:
            self._worker.abandon(self._sequences)


_NO_USAGE = replies.Usage(0, 0, 0, None)
