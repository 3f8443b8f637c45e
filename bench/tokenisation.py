"""How the worker counts tokens, found by asking it, so that filler text has exact lengths."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

JSON = dict[str, Any]
WORD_BYTES = 4  # a space and three letters: about the bytes per token of English text
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Tokenisation:
    """Token counts of filler text and of the chat template around it.

    A prompt of messages m1..mn counts reply_tokens + sum(message_tokens + tokens of mi's text),
    and a text of k words counts k x tokens_per_word.
    """

    message_tokens: int = 0
    reply_tokens: int = 0
    tokens_per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Words that make `tokens` tokens; at least one."""
        if self.tokens_per_word == 1.0:
            return max(1, tokens)
        return max(1, round(tokens / self.tokens_per_word))


def vocabulary(seed: str) -> list[bytes]:
    """VOCABULARY different words of WORD_BYTES bytes, in an order that the seed fixes."""
    words = ["".join(t) for t in itertools.product(string.ascii_lowercase, repeat=WORD_BYTES - 1)]
    return [f" {word}".encode() for word in random.Random(seed).sample(words, VOCABULARY)]


def calibrate(count: Callable[[JSON], int], model: str, seed: str = "calibration") -> Tokenisation:
    """Solve for the template's overhead and the tokens per word, given a way to count a body.

    `count` takes a /tokenize body and returns the number of tokens.
    """
    words = vocabulary(seed)

    def tokens(*lengths: int) -> int:
        texts = (b"".join(words[i] for i in range(n)).decode() for n in lengths)
        messages = [{"role": "user", "content": text} for text in texts]
        return count({"model": model, "messages": messages, "add_generation_prompt": True})

    short, long, two = tokens(64), tokens(1088), tokens(64, 64)
    per_word = (long - short) / 1024
    if abs(per_word - round(per_word)) < 1e-9:
        per_word = float(round(per_word))
    if per_word <= 0:
        raise ValueError("the worker's /tokenize counts no tokens for text")
    message = max(0, round(two - short - 64 * per_word))
    reply = max(0, round(short - 64 * per_word - message))
    return Tokenisation(message, reply, per_word)


def ask(url: str, model: str, timeout_s: float = 30.0) -> Tokenisation:
    """Calibrate against the worker (or the router in front of it) at `url`."""
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:

        def count(body: JSON) -> int:
            reply = client.post("/tokenize", json=body)
            reply.raise_for_status()
            return int(reply.json()["count"])

        return calibrate(count, model)
