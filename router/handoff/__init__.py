"""How KV moves from prefill to decode, per engine protocol: pure functions that shape legs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from router.handoff.vllm_nixl import VllmNixl

JSON = dict[str, Any]


class Handoff(Protocol):
    """Shapes the two upstream requests of a call; the decode leg needs the prefill reply."""

    def prefill(self, body: JSON, chat: bool) -> bytes:
        """Body of the prefill leg for the client's parsed `body`."""

    def transfer_params(self, reply: JSON) -> bytes | None:
        """What the prefill `reply` says of its KV, as JSON; None where it says nothing."""

    def decode(self, raw: bytes, params: bytes) -> bytes:
        """Body of the decode leg: the client's `raw` bytes and the transfer parameters."""

    def release(self, body: JSON, chat: bool, params: bytes) -> bytes:
        """Body of a decode leg that takes the KV over and does nothing with it, so that the
        prefill worker can free it at once. Only for `params` that no leg was sent with."""


HANDOFFS: Mapping[str, Handoff] = {"vllm-nixl": VllmNixl()}
