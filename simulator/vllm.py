"""vLLM's dialect: what a request means and what replies look like. No I/O, no state.

Shapes follow recorded replies of a real engine: the same keys in the same order, the same chunks,
the same errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from simulator.engine import RemoteKv
from simulator.hashing import Tokens
from simulator.text import PIECE_BYTES, PIECES, Answer
from simulator.tokenizer import VOCABULARY, decode, encode, encode_chat

JSON = dict[str, Any]
Endpoint = Literal["chat", "completion"]

VERSION = "0.33.0"
FINGERPRINT = f"vllm-{VERSION}-simulated"
DONE = b"data: [DONE]\n\n"

_INTEGERS = (
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "top_logprobs",
    "truncate_prompt_tokens",
    "stream_interval",
    "seed",
)


class ApiError(Exception):
    """A request that the engine refuses, as it is told to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        return orjson.dumps({"error": self._members()})

    def _members(self) -> JSON:
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }


INTERNAL_ERROR = ApiError(500, "Internal server error", "InternalServerError")
ERROR_EVENT = (
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n'
)


def _invalid(name: str, kind: str, text: str, value: str) -> ApiError:
    """A refusal in the words of a schema check."""
    detail = f"{{'type': '{kind}', 'loc': 'body.{name}', 'msg': '{text}', 'input': {value}}}"
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{name}")


def _refused(name: str, text: str, value: object) -> ApiError:
    """A refusal in the words of the engine."""
    return ApiError(400, f"{text} (parameter={name}, value={value})", param=name)


@dataclass(frozen=True, slots=True)
class Served:
    """What a worker serves: the first name is the one replies carry for requests by it."""

    names: tuple[str, ...]
    max_model_len: int
    stream_interval: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """A request, understood."""

    endpoint: Endpoint
    id: str
    model: str
    prompts: tuple[Tokens, ...]
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stream_interval: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    "Alternatives to list for each token; None: no log probabilities."
    return_token_ids: bool = False
    echo: bool = False
    tool: str | None = None
    "Function that the answer has to call."
    salt: str | None = None
    keep_kv: bool = False
    remote: RemoteKv | None = None

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


# -- understanding a request --------------------------------------------------------------------


def load_body(raw: bytes) -> JSON:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise _invalid_json(raw) from None
    if not isinstance(body, dict):
        raise ApiError(
            400,
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': "
            "'Input should be a valid dictionary or object to extract fields from'}",
            "Bad Request",
            "body",
        )
    return body


def _invalid_json(raw: bytes) -> ApiError:
    # The standard library words the reason as the engine's framework does.
    reason, at = "unexpected value", 0
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        reason, at = error.msg, error.pos
    except UnicodeDecodeError as error:
        reason, at = error.reason, error.start
    detail = (
        f"{{'type': 'json_invalid', 'loc': 'body.{at}', 'msg': 'JSON decode error', "
        f"'input': '<dict of 0 items>', 'ctx': {{'error': {reason!r}}}}}"
    )
    message = f"1 validation error:\n  {detail}"
    return ApiError(400, message, "Bad Request", f"body.{at}")


def parse_call(endpoint: Endpoint, body: JSON, served: Served, request_id: str) -> Call:
    """Check a request as the engine does. Raises ApiError. Unknown members are ignored."""
    _check_types(endpoint, body)
    model = body.get("model") or served.names[0]
    if model not in served.names:
        valid = ", ".join(served.names)
        message = f"The model `{model}` does not exist. Valid aliases: {valid}."
        raise ApiError(404, message, "NotFoundError", "model")
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        text = "Stream options can only be defined when `stream=True`."
        raise _refused("stream_options", text, options)
    options = options or {}
    remote, keep_kv = parse_kv_transfer_params(body.get("kv_transfer_params"))
    prompts = _prompts(endpoint, body)
    max_tokens = _max_tokens(endpoint, body, prompts, served)
    n = body.get("n") or 1
    return Call(
        endpoint=endpoint,
        id=("chatcmpl-" if endpoint == "chat" else "cmpl-") + request_id,
        model=model,
        prompts=prompts,
        n=int(n),
        max_tokens=max_tokens,
        min_tokens=int(body.get("min_tokens") or 0),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        stream_interval=int(body.get("stream_interval") or served.stream_interval),
        stops=_stops(body.get("stop")),
        include_stop=bool(body.get("include_stop_str_in_output")),
        logprobs=_logprobs(endpoint, body),
        return_token_ids=bool(body.get("return_token_ids")),
        echo=bool(body.get("echo")) and endpoint == "completion",
        tool=_forced_tool(body),
        salt=body.get("cache_salt"),
        keep_kv=keep_kv,
        remote=remote,
    )


