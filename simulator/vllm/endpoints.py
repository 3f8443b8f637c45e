"""Replies of the endpoints that generate nothing."""

from __future__ import annotations

import orjson

from simulator.tokenizer import JSON, decode, encode, encode_chat
from simulator.vllm.errors import invalid
from simulator.vllm.requests import Served, check_types, token_ids


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
        check_types("chat", body)
        tokens = encode_chat(body)
    elif isinstance(body.get("prompt"), str):
        tokens = encode(body["prompt"])
    else:
        raise invalid("prompt", "missing", "Field required", f"'<dict of {len(body)} items>'")
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
