"""What lies in an engine's KV blocks, and what the prefix cache is told of it.

A block's content is a number: the hash of the tokens whose KV it holds, or another one if the KV is
somebody else's. What is computed on top of wrong KV is wrong too, and so is the text that comes of
it, which is how a bad handoff shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from simulator.blocks import BlockManager
from simulator.hashing import Chain, Tokens, chain_blocks, mix
from simulator.kv_events import AllBlocksCleared, BlockRemoved, BlocksStored, KvEvent
from simulator.sequence import Sequence
from simulator.text import Answer


class KvContents:
    """Writes and publishes the blocks of sequences."""

    def __init__(
        self, blocks: BlockManager, block_tokens: int, *, record_events: bool = False
    ) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._events: list[KvEvent] = []
        self._record = record_events
        if record_events:
            blocks.on_forget = self._forgotten

    def take_events(self) -> list[KvEvent]:
        """What happened in the cache since the last call; nothing if it is not recorded."""
        events, self._events = self._events, []
        return events

    # -- blocks are written ---------------------------------------------------------------------

    def compute(self, sequence: Sequence) -> None:
        """What was not found in the cache is computed here, on top of what was."""
        first = sequence.hits
        contents = sequence.chain.hashes[first:]
        if len(contents) + first < len(sequence.blocks):
            contents = [*contents, sequence.identity]
        key = self._wrongness(sequence.blocks[:first])
        if key:
            contents = [mix(value ^ key) for value in contents]
        self._write(sequence, first, contents)

    def receive(self, sequence: Sequence, contents: Iterable[int]) -> int:
        """What was not found in the cache comes from another engine; the number of blocks.

        Where `contents` are too few, KV of nobody lies in the rest.
        """
        own = len(sequence.blocks) - sequence.hits
        known = list(contents)[-own:] if own else []
        held = known + [mix(~sequence.identity - i) for i in range(own - len(known))]
        self._write(sequence, sequence.hits, held)
        return own

    def _write(self, sequence: Sequence, first: int, contents: list[int]) -> None:
        blocks = sequence.blocks[first:]
        self._blocks.write(blocks, contents)
        hashes = [*sequence.chain.hashes, sequence.identity]
        expected = hashes[first : first + len(contents)]
        if contents != expected:
            wrong = (
                block
                for block, held, hoped in zip(blocks, contents, expected, strict=False)
                if held != hoped
            )
            self._blocks.corrupt.update(wrong)

    # -- and read -------------------------------------------------------------------------------

    def read(self, blocks: Collection[int]) -> list[int]:
        """What lies in blocks, whoever they belong to, as a remote read finds it."""
        content, capacity = self._blocks.content, self._blocks.capacity
        if blocks and min(blocks) >= 0 and max(blocks) < capacity:
            return list(map(content.__getitem__, blocks))
        return [content[block] if 0 <= block < capacity else 0 for block in blocks]

    def identity(self, sequence: Sequence) -> int:
        """Identity of what the blocks of a sequence really hold."""
        key = self._wrongness(sequence.blocks)
        return mix(sequence.identity ^ key) if key else sequence.identity

    def _wrongness(self, blocks: Iterable[int]) -> int:
        """0 if blocks hold what they should, else a number made of what the wrong ones hold."""
        if not self._blocks.corrupt:
            return 0
        wrong = [block for block in blocks if block in self._blocks.corrupt]
        key = 0
        for block in wrong:
            key = mix(key + self._blocks.content[block] + 1)
        return key or (1 if wrong else 0)

    # -- the prefix cache -----------------------------------------------------------------------

    def extend_chain(self, sequence: Sequence) -> None:
        """Chain the blocks that generated tokens have filled, so that a next turn finds them."""
        tokens = self._block_tokens
        known = len(sequence.chain.hashes)
        full = sequence.computed // tokens
        if full <= known or sequence.generated == 0:
            return
        rest = self._tokens(sequence, known * tokens, full * tokens)
        more = chain_blocks(rest, tokens, sequence.chain.total, known)
        sequence.chain = Chain(sequence.chain.hashes + more.hashes, more.total)
        key = self._wrongness(sequence.blocks[:known])
        self._write(sequence, known, [mix(h ^ key) for h in more.hashes] if key else more.hashes)

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """The whole blocks of the first `tokens` tokens can be found from now on."""
        hashes, first = sequence.chain.hashes, sequence.published
        full = min(tokens // self._block_tokens, len(hashes))
        if full <= first:
            return
        # A hash that was known keeps its first block, which may be gone by now; ours takes over.
        while first and not self._blocks.knows(hashes[first - 1]):
            first -= 1
        self._blocks.publish(sequence.blocks[first:full], hashes[first:full])
        sequence.published = full
        if self._record:
            stored = self._tokens(sequence, first * self._block_tokens, full * self._block_tokens)
            parent = hashes[first - 1] if first else None
            salt = sequence.request.salt
            self._events.append(BlocksStored(hashes[first:full], parent, stored, salt))

    def clear_cache(self) -> bool:
        """Forget the prefix cache. False while any block is held."""
        done = self._blocks.clear_cache()
        if done and self._record:
            self._events.append(AllBlocksCleared())
        return done

    def _forgotten(self, key: int) -> None:
        self._events.append(BlockRemoved(key))

    def _tokens(self, sequence: Sequence, start: int, end: int) -> Tokens:
        """Tokens `start` to `end - 1` of a prompt and its answer."""
        prompt = sequence.request.tokens[start:end]
        if end <= sequence.prompt_len:
            return prompt
        first = max(0, start - sequence.prompt_len)
        answer = Answer(sequence.key, sequence.request.choice)
        outputs = answer.token_ids(first, end - sequence.prompt_len - first)
        return np.concatenate([prompt, np.array(outputs, dtype=np.uint32)])