def _check_types(endpoint: Endpoint, body: JSON) -> None:
    required = "messages" if endpoint == "chat" else "prompt"
    if required not in body:
        raise _invalid(required, "missing", "Field required", f"'<dict of {len(body)} items>'")
    for name in _INTEGERS:
        value = body.get(name)
        if value is not None and type(value) is not int:
            body[name] = _integer(name, value)
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt or len(salt) > 128):
        raise _refused("cache_salt", "cache_salt must be a non-empty string", salt)
    n = body.get("n")
    if n is not None and n < 1:
        raise _refused("n", f"n must be at least 1, got {n}.", n)
    if endpoint == "chat":
        _check_messages(body["messages"])


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list):
        text = "Input should be a valid list"
        raise _invalid("messages", "list_type", text, repr(messages)[:80])
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise _refused("messages", "messages must be a non-empty list of objects", "...")


def _integer(name: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            text = "Input should be a valid integer, unable to parse string as an integer"
            raise _invalid(name, "int_parsing", text, repr(value)) from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        return int(value)
    raise _invalid(name, "int_type", "Input should be a valid integer", repr(value)[:80])


def _prompts(endpoint: Endpoint, body: JSON) -> tuple[Tokens, ...]:
    if endpoint == "chat":
        params = body.get("kv_transfer_params")
        ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
        if ids is not None:
            return (_truncated(token_ids(ids, "kv_transfer_params.prompt_token_ids"), body),)
        return (_truncated(encode_chat(body), body),)
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return (_truncated(encode(prompt), body),)
    if not isinstance(prompt, list) or not prompt:
        raise _refused("prompt", "prompt must be a string or a non-empty list", "...")
    if isinstance(prompt[0], int):
        return (_truncated(token_ids(prompt, "prompt"), body),)
    parts = [
        encode(part) if isinstance(part, str) else token_ids(part, "prompt") for part in prompt
    ]
    return tuple(_truncated(part, body) for part in parts)


def _truncated(tokens: Tokens, body: JSON) -> Tokens:
    keep = body.get("truncate_prompt_tokens")
    return tokens[-keep:] if keep is not None and keep > 0 else tokens


def token_ids(ids: object, name: str) -> Tokens:
    """Token ids from a request; a 400 if they are not ids of the vocabulary."""
    try:
        found = np.array(ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0, dtype=np.int64)
    valid = found.ndim == 1 and found.size > 0 and isinstance(ids, list)
    if not valid or int(found.min()) < 0 or int(found.max()) >= VOCABULARY:
        raise _refused(name, f"{name} must be a non-empty list of token ids", "...")
    if not all(type(item) is int for item in (ids if isinstance(ids, list) else ())):
        raise _refused(name, f"{name} must be a list of integers", "...")
    return found.astype(np.uint32)


def _max_tokens(
    endpoint: Endpoint, body: JSON, prompts: Sequence[Tokens], served: Served
) -> int | None:
    name = "max_tokens"
    if endpoint == "chat" and body.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    wanted: int | None = body.get(name)
    if wanted is None and endpoint == "completion":
        wanted = 16
    if wanted is not None and wanted < 1:
        raise _refused(name, f"{name} must be at least 1, got {wanted}.", wanted)
    window = served.max_model_len
    longest = max(len(prompt) for prompt in prompts)
    if longest >= window:
        text = (
            f"This model's maximum context length is {window} tokens. However, your prompt "
            f"contains {longest} input tokens, which exceeds this limit even without any output "
            "tokens. Please reduce the length of the input prompt."
        )
        raise _refused("input_tokens", text, longest)
    if wanted is not None and longest + wanted > window:
        text = (
            f"This model's maximum context length is {window} tokens. However, you requested "
            f"{wanted} output tokens and your prompt contains {longest} input tokens, for a total "
            f"of {longest + wanted} tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens."
        )
        raise _refused("input_tokens", text, longest)
    if min(len(prompt) for prompt in prompts) == 0:
        raise _refused("prompt", "The decoder prompt cannot be empty.", "...")
    least = body.get("min_tokens") or 0
    if least < 0 or (wanted is not None and least > wanted):
        text = f"min_tokens must be less than or equal to max_tokens={wanted}, got {least}."
        raise _refused("min_tokens", text, least)
    return wanted


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _refused("stop", "stop must be a string or a list of non-empty strings", "...")
    return tuple(stops)


def _logprobs(endpoint: Endpoint, body: JSON) -> int | None:
    if endpoint == "chat":
        return int(body.get("top_logprobs") or 0) if body.get("logprobs") else None
    value = body.get("logprobs")
    return None if value is None else int(value)


def _forced_tool(body: JSON) -> str | None:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not tools or not choice:
        return None
    if isinstance(choice, Mapping):
        return str((choice.get("function") or {}).get("name", ""))
    if choice == "required":
        return str((tools[0].get("function") or {}).get("name", ""))
    return None


def parse_kv_transfer_params(params: object) -> tuple[RemoteKv | None, bool]:
    """The claim of a decode leg, and whether this is a prefill leg."""
    if params is None:
        return None, False
    if not isinstance(params, Mapping):
        raise _invalid(
            "kv_transfer_params", "dict_type", "Input should be a valid dictionary", "''"
        )
    keep_kv = bool(params.get("do_remote_decode"))
    groups = params.get("remote_block_ids")
    if not params.get("do_remote_prefill") or not groups:
        return None, keep_kv
    first = groups[0] if isinstance(groups[0], list) else groups
    if not first:
        return None, keep_kv
    try:
        return _claim(params, first), keep_kv
    except (KeyError, TypeError, ValueError):
        return RemoteKv(None, "", ()), keep_kv


def _claim(params: Mapping[str, Any], blocks: Sequence[int]) -> RemoteKv:
    cached = params.get("remote_prefill_cached_tokens")
    return RemoteKv(
        engine_id=str(params["remote_engine_id"]),
        request_id=str(params["remote_request_id"]),
        blocks=tuple(int(block) for block in blocks),
        host=str(params["remote_host"]),
        port=int(params["remote_port"]),
        cached_tokens=None if cached is None else int(cached),
    )


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill leg says about the KV it keeps."""

    blocks: Sequence[int]
    engine_id: str
    request_id: str
    host: str
    port: int
    tokens: int
    cached_tokens: int

    def as_json(self) -> JSON:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(self.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": self.cached_tokens,
        }


# -- what a choice says -------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """Token counts of a call, its choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_tokens: int | None
    "Prompt tokens newly put into the cache; None where the dialect does not say."

    def _counts(self) -> JSON:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def in_reply(self) -> JSON:
        details = {
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": self.created_tokens,
            "multimodal_tokens": None,
        }
        return self._counts() | {
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }

    def in_last_chunk(self) -> JSON:
        details: JSON = {"cached_tokens": self.cached_tokens}
        if self.created_tokens is not None:
            details["created_cache_tokens"] = self.created_tokens
        return self._counts() | {"prompt_tokens_details": details}

    def in_chunk(self) -> JSON:
        return self._counts() | {"completion_tokens_details": None}


@dataclass(slots=True)
class Choice:
    """One answer of a call: its text, and where a stop string ends it."""

    index: int
    answer: Answer
    prompt: Tokens
    stop: str | None = None
    text_end: int | None = None
    "Characters of the text that are shown, if a stop string ends it."
    opened: bool = False
    finish: str | None = None

    def pieces(self, first: int, count: int) -> list[str]:
        """Texts of tokens; the ones at a stop string cut short or empty."""
        pieces = self.answer.pieces(first, count)
        end = self.text_end
        if end is None or (first + count) * PIECE_BYTES <= end:
            return pieces
        return [piece[: max(0, end - (first + i) * PIECE_BYTES)] for i, piece in enumerate(pieces)]

    def text(self, count: int) -> str:
        return "".join(self.pieces(0, count))


def _logprob(draw: int) -> float:
    return -(1 + draw % 997) / 128


def _alternatives(draw: int, count: int) -> list[tuple[str, float]]:
    top = _logprob(draw)
    return [(PIECES[(draw + i) % 4096], top - i / 4) for i in range(count)]


def _chat_logprobs(choice: Choice, first: int, count: int, top: int) -> JSON:
    def entry(token: str, logprob: float) -> JSON:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    content = []
    for draw in choice.answer.draws(first, count):
        item = entry(PIECES[draw], _logprob(draw))
        item["top_logprobs"] = [entry(*other) for other in _alternatives(draw, top)]
        content.append(item)
    return {"content": content}


def _completion_logprobs(choice: Choice, first: int, count: int, top: int) -> JSON:
    draws = choice.answer.draws(first, count)
    return {
        "text_offset": [(first + i) * PIECE_BYTES for i in range(count)],
        "token_logprobs": [_logprob(draw) for draw in draws],
        "tokens": [PIECES[draw] for draw in draws],
        "top_logprobs": [dict(_alternatives(draw, max(1, top))) for draw in draws],
    }


# -- whole replies ------------------------------------------------------------------------------


def _tool_call(call: Call, arguments: str) -> JSON:
    return {
        "id": f"chatcmpl-tool-{call.id[-16:]}",
        "type": "function",
        "function": {"name": call.tool, "arguments": arguments},
    }


def _chat_choice(call: Call, choice: Choice, count: int) -> JSON:
    text = choice.text(count)
    message: JSON = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    finish = choice.finish
    if call.tool is not None:
        message["content"] = ""
        message["tool_calls"] = [_tool_call(call, '{"text":"' + text + '"}')]
        finish = "tool_calls"
    logprobs = None
    if call.logprobs is not None:
        logprobs = _chat_logprobs(choice, 0, count, call.logprobs)
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": choice.stop,
        "token_ids": choice.answer.token_ids(0, count) if call.return_token_ids else None,
        "routed_experts": None,
    }


