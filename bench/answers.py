"""The substance of an answer, streamed or whole, in one form to compare two servers by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

JSON = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """Text, tool calls and finish reason by choice; usage without what reuse changes."""

    status: int
    texts: dict[int, str] = field(default_factory=dict)
    tool_calls: dict[int, list[JSON]] = field(default_factory=dict)
    finish_reasons: dict[int, str | None] = field(default_factory=dict)
    usage: JSON | None = None
    faults: list[str] = field(default_factory=list)

    def differences(self, other: Answer) -> list[str]:
        """Names of what differs."""
        out = [f"fault: {fault}" for fault in (*self.faults, *other.faults)]
        for name in ("status", "texts", "tool_calls", "finish_reasons", "usage"):
            if getattr(self, name) != getattr(other, name):
                out.append(name)
        return out


def whole(status: int, body: bytes) -> Answer:
    """Of a reply that came as one JSON document."""
    answer = Answer(status)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer.faults.append("body is not JSON")
        return answer
    if status != 200:
        _check_error(answer, document)
        return answer
    for choice in document["choices"]:
        _add_choice(answer, choice, choice.get("message") or {"content": choice.get("text")})
    answer.usage = _usage(document.get("usage"))
    if document.get("kv_transfer_params"):
        answer.faults.append("kv_transfer_params reached the client")
    return answer


def streamed(status: int, body: bytes) -> Answer:
    """Of a reply that came as server-sent events; anything malformed is a fault."""
    if status != 200:
        return whole(status, body)
    answer = Answer(status)
    payloads = list(_payloads(answer, body))
    if not payloads or payloads[-1] != b"[DONE]":
        answer.faults.append("no [DONE] at the end")
    for payload in payloads:
        if payload != b"[DONE]":
            _add_event(answer, orjson.loads(payload))
    return answer


def _payloads(answer: Answer, body: bytes) -> Iterable[bytes]:
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        if event.startswith(b"data: "):
            yield event[6:]
        elif event and not event.startswith(b":"):
            answer.faults.append("a line that is no event")


def _add_event(answer: Answer, event: JSON) -> None:
    if event.get("error"):
        answer.faults.append(f"error event: {event['error'].get('type')}")
        return
    for choice in event.get("choices", ()):
        _add_choice(answer, choice, choice.get("delta") or {"content": choice.get("text")})
    if event.get("usage"):
        answer.usage = _usage(event["usage"])
    if event.get("kv_transfer_params"):
        answer.faults.append("kv_transfer_params reached the client")


def _add_choice(answer: Answer, choice: JSON, message: JSON) -> None:
    index = choice["index"]
    answer.texts[index] = answer.texts.get(index, "") + (message.get("content") or "")
    for call in message.get("tool_calls") or ():
        answer.tool_calls.setdefault(index, []).append(
            {key: value for key, value in call.items() if key != "id"}
        )
    if choice.get("finish_reason") is not None:
        if answer.finish_reasons.get(index) is not None:
            answer.faults.append("two finish reasons")
        answer.finish_reasons[index] = choice["finish_reason"]


def _usage(usage: JSON | None) -> JSON | None:
    """Without the counts of what was reused, which depend on who was asked before."""
    if usage is None:
        return None
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def _check_error(answer: Answer, document: JSON) -> None:
    error = document.get("error")
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= set(error):
        answer.faults.append("an error that is not OpenAI's shape")
