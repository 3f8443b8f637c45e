"""What the simulated model says: a pure function of the prompt's identity and the position.

Every token is four letters drawn from 4,096 pieces by a hash, so that a wrong, lost, doubled or
swapped token shows in the text. Output tokens are tokens of `simulator.tokenizer`.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

PIECE_BYTES = 4

_PER_DIGEST = 32
_KEY = Struct("<QII")
_DRAWS = Struct("<32H")
_CONSONANTS = "bdfghklmnprstvzc"
_VOWELS = "aeiouywj"


def _piece(index: int) -> str:
    low, rest = index & 15, index >> 4
    if index < 2048:
        return " " + _CONSONANTS[low] + _VOWELS[rest & 7] + _CONSONANTS[rest >> 3 & 15]
    first, second = _VOWELS[rest & 3], _VOWELS[rest >> 2 & 3]
    return _CONSONANTS[low] + first + _CONSONANTS[rest >> 4 & 7] + second


PIECES = tuple(_piece(index) for index in range(4096))
PIECE_IDS = tuple(int.from_bytes(piece.encode(), "little") for piece in PIECES)


class Answer:
    """The endless answer to one prompt. `choice` tells the answers of one request apart."""

    __slots__ = ("_choice", "_draws", "_key", "_page")

    def __init__(self, key: int, choice: int = 0) -> None:
        self._key = key
        self._choice = choice
        self._page = -1
        self._draws: tuple[int, ...] = ()

    def draws(self, first: int, count: int) -> list[int]:
        """Indexes into `PIECES` of the tokens `first` to `first + count - 1`."""
        found: list[int] = []
        while count > 0:
            page, offset = divmod(first, _PER_DIGEST)
            if page != self._page:
                digest = blake2b(_KEY.pack(self._key, self._choice, page), digest_size=64)
                self._draws = _DRAWS.unpack(digest.digest())
                self._page = page
            part = self._draws[offset : offset + count]
            found += [draw & 4095 for draw in part]
            first += len(part)
            count -= len(part)
        return found

    def pieces(self, first: int, count: int) -> list[str]:
        return [PIECES[draw] for draw in self.draws(first, count)]

    def token_ids(self, first: int, count: int) -> list[int]:
        return [PIECE_IDS[draw] for draw in self.draws(first, count)]

    def text(self, count: int) -> str:
        return "".join(self.pieces(0, count))

    def stop_at(
        self, stops: list[str], limit: int, not_before: int = 0
    ) -> tuple[int, int, str] | None:
        """Where one of `stops` first completes within `limit` tokens.

        Returns the tokens it takes, the characters before the stop string, and the string.
        A stop that completes before token `not_before` does not count.
        """
        text = ""
        for first in range(0, limit, 256):
            text += "".join(self.pieces(first, min(256, limit - first)))
            ends = []
            for stop in stops:
                at = text.find(stop, max(0, not_before * PIECE_BYTES - len(stop)))
                if at >= 0:
                    ends.append((at + len(stop), at, stop))
            if ends:
                end, at, stop = min(ends)
                return -(-end // PIECE_BYTES), at, stop
        return None


def natural_length(key: int) -> int:
    """Tokens of an answer that no limit cuts: 64 to 575, as the prompt decides."""
    return 64 + (key >> 7) % 512
