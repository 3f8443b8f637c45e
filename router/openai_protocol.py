"""The little of OpenAI's API that routing needs: reading a body, changing it byte by byte, and
looking into replies. Bodies stay opaque; members that are not named here are never touched."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from router.errors import BadRequest

JSON = dict[str, Any]

# Members and headers by which a client could make an engine fetch KV from anywhere, or from
# somebody else's call: never let through.
FORBIDDEN_MEMBERS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disaggregated_params",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
    }
)
_LIMIT_MEMBERS = ("max_completion_tokens", "max_tokens")


def parse(raw: bytes) -> JSON:
    """The body as a JSON object; raises `BadRequest`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = _parse_leniently(raw)
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    return body


def _parse_leniently(raw: bytes) -> Any:
    # Engines read with Python's json, which takes what orjson refuses: NaN, lone surrogates,
    # a byte order mark.
    if b"\0" in raw[:4]:
        raise BadRequest("The request body must be encoded as UTF-8.")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        where = f" (at byte {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise BadRequest(f"The request body is not valid JSON{where}.") from None


def dump(body: JSON) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, or nested very deeply
        try:
            return json.dumps(body, separators=(",", ":")).encode()
        except RecursionError:
            raise BadRequest("The request body is nested too deeply.") from None


def splice_member(raw: bytes, name: bytes, value: bytes) -> bytes:
    """`raw`, a non-empty JSON object, with one more member at its end; all other bytes stay."""
    return b'%b,"%b":%b}' % (raw[: raw.rindex(b"}")], name, value)


def without_forbidden(raw: bytes, body: JSON) -> tuple[bytes, JSON]:
    """The body without members that clients may not send. Untouched where there are none."""
    if FORBIDDEN_MEMBERS.isdisjoint(body):
        return raw, body
    body = {name: value for name, value in body.items() if name not in FORBIDDEN_MEMBERS}
    return dump(body), body


def with_model(raw: bytes, body: JSON, name: str) -> tuple[bytes, JSON]:
    """The body asking for the model under the `name` that engines know."""
    asked = body["model"]
    if asked == name:
        return raw, body
    body = body | {"model": name}
    member = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(asked)))
    changed, count = member.subn(lambda found: found[1] + orjson.dumps(name), raw)
    # The one place that reads like the member may be one of another object's.
    if count == 1 and parse(changed) == body:
        return changed, body
    return dump(body), body


def output_limit(body: JSON) -> int | None:
    """The client's limit on output tokens, if it has one."""
    for member in _LIMIT_MEMBERS:
        value = body.get(member)
        if type(value) is int:
            return max(value, 1)
    return None


def needs_one_worker(body: JSON) -> bool:
    """Whether prefill and decode of this call must not be split.

    Several choices or prompts would pull one KV several times, and a reply that shows the prompt's
    own tokens computes them where it is made.
    """
    prompt = body.get("prompt")
    several_prompts = (
        isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    )
    return (
        several_prompts
        or (body.get("n") or 1) != 1
        or (body.get("best_of") or 1) != 1
        or bool(body.get("use_beam_search"))
        or bool(body.get("echo"))
        or body.get("prompt_logprobs") is not None
    )


def cached_tokens(usage: Any) -> int | None:
    """Prompt tokens that the engine says it reused, from a reply's usage."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
