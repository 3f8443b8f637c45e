"""A call's body -> the canonical bytes that decide what an engine can reuse.

Two calls share a prefix of these bytes if, and as far as, an engine would render the same prompt
for them. The bytes are an identity, not the engine's rendering: only equality and length matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

JSON = dict[str, Any]

# Unit and record separators of ASCII. A message that holds them itself can mislead a prediction,
# never a reply: what is reused is the engine's decision.
_FIELD = b"\x1f"
_MESSAGE_END = b"\x1e"

# Members of the body, beside the messages, that change what the chat template prints. Most
# templates print them before the conversation, so they stand first here.
_TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
# Members of a message, beside role and content, that are printed.
_MESSAGE_FIELDS = (
    "name",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "function_call",
    "tool_call_id",
)
TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """Canonical bytes of one prompt.

    `message_ends` are the offsets in `data` behind each message, ascending. `seed` (64 bits) holds
    what separates prompts as a whole: model, LoRA and cache salt. `is_token_ids` says that `data`
    holds exactly `TOKEN_ID_BYTES` per prompt token.
    """

    data: bytes
    message_ends: tuple[int, ...]
    seed: int
    is_token_ids: bool = False


def read_prompt(body: Mapping[str, Any], model: str) -> Prompt:
    """Read the prompt of a chat completion (`messages`) or a completion (`prompt`).

    `model` is the name under which the engine knows weights and adapter. Members of an unexpected
    type count by their JSON text: the engine, not the router, refuses them.
    """
    salt = body.get("cache_salt")
    seed = xxhash.xxh3_64_intdigest(_text(model) + _FIELD + (b"" if salt is None else _any(salt)))
    messages = body.get("messages")
    if isinstance(messages, list):
        return _chat(body, messages, seed)
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one is the same prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        data = b"".join(
            [(token & 0xFFFFFFFF).to_bytes(TOKEN_ID_BYTES, "little") for token in prompt]
        )
        return Prompt(data, (), seed, is_token_ids=True)
    return Prompt(_any(prompt), (), seed)


def _chat(body: Mapping[str, Any], messages: list[Any], seed: int) -> Prompt:
    parts: list[bytes] = []
    size = 0
    ends: list[int] = []
    preamble = [_named(name, body[name]) for name in _TEMPLATE_FIELDS if body.get(name) is not None]
    # GLM and Kimi print the tools before the system message, and so do 15 of 68 known templates;
    # where they come second, equal tools with other system texts are credited too far.
    if body.get("tools"):
        preamble.append(_named("tools", body["tools"]))
    if preamble:
        parts.append(_FIELD.join(preamble) + _MESSAGE_END)
        size = len(parts[0])
        ends.append(size)
    for message in messages:
        pieces = _message(message)
        parts += pieces
        size += sum(map(len, pieces))
        ends.append(size)
    return Prompt(b"".join(parts), tuple(ends), seed)


def _message(message: Any) -> Sequence[bytes]:
    if not isinstance(message, dict):
        return (_any(message), _MESSAGE_END)
    role, content = message.get("role"), message.get("content")
    head = (_any("" if role is None else role), _FIELD, _content(content))
    if len(message) == 2:
        return (*head, _MESSAGE_END)
    fields = [_FIELD + _named(name, message[name]) for name in _MESSAGE_FIELDS if message.get(name)]
    return (*head, *fields, _MESSAGE_END)


def _content(content: Any) -> bytes:
    if isinstance(content, str):
        return _text(content)
    if isinstance(content, list):
        return b"".join(map(_part, content))
    return b"" if content is None else _any(content)


def _part(part: Any) -> bytes:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return _text(part["text"])
    # Media count by content: a picture of megabytes is a few hundred tokens in the prompt.
    return _FIELD + xxhash.xxh3_128_digest(_any(part))


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell and UTF-8 cannot
        return text.encode("utf-8", "surrogatepass")


def _named(name: str, value: Any) -> bytes:
    return name.encode() + _FIELD + _any(value)


def _any(value: Any) -> bytes:
    if isinstance(value, str):
        return _text(value)
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, or nested very deeply
        try:
            return repr(value).encode("utf-8", "surrogatepass")
        except RecursionError:
            return b""  # no engine takes it
