"""vLLM's NixlConnector, pull mode: prefill first, its reply names the KV, decode fetches it."""

from __future__ import annotations

from typing import Any

import orjson

from router.openai_protocol import dump, splice_member

JSON = dict[str, Any]

_PREFILL_PARAMS: JSON = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What the prefill leg must not carry on: it answers one token, in one piece, and whatever that
# token is, the KV has to be handed on (a stop at the first token would end the call there).
_DROPPED_ON_PREFILL = frozenset(
    {
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "stop",
        "stop_token_ids",
        "best_of",
        "use_beam_search",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
    }
)


class VllmNixl:
    def prefill(self, body: JSON, chat: bool) -> bytes:
        return dump(self._one_token(body, chat) | {"kv_transfer_params": _PREFILL_PARAMS})

    def transfer_params(self, reply: JSON) -> bytes | None:
        params = reply.get("kv_transfer_params")
        # Opaque: the members differ by version, and copying the known ones would lose some.
        return orjson.dumps(params) if params else None

    def decode(self, raw: bytes, params: bytes) -> bytes:
        return splice_member(raw, b"kv_transfer_params", params)

    def release(self, body: JSON, chat: bool, params: bytes) -> bytes:
        return splice_member(dump(self._one_token(body, chat)), b"kv_transfer_params", params)

    @staticmethod
    def _one_token(body: JSON, chat: bool) -> JSON:
        leg = {name: value for name, value in body.items() if name not in _DROPPED_ON_PREFILL}
        leg["stream"] = False
        leg["max_tokens"] = 1
        if chat:  # where present it wins over max_tokens; completions do not know it
            leg["max_completion_tokens"] = 1
        leg["ignore_eos"] = True
        return leg
