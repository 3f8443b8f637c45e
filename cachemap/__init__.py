"""KNOWS which worker holds which prompt prefix. Pure: no I/O, clock or event loop."""

from cachemap.hashing import Blocks, hash_blocks
from cachemap.in_memory import InMemoryCacheMap
from cachemap.prompt import Prompt, read_prompt

__all__ = ["Blocks", "InMemoryCacheMap", "Prompt", "hash_blocks", "read_prompt"]
