"""Understanding a request: the checks an engine makes, and what is left to generate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from simulator.engine import RemoteKv
from simulator.hashing import Tokens
from simulator.tokenizer import JSON, VOCABULARY, encode, encode_chat
from simulator.vllm.errors import ApiError, invalid, refused

Endpoint = Literal["chat", "completion"]

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


@dataclass(frozen=True, slots=True)
class Served:
    """What a worker serves, and how."""

    names: tuple[str, ...]
    max_model_len: int
    stream_interval: int = 1
    kv_push: bool = False


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
    try:
        return _understood(endpoint, body, served, request_id)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # A member of a kind that no check above names: its own text stays out of the reply.
        text = f"The request cannot be understood ({type(error).__name__})."
        raise ApiError(400, text) from error


def _understood(endpoint: Endpoint, body: JSON, served: Served, request_id: str) -> Call:
    check_types(endpoint, body)
    model = body.get("model") or served.names[0]
    if model not in served.names:
        valid = ", ".join(served.names)
        message = f"The model `{model}` does not exist. Valid aliases: {valid}."
        raise ApiError(404, message, "NotFoundError", "model")
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        text = "Stream options can only be defined when `stream=True`."
        raise refused("stream_options", text, options)
    options = options or {}
    params = body.get("kv_transfer_params")
    remote, keep_kv = parse_kv_transfer_params(params, push=served.kv_push)
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


def check_types(endpoint: Endpoint, body: JSON) -> None:
    required = "messages" if endpoint == "chat" else "prompt"
    if required not in body:
        raise invalid(required, "missing", "Field required", f"'<dict of {len(body)} items>'")
    for name in _INTEGERS:
        value = body.get(name)
        if value is not None and type(value) is not int:
            body[name] = _integer(name, value)
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt or len(salt) > 128):
        raise refused("cache_salt", "cache_salt must be a non-empty string", salt)
    n = body.get("n")
    if n is not None and n < 1:
        raise refused("n", f"n must be at least 1, got {n}.", n)
    if endpoint == "chat":
        _check_messages(body["messages"])


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list):
        text = "Input should be a valid list"
        raise invalid("messages", "list_type", text, repr(messages)[:80])
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise refused("messages", "messages must be a non-empty list of objects", "...")


def _integer(name: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            text = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid(name, "int_parsing", text, repr(value)) from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        return int(value)
    raise invalid(name, "int_type", "Input should be a valid integer", repr(value)[:80])


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
        raise refused("prompt", "prompt must be a string or a non-empty list", "...")
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
        raise refused(name, f"{name} must be a non-empty list of token ids", "...")
    if not all(type(item) is int for item in (ids if isinstance(ids, list) else ())):
        raise refused(name, f"{name} must be a list of integers", "...")
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
        raise refused(name, f"{name} must be at least 1, got {wanted}.", wanted)
    longest = max(len(prompt) for prompt in prompts)
    _check_window(longest, wanted, served.max_model_len)
    if wanted is None and body.get("ignore_eos"):
        wanted = served.max_model_len - longest
    if min(len(prompt) for prompt in prompts) == 0:
        raise refused("prompt", "The decoder prompt cannot be empty.", "...")
    least = body.get("min_tokens") or 0
    if least < 0 or (wanted is not None and least > wanted):
        text = f"min_tokens must be less than or equal to max_tokens={wanted}, got {least}."
        raise refused("min_tokens", text, least)
    return wanted


def _check_window(prompt_tokens: int, wanted: int | None, window: int) -> None:
    head = f"This model's maximum context length is {window} tokens. However, "
    if prompt_tokens >= window:
        text = (
            f"{head}your prompt contains {prompt_tokens} input tokens, which exceeds this limit "
            "even without any output tokens. Please reduce the length of the input prompt."
        )
        raise refused("input_tokens", text, prompt_tokens)
    if wanted is not None and prompt_tokens + wanted > window:
        text = (
            f"{head}you requested {wanted} output tokens and your prompt contains {prompt_tokens} "
            f"input tokens, for a total of {prompt_tokens + wanted} tokens. Please reduce the "
            "length of the input prompt or the number of requested output tokens."
        )
        raise refused("input_tokens", text, prompt_tokens)


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise refused("stop", "stop must be a string or a list of non-empty strings", "...")
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


def parse_kv_transfer_params(params: object, *, push: bool = False) -> tuple[RemoteKv | None, bool]:
    """The claim of a decode leg, and whether this is a prefill leg.

    Under `push` the claim's request id is left to the caller: both legs go by the same one.
    """
    if params is None:
        return None, False
    if not isinstance(params, dict):
        raise invalid("kv_transfer_params", "dict_type", "Input should be a valid dictionary", "''")
    keep_kv = bool(params.get("do_remote_decode"))
    blocks = () if push else _blocks(params.get("remote_block_ids"))
    if not params.get("do_remote_prefill") or (not blocks and not push):
        return None, keep_kv
    try:
        return _claim(params | {"remote_request_id": ""} if push else params, blocks), keep_kv
    except (KeyError, TypeError, ValueError):
        return RemoteKv(None, "", ()), keep_kv


def _blocks(groups: Any) -> Sequence[int]:
    """Blocks of the first cache group; older versions have no groups."""
    if not groups:
        return ()
    found: Sequence[int] = groups[0] if isinstance(groups[0], list) else groups
    return found


def _claim(params: Mapping[str, Any], blocks: Sequence[int]) -> RemoteKv:
    cached = params.get("remote_prefill_cached_tokens")
    return RemoteKv(
        engine_id=str(params["remote_engine_id"]),
        request_id=str(params["remote_request_id"]),
        blocks=tuple(map(int, blocks)),
        host=str(params["remote_host"]),
        port=int(params["remote_port"]),
        cached_tokens=None if cached is None else int(cached),
    )
