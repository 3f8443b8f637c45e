"""Calls to simulated workers, and what becomes of them."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

CHAT: Any = {
    "model": "tiny",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Who? " * 80}],
}
PATH = "/v1/chat/completions"


def eventually(check, seconds=5.0):
    """Wait until `check` holds; the time it took."""
    start = time.monotonic()
    while not check():
        assert time.monotonic() - start < seconds, "did not come about"
        time.sleep(0.005)
    return time.monotonic() - start


def leg1(served, body=CHAT, at=0):
    reply = served.post(
        PATH, body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}, at
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["kv_transfer_params"]


def content(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def raw_request(served, body, at=0):
    """A connection with a request on its way."""
    worker = served.workers[at]
    data = json.dumps(body).encode()
    connection = socket.create_connection((worker.config.host, worker.port))
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection
