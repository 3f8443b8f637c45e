import json

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.prompts import (
    Filler,
    PromptBuilder,
    SegmentCache,
    message_starts,
)
from bench.tokenisation import WORD_BYTES, Tokenisation
from bench.traces import Row

TOKENS = Tokenisation(message_tokens=2, reply_tokens=2)


def row(runs, input_tokens=None, block_size=16):
    blocks = sum(count for _, count in runs or ())
    return Row(0.0, None, None, input_tokens or blocks * block_size, 1, block_size, runs)


def rendered(messages):
    """What an engine's template makes of the messages, a token being WORD_BYTES bytes."""
    parts = ["<bos>"]
    for role, text in messages:
        parts += [f"<{role}>", *words(text), "<end>"]
    return parts


def words(text):
    return [text[i : i + WORD_BYTES] for i in range(0, len(text), WORD_BYTES)]


def common(left, right):
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


@st.composite
def forests(draw):
    """Rows whose ids are chained: each row takes a leading part of an earlier one and adds ids."""
    rows: list[Row] = []
    chains: list[list[int]] = [[]]
    unseen = 0
    for _ in range(draw(st.integers(2, 8))):
        base = draw(st.sampled_from(chains))
        kept = base[: draw(st.integers(0, len(base)))]
        fresh = draw(st.integers(0 if kept else 1, 4))
        chain = [*kept, *range(unseen, unseen + fresh)]
        unseen += fresh
        chains.append(chain)
        runs = tuple((block, 1) for block in chain)
        pad = draw(st.integers(0, 15))
        rows.append(row(runs, 16 * len(chain) + pad))
    return rows


def ids(item):
    return item.block_ids().tolist()


@settings(max_examples=150, deadline=None)
@given(forests())
def test_common_ids_are_common_text_and_nothing_else_is(rows):
    builder = PromptBuilder(rows, TOKENS, "seed")
    texts = [rendered(builder.messages(item, number)) for number, item in enumerate(rows)]
    for i, left in enumerate(rows):
        for j, right in enumerate(rows[:i]):
            shared = common(ids(left), ids(right)) * 16
            # The template's role and the words that spell an id may go on for part of a block.
            assert shared <= common(texts[i], texts[j]) < shared + 8


@settings(max_examples=100, deadline=None)
@given(forests())
def test_prompts_have_the_rows_tokens(rows):
    builder = PromptBuilder(rows, TOKENS, "seed")
    for number, item in enumerate(rows):
        messages = builder.messages(item, number)
        count = TOKENS.reply_tokens
        count += sum(TOKENS.message_tokens + len(words(text)) for _, text in messages)
        # A whole prompt of whole blocks has no room for the opening of the reply.
        assert 0 <= count - item.input_tokens <= TOKENS.reply_tokens


@given(forests())
def test_the_body_is_the_same_messages_as_json(rows):
    builder = PromptBuilder(rows, TOKENS, "seed")
    for number, item in enumerate(rows):
        parsed = json.loads(builder.messages_json(item, number))
        expected = builder.messages(item, number)
        assert [(message["role"], message["content"]) for message in parsed] == expected


def test_a_turn_starts_where_a_row_first_brought_new_ids():
    rows = [row(((0, 4),)), row(((0, 4), (4, 2))), row(((0, 2),)), row(((0, 4), (4, 2), (6, 1)))]
    assert message_starts(rows).tolist() == [0, 4, 6]
    builder = PromptBuilder(rows, TOKENS, "seed")
    assert [role for role, _ in builder.messages(rows[3], 3)] == ["system", "user", "assistant"]


def test_a_partial_last_block_is_the_start_of_the_whole_one():
    rows = [row(((0, 2),), 40, 32), row(((0, 2),), 64, 32)]
    builder = PromptBuilder(rows, TOKENS, "seed")
    short, whole = (builder.messages(item, 0)[0][1] for item in rows)
    assert whole.startswith(short)
    assert len(words(short)) == 40 - TOKENS.message_tokens - TOKENS.reply_tokens


def test_rows_without_blocks_have_texts_of_their_own():
    rows = [Row(0.0, None, None, 50, 1, None, None)] * 2
    builder = PromptBuilder(rows, TOKENS, "seed")
    (_, first), (_, second) = (builder.messages(item, i)[0] for i, item in enumerate(rows))
    assert len(words(first)) == len(words(second)) == 46
    assert common(words(first), words(second)) < 2


def test_other_seeds_are_other_texts():
    assert Filler("a").block(1, 16) != Filler("b").block(1, 16)


@given(st.integers(0, 1 << 35), st.integers(1, 70000))
def test_filler_has_exactly_its_words(number, count):
    assert len(FILLER.block(number, count)) == count * WORD_BYTES
    assert len(FILLER.unique(number, count)) == count * WORD_BYTES


FILLER = Filler("seed")


def test_the_segment_cache_stays_within_its_bytes():
    cache = SegmentCache(100)
    for number in range(50):
        assert cache.get((number, 1, 0), lambda: b"x" * 30) == b"x" * 30
        assert cache.bytes <= 100
    assert cache.get((49, 1, 0), lambda: b"not made again") == b"x" * 30
