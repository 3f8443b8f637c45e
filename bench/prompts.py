"""Turns a trace row's block ids into the messages of a chat call, so that equal ids are equal text.

Each id has its own filler text of `block_size` tokens. A message starts at the first block that
some row was the first to send (the point where a turn was added), which depends on ids alone:
rows that share leading ids share leading bytes, and a session's later turns extend its earlier
ones. What exceeds the whole blocks is a last user message of unique text.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bench.tokenisation import VOCABULARY, WORD_BYTES, Tokenisation, vocabulary
from bench.traces import Row

FILLER_WORDS = 1 << 16
DIGITS = 3
CACHE_BYTES = 128 << 20
BASE = VOCABULARY - 1  # the last word marks text that belongs to no block
_SPREAD = 0x9E3779B97F4A7C15  # odd 64-bit constant: neighbouring ids get distant filler

_ROLES = (b"user", b"assistant")


class Filler:
    """Text for numbers: distinct numbers below BASE**DIGITS differ within the first DIGITS words.

    The text is a slice of one long fixed text, cut at a place the number decides, behind words
    that spell the number.
    """

    def __init__(self, seed: str) -> None:
        self._words = vocabulary(seed)
        picks = random.Random(f"{seed}/filler").choices(self._words[:BASE], k=FILLER_WORDS)
        self._text = b"".join(picks)

    def block(self, number: int, words: int) -> bytes:
        """The first `words` words of that number's text; a shorter one is a prefix of a longer."""
        spelled = self._words
        head = (
            spelled[number % BASE]
            + spelled[number // BASE % BASE]
            + spelled[number // (BASE * BASE) % BASE]
        )
        rest = words - DIGITS
        if rest <= 0:
            return head[: words * WORD_BYTES]
        start = (number * _SPREAD >> 20) % FILLER_WORDS
        if start + rest <= FILLER_WORDS:
            return head + self._text[start * WORD_BYTES : (start + rest) * WORD_BYTES]
        return head + self._wrapped(start, rest)

    def unique(self, number: int, words: int) -> bytes:
        """As `block`, but never the start of a block's text."""
        return self._words[BASE] + (self.block(number, words - 1) if words > 1 else b"")

    def _wrapped(self, start: int, words: int) -> bytes:
        laps, end = divmod(start + words, FILLER_WORDS)
        middle = self._text * (laps - 1)
        return self._text[start * WORD_BYTES :] + middle + self._text[: end * WORD_BYTES]


class SegmentCache:
    """Least recently used texts of runs of blocks, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._texts: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self.bytes = 0

    def get(self, key: tuple[int, int, int], make: Callable[[], bytes]) -> bytes:
        text = self._texts.get(key)
        if text is not None:
            self._texts.move_to_end(key)
            return text
        text = self._texts[key] = make()
        self.bytes += len(text)
        while self.bytes > self._max_bytes:
            self.bytes -= len(self._texts.popitem(last=False)[1])
        return text


def message_starts(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Sorted ids at which a message starts: the first new id of each row that brought new ones."""
    starts: set[int] = set()
    unseen = 0
    for row in rows:
        found = False
        for first, count in row.runs or ():
            if first + count > unseen:
                if not found:
                    starts.add(max(first, unseen))
                found = True
                unseen = first + count
    return np.asarray(sorted(starts), dtype=np.int64)


class PromptBuilder:
    """Builds the `messages` member of a row's body as JSON bytes (plain ASCII, no escapes)."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenisation: Tokenisation,
        seed: str,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._filler = Filler(seed)
        self._segment_cache = SegmentCache(cache_bytes)
        self._starts = message_starts(rows)
        self._tokenisation = tokenisation

    def messages(self, row: Row, number: int) -> list[tuple[str, str]]:
        """(role, text) pairs; `number` tells the row's unique text from all others'."""
        return [
            (role.decode(), b"".join(parts).decode()) for role, parts in self._parts(row, number)
        ]

    def messages_json(self, row: Row, number: int) -> bytes:
        out: list[bytes] = []
        for role, parts in self._parts(row, number):
            out.append(b',{"role":"' if out else b'[{"role":"')
            out += [role, b'","content":"', *parts, b'"}']
        out.append(b"]")
        return b"".join(out)

    def _parts(self, row: Row, number: int) -> list[tuple[bytes, list[bytes]]]:
        if not row.runs or not row.block_size:
            return [(b"user", [self._unique(number, row.input_tokens, own_message=True)])]
        messages = self._block_messages(row, row.block_size)
        blocks = sum(count for _, count in row.runs)
        self._pad(messages, row.input_tokens - blocks * row.block_size, number)
        return messages

    def _block_messages(self, row: Row, block_size: int) -> list[tuple[bytes, list[bytes]]]:
        """Whole blocks, the last one cut where the row's tokens end inside it."""
        left = row.input_tokens
        messages: list[tuple[bytes, list[bytes]]] = []
        for first, count, opens in self._segments(row):
            if opens or not messages:
                role = b"system" if not messages else _ROLES[(len(messages) - 1) % 2]
                messages.append((role, []))
            parts = messages[-1][1]
            overhead = 0 if parts else self._tokenisation.message_tokens
            whole = min(count, left // block_size)
            if whole:
                parts.append(self._run(first, whole, block_size, overhead))
                overhead = 0
            if whole < count:
                tokens = left - whole * block_size - self._tokenisation.reply_tokens - overhead
                words = self._tokenisation.words(tokens)
                parts.append(self._filler.block(first + whole, words))
            left -= count * block_size
        return messages

    def _run(self, first: int, count: int, block_size: int, overhead: int) -> bytes:
        """Text of consecutive ids; `overhead` tokens of the first are the message's own."""
        words = self._tokenisation.words
        overhead = overhead if block_size > overhead + DIGITS else 0

        def make() -> bytes:
            block, full = self._filler.block, words(block_size)
            head = block(first, words(block_size - overhead))
            return head + b"".join([block(n, full) for n in range(first + 1, first + count)])

        return self._segment_cache.get((first, count, overhead), make)

    def _segments(self, row: Row) -> Iterator[tuple[int, int, bool]]:
        """(first id, count, whether a message starts there): the row's runs cut at starts."""
        for first, count in row.runs or ():
            end = first + count
            low, high = np.searchsorted(self._starts, (first + 1, end))
            cuts = [first, *self._starts[low:high].tolist(), end]
            opens = low > 0 and int(self._starts[low - 1]) == first
            for here, there in pairwise(cuts):
                yield here, there - here, opens
                opens = True

    def _pad(self, messages: list[tuple[bytes, list[bytes]]], tokens: int, number: int) -> None:
        own = tokens - self._tokenisation.message_tokens - self._tokenisation.reply_tokens
        if own >= 1:
            messages.append((b"user", [self._unique(number, tokens, own_message=True)]))
        elif tokens > self._tokenisation.reply_tokens:
            messages[-1][1].append(self._unique(number, tokens, own_message=False))

    def _unique(self, number: int, tokens: int, *, own_message: bool) -> bytes:
        overhead = self._tokenisation.message_tokens if own_message else 0
        tokens -= overhead + self._tokenisation.reply_tokens
        return self._filler.unique(number, self._tokenisation.words(tokens))
