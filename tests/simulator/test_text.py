"""What the model says: the same for the same prompt, and every slip shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.text import PIECE_BYTES, PIECE_IDS, PIECES, Answer, natural_length
from simulator.tokenizer import decode, encode

keys = st.integers(0, 2**64 - 1)


def test_pieces_are_distinct_and_are_tokens():
    assert len(set(PIECES)) == len(PIECES) == 4096
    assert all(len(piece.encode()) == PIECE_BYTES for piece in PIECES)
    assert encode("".join(PIECES)).tolist() == list(PIECE_IDS)


@given(keys, st.integers(0, 200), st.integers(0, 100))
def test_a_part_is_a_part_of_the_whole(key, first, count):
    whole = Answer(key).pieces(0, first + count)
    assert Answer(key).pieces(first, count) == whole[first:]
    assert decode(Answer(key).token_ids(first, count)) == "".join(whole[first:])


@given(keys, keys, st.integers(0, 3), st.integers(0, 3))
def test_prompts_and_choices_have_answers_of_their_own(one, two, left, right):
    same = (one, left) == (two, right)
    assert (Answer(one, left).text(40) == Answer(two, right).text(40)) == same


@given(keys)
def test_a_lost_doubled_or_exchanged_token_shows(key):
    pieces = Answer(key).pieces(0, 64)
    assert len(set(pieces)) > 48
    assert pieces[1:] != pieces[:-1]


@given(keys, st.integers(0, 60), st.integers(1, 9))
def test_a_stop_string_is_found_where_it_first_completes(key, start, length):
    text = Answer(key).text(80)
    stop = text[start * 2 : start * 2 + length]
    place = Answer(key).stop_at([stop, "\0"], 80)
    assert place is not None
    tokens, characters, found = place
    assert found == stop
    assert characters == text.find(stop)
    assert tokens == -(-(characters + length) // PIECE_BYTES)


@pytest.mark.parametrize("stops", [["\0"], []])
def test_no_stop_string(stops):
    assert Answer(5).stop_at(stops, 600) is None


def test_a_stop_string_does_not_end_an_answer_before_its_least_length():
    stop = Answer(5).text(3)[4:8]
    found = Answer(5).stop_at([stop], 4000, 10)
    assert found is None or found[0] > 10


@given(keys)
def test_an_answer_without_a_limit_ends(key):
    assert 64 <= natural_length(key) <= 575
