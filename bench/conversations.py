"""Random calls that differ in everything a gateway could get wrong, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]

_SENTENCE = (
    "the cache holds what was asked before and a block is a run of tokens that hash alike when "
    "prompt queue worker decode prefill lease handoff price batch step context window answer"
)
_WORDS = tuple(_SENTENCE.split())
_UNICODE = (
    "naïve",
    "Übung",
    "日本語",
    "данные",
    "🙂",
    "é",
    "👩\u200d🔬",
    "\u2028",
    "مرحبا",
    "\t",
    "½",
)
_SYSTEM = ("You are terse.", "Answer as a ship's log.", "Réponds en français, s'il te plaît.")
_TOOLS: tuple[JSON, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {name}",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["key"],
            },
        },
    }
    for name in ("weather", "stock", "train_times")
)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a conversation. `turn` counts from 0."""

    conversation: int
    turn: int
    path: str
    body: JSON

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])

    @property
    def kind(self) -> str:
        """What a mismatch is grouped by."""
        form = "chat" if self.path.endswith("chat/completions") else "completion"
        several = f" n={self.body['n']}" if self.body.get("n", 1) > 1 else ""
        return f"{form} {'stream' if self.streams else 'whole'}{several}"


def conversation(number: int, seed: int, model: str) -> Iterator[Request]:
    """The calls of one conversation, each turn with all turns before it."""
    dice = random.Random(f"{seed}/{number}")
    if dice.random() < 0.25:
        yield _completion(number, dice, model)
        return
    messages: list[JSON] = []
    if dice.random() < 0.6:
        messages.append({"role": "system", "content": dice.choice(_SYSTEM) * dice.randint(1, 20)})
    extra: JSON = {"tools": list(_TOOLS[: dice.randint(1, 3)])} if dice.random() < 0.3 else {}
    for turn in range(dice.randint(1, 6)):
        messages.append({"role": "user", "content": _content(dice)})
        body = {"model": model, "messages": list(messages), **extra, **_options(dice, chat=True)}
        yield Request(number, turn, "/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": text(dice, dice.randint(1, 60))})


def text(dice: random.Random, words: int) -> str:
    """Words with some that are not ASCII."""
    return " ".join(
        dice.choice(_UNICODE) if dice.random() < 0.08 else dice.choice(_WORDS) for _ in range(words)
    )


def _content(dice: random.Random) -> str | list[JSON]:
    """A string, or now and then the same as content parts."""
    words = dice.choice((1, 5, 40, 200, 900))
    if dice.random() < 0.1:
        return [{"type": "text", "text": text(dice, words)}, {"type": "text", "text": "¿y?"}]
    return text(dice, words)


def _completion(number: int, dice: random.Random, model: str) -> Request:
    prompt: str | list[int] = text(dice, dice.choice((1, 30, 400)))
    if dice.random() < 0.15:
        prompt = [dice.randrange(1000) for _ in range(dice.randint(1, 200))]
    body = {"model": model, "prompt": prompt, **_options(dice, chat=False)}
    return Request(number, 0, "/v1/completions", body)


def _options(dice: random.Random, *, chat: bool) -> JSON:
    """Limits, stops, streaming and the rest, in many combinations."""
    options: JSON = {"stream": dice.random() < 0.5, **_limits(dice, chat=chat)}
    if dice.random() < 0.2:
        options["stop"] = dice.choice(["a", ["e", "zz"], " b", ["\n"]])
    if dice.random() < 0.15:
        options["n"] = dice.randint(2, 3)
    if dice.random() < 0.5:
        options |= {"temperature": dice.choice((0, 0.0, 0.7, 1)), "seed": dice.randint(0, 9)}
    if options["stream"] and dice.random() < 0.7:
        options["stream_options"] = {"include_usage": True}
    if dice.random() < 0.2:
        options |= {"user": "ü-1", "metadata": {"a": [1, 2.50, None]}, "x_unknown": {"deep": [{}]}}
    return options


def _limits(dice: random.Random, *, chat: bool) -> JSON:
    """A chat call without any limit ends where the model does."""
    if chat and dice.random() < 0.1:
        return {}
    limit = dice.choice((1, 2, 7, 16, 33, 64))
    name = "max_completion_tokens" if chat and dice.random() < 0.4 else "max_tokens"
    at_least = {"min_tokens": dice.randint(1, limit)} if dice.random() < 0.2 else {}
    return {name: limit, **at_least}