def _completion_choice(call: Call, choice: Choice, count: int) -> JSON:
    text = choice.text(count)
    logprobs = None
    if call.logprobs is not None:
        logprobs = _completion_logprobs(choice, 0, count, call.logprobs)
    ids = call.return_token_ids
    return {
        "index": choice.index,
        "text": decode(choice.prompt) + text if call.echo else text,
        "logprobs": logprobs,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop,
        "token_ids": choice.answer.token_ids(0, count) if ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": choice.prompt.tolist() if ids else None,
        "routed_experts": None,
    }


def reply(
    call: Call,
    created: int,
    choices: Sequence[Choice],
    counts: Sequence[int],
    usage: Usage,
    handoff: Handoff | None,
) -> bytes:
    """The body of a reply that is not streamed. `counts` are the tokens of the choices."""
    chat = call.endpoint == "chat"
    make = _chat_choice if chat else _completion_choice
    body: JSON = {
        "id": call.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": call.model,
        "choices": [make(call, *pair) for pair in zip(choices, counts, strict=True)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage.in_reply(),
    }
    if chat:
        ids = call.prompts[0].tolist() if call.return_token_ids else None
        body |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    body["kv_transfer_params"] = handoff.as_json() if handoff else None
    body |= {"ec_transfer_params": None, "metrics": None}
    return orjson.dumps(body)


# -- streams ------------------------------------------------------------------------------------


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
            else _chat_logprobs(choice, first, count, call.logprobs),
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
        return {"index": 0} | _tool_call(self.call, arguments)

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
            else _completion_logprobs(choice, first, count, call.logprobs),
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


# -- other endpoints ----------------------------------------------------------------------------


def models(served: Served, created: int) -> bytes:
    data = []
    for name in served.names:
        permission = {
            "id": f"modelperm-{hash_name(name):016x}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        data.append(
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": served.names[0],
                "parent": None,
                "max_model_len": served.max_model_len,
                "permission": [permission],
            }
        )
    return orjson.dumps({"object": "list", "data": data})


def hash_name(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value * 0x100000001B3 + byte + 1) % (1 << 64)
    return value


def tokenize(body: JSON, served: Served) -> bytes:
    """Reply to /tokenize, for a prompt or for messages."""
    if "messages" in body:
        _check_types("chat", body)
        tokens = encode_chat(body)
    elif isinstance(body.get("prompt"), str):
        tokens = encode(body["prompt"])
    else:
        raise _invalid("prompt", "missing", "Field required", f"'<dict of {len(body)} items>'")
    ids = tokens.tolist()
    strings = [decode([token]) for token in ids] if body.get("return_token_strs") else None
    return orjson.dumps(
        {
            "count": len(ids),
            "max_model_len": served.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


def detokenize(body: JSON) -> bytes:
    """Reply to /detokenize."""
    tokens = body.get("tokens")
    if tokens == []:
        return orjson.dumps({"prompt": ""})
    return orjson.dumps({"prompt": decode(token_ids(tokens, "tokens"))})
