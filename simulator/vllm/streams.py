"""Replies that come as events."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from simulator.tokenizer import JSON, decode
from simulator.vllm.replies import (
    FINGERPRINT,
    Choice,
    Handoff,
    Usage,
    chat_logprobs,
    completion_logprobs,
    tool_call,
)
from simulator.vllm.requests import Call

DONE = b"data: [DONE]\n\n"


def _event(body: JSON) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


@dataclass(slots=True)
class Stream:
    """Renders the events of one streamed call. The plain case is three pieces of bytes."""

    call: Call
    created: int
    _head: JSON = field(init=False)
    _plain: bool = field(init=False)
    _before: dict[int, bytes] = field(init=False, default_factory=dict)
    _after: bytes = field(init=False)

    def __post_init__(self) -> None:
        call = self.call
        chat = call.endpoint == "chat"
        self._head = {
            "id": call.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.created,
            "model": call.model,
        }
        special = call.logprobs is not None or call.return_token_ids or call.tool is not None
        self._plain = not special and not call.continuous_usage and not call.echo
        self._after = (
            b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            if chat
            else b'","logprobs":null,"finish_reason":null,"stop_reason":null,'
            b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
        )

    def _start(self, index: int) -> bytes:
        found = self._before.get(index)
        if found is None:
            key = b'"delta":{"content":"' if self.call.endpoint == "chat" else b'"text":"'
            head = b"data: " + orjson.dumps(self._head)[:-1]
            found = self._before[index] = head + b',"choices":[{"index":%d,%b' % (index, key)
        return found

    def opening(self, choice: Choice, usage: Usage) -> list[bytes]:
        """What a choice sends before its first token."""
        choice.opened = True
        if self.call.endpoint != "chat":
            return []
        body = self._head | {
            "choices": [
                {
                    "index": choice.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
        }
        if self.call.continuous_usage:
            usage.completion_tokens = 0
            body["usage"] = usage.in_chunk()
        ids = choice.prompt.tolist() if self.call.return_token_ids else None
        return [_event(body | {"prompt_token_ids": ids, "prompt_text": None})]

    def tokens(
        self, choice: Choice, first: int, count: int, usage: Usage, handoff: Handoff | None = None
    ) -> list[bytes]:
        """Events for tokens `first` to `first + count - 1`; the last one ends a finished choice."""
        interval = self.call.stream_interval
        end = first + count
        events: list[bytes] = []
        if self._plain and interval == 1:
            plain = count - 1 if choice.finish else count
            before, after = self._start(choice.index), self._after
            if plain:
                events = [
                    b"%b%b%b" % (before, piece.encode(), after)
                    for piece in choice.pieces(first, plain)
                ]
            first += plain
        while first < end:
            size = min(interval, end - first)
            last = choice.finish is not None and first + size == end
            usage.completion_tokens = first + size
            events.append(self._token_event(choice, first, size, last, usage, handoff))
            first += size
        return events

    def _token_event(
        self,
        choice: Choice,
        first: int,
        count: int,
        last: bool,
        usage: Usage,
        handoff: Handoff | None,
    ) -> bytes:
        call = self.call
        make = self._chat_choice if call.endpoint == "chat" else self._completion_choice
        body = self._head | {"choices": [make(choice, first, count, last)]}
        if call.continuous_usage:
            body["usage"] = usage.in_chunk()
        if last and handoff is not None:
            body["kv_transfer_params"] = handoff.as_json()
        return _event(body)

    def _chat_choice(self, choice: Choice, first: int, count: int, last: bool) -> JSON:
        call = self.call
        text = "".join(choice.pieces(first, count))
        delta: JSON = {"content": text}
        finish = choice.finish if last else None
        if call.tool is not None:
            delta = {"tool_calls": [self._tool_delta(text, first, last)]}
            finish = "tool_calls" if last else None
        item: JSON = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None
            if call.logprobs is None
            else chat_logprobs(choice, first, count, call.logprobs),
            "finish_reason": finish,
        }
        if last:
            item["stop_reason"] = choice.stop
        item["token_ids"] = choice.answer.token_ids(first, count) if call.return_token_ids else None
        return item

    def _tool_delta(self, text: str, first: int, last: bool) -> JSON:
        arguments = ('{"text":"' if first == 0 else "") + text + ('"}' if last else "")
        if first:
            return {"index": 0, "function": {"arguments": arguments}}
        return {"index": 0} | tool_call(self.call, arguments)

    def _completion_choice(self, choice: Choice, first: int, count: int, last: bool) -> JSON:
        call = self.call
        text = "".join(choice.pieces(first, count))
        if call.echo and first == 0:
            text = decode(choice.prompt) + text
        ids = call.return_token_ids
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None
            if call.logprobs is None
            else completion_logprobs(choice, first, count, call.logprobs),
            "finish_reason": choice.finish if last else None,
            "stop_reason": choice.stop if last else None,
            "prompt_token_ids": choice.prompt.tolist() if ids and first == 0 else None,
            "token_ids": choice.answer.token_ids(first, count) if ids else None,
        }

    def closing(self, usage: Usage) -> list[bytes]:
        """What follows the last choice's end."""
        if not self.call.include_usage:
            return [DONE]
        body = self._head | {
            "choices": [],
            "usage": usage.in_last_chunk(),
            "system_fingerprint": FINGERPRINT,
        }
        return [_event(body), DONE]
