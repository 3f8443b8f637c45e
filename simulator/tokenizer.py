"""A deterministic tokenizer that costs a memory copy: one token is four bytes of UTF-8.

Every text is padded to whole tokens by a mark in its last token, so that a message has the same
tokens wherever it stands and an answer that comes back as history has the tokens it was made of.
Roles are tokens of their own. Bytes 0xF8 to 0xFF never occur in UTF-8: a token whose top byte is
one of them is a mark (0xF9 to 0xFB: one to three bytes of text) or special (0xFC).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from simulator.hashing import Tokens

JSON = dict[str, Any]

VOCABULARY = 1 << 32

_FIRST_MARK = 0xF8
_SPECIAL = 0xFC << 24
_PADDING = (b"", b"\0\0\xf9", b"\0\xfa", b"\xfb")

_SPECIAL_NAMES = (
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|developer|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|function|>",
    "<|role|>",
    "<|tools|>",
    "<|context|>",
    "<|media|>",
    "<|calls|>",
    "<|name|>",
)
_BYTES_OF = {name: (_SPECIAL + i).to_bytes(4, "little") for i, name in enumerate(_SPECIAL_NAMES)}
_BEGIN = _BYTES_OF["<|begin|>"]
_END = _BYTES_OF["<|end|>"]
_ROLES = {name[2:-2]: _BYTES_OF[name] for name in _SPECIAL_NAMES[2:8]}

# Members of a chat request that a template renders beside messages and tools.
_CONTEXT_KEYS = ("documents", "chat_template", "chat_template_kwargs", "reasoning_effort")
# Members of a message that a template renders beside its role and content.
_MESSAGE_KEYS = ("tool_calls", "function_call", "tool_call_id")


def _padded(data: bytes) -> bytes:
    return data + _PADDING[len(data) & 3]


def _tokens(data: bytes) -> Tokens:
    return np.frombuffer(data, dtype="<u4")


def encode(text: str) -> Tokens:
    """Tokens of a plain text."""
    return _tokens(_padded(text.encode()))


def decode(tokens: Iterable[int] | Tokens) -> str:
    """Text of tokens; special ones by their names. Ids that are no UTF-8 become U+FFFD."""
    ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype="<u4")
    marks = np.nonzero(ids >= np.uint32(_FIRST_MARK << 24))[0].tolist()
    data = ids.tobytes()
    parts = []
    start = 0
    for at in marks:
        parts.append(data[start : at * 4])
        parts.append(_mark_bytes(int(ids[at])))
        start = at * 4 + 4
    parts.append(data[start:])
    return b"".join(parts).decode("utf-8", "replace")


def _mark_bytes(token: int) -> bytes:
    kind = token >> 24
    if _FIRST_MARK < kind < 0xFC:
        return token.to_bytes(4, "little")[: kind - _FIRST_MARK]
    index = token - _SPECIAL
    if 0 <= index < len(_SPECIAL_NAMES):
        return _SPECIAL_NAMES[index].encode()
    return b"\xff"


def _content(content: object, parts: list[bytes]) -> None:
    if isinstance(content, str):
        parts.append(_padded(content.encode()))
        return
    if not isinstance(content, Sequence):
        return
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            parts.append(_padded(text.encode()))
        else:
            parts.append(_BYTES_OF["<|media|>"])
            parts.append(_padded(orjson.dumps(part)))


def _message(message: Mapping[str, Any], parts: list[bytes]) -> None:
    role = str(message.get("role", ""))
    header = _ROLES.get(role)
    if header is None:
        parts += (_BYTES_OF["<|role|>"], _padded(role.encode()))
    else:
        parts.append(header)
    if message.get("name"):
        parts += (_BYTES_OF["<|name|>"], _padded(str(message["name"]).encode()))
    _content(message.get("content"), parts)
    if len(message) > 2:
        extras = {key: message[key] for key in _MESSAGE_KEYS if message.get(key)}
        if extras:
            parts += (_BYTES_OF["<|calls|>"], _padded(orjson.dumps(extras)))
    parts.append(_END)


def encode_chat(body: Mapping[str, Any]) -> Tokens:
    """Tokens of a chat request: context, tools, messages, and the opening of the answer.

    A request that appends messages to another has the other's tokens at its start, up to the
    other's opening of the answer.
    """
    parts = [_BEGIN]
    context = {key: body[key] for key in _CONTEXT_KEYS if body.get(key)}
    if context:
        parts += (_BYTES_OF["<|context|>"], _padded(orjson.dumps(context)))
    if body.get("tools"):
        parts += (_BYTES_OF["<|tools|>"], _padded(orjson.dumps(body["tools"])))
    for message in body["messages"]:
        _message(message, parts)
    if body.get("continue_final_message"):
        parts.pop()
    elif body.get("add_generation_prompt", True):
        parts.append(_ROLES["assistant"])
    return _tokens(b"".join(parts))
