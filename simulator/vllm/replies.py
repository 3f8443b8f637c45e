"""Replies that come whole, and the parts that streams are made of too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from simulator.hashing import Tokens
from simulator.text import PIECE_BYTES, PIECES, Answer
from simulator.tokenizer import JSON, decode
from simulator.vllm.requests import Call

VERSION = "0.33.0"
FINGERPRINT = f"vllm-{VERSION}-simulated"


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
    push: bool = False

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
            "transfer_mode": "push" if self.push else "pull",
            "remote_prefill_cached_tokens": self.cached_tokens,
        }


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


def chat_logprobs(choice: Choice, first: int, count: int, top: int) -> JSON:
    def entry(token: str, logprob: float) -> JSON:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    content = []
    for draw in choice.answer.draws(first, count):
        item = entry(PIECES[draw], _logprob(draw))
        item["top_logprobs"] = [entry(*other) for other in _alternatives(draw, top)]
        content.append(item)
    return {"content": content}


def completion_logprobs(choice: Choice, first: int, count: int, top: int) -> JSON:
    draws = choice.answer.draws(first, count)
    return {
        "text_offset": [(first + i) * PIECE_BYTES for i in range(count)],
        "token_logprobs": [_logprob(draw) for draw in draws],
        "tokens": [PIECES[draw] for draw in draws],
        "top_logprobs": [dict(_alternatives(draw, max(1, top))) for draw in draws],
    }


def tool_call(call: Call, arguments: str) -> JSON:
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
        message["tool_calls"] = [tool_call(call, '{"text":"' + text + '"}')]
        finish = "tool_calls"
    logprobs = None
    if call.logprobs is not None:
        logprobs = chat_logprobs(choice, 0, count, call.logprobs)
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
        logprobs = completion_logprobs(choice, 0, count, call.logprobs)
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
