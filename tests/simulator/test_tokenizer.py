"""The tokenizer: text comes back, prefixes stay prefixes, and it is fast."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from simulator.text import Answer
from simulator.tokenizer import VOCABULARY, decode, encode, encode_chat

texts = st.text(st.characters(codec="utf-8"), max_size=200)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "critic"])},
        optional={
            "content": texts,
            "name": st.text(min_size=1, max_size=8).filter(lambda t: t.isascii()),
        },
    ),
    min_size=1,
    max_size=6,
)


@given(texts)
def test_text_round_trips(text):
    tokens = encode(text)
    assert decode(tokens) == text
    assert len(tokens) == -(-len(text.encode()) // 4)


@given(st.lists(texts, max_size=5))
def test_texts_put_together_round_trip(parts):
    ids = [token for part in parts for token in encode(part).tolist()]
    assert decode(ids) == "".join(parts)


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=50))
def test_any_ids_have_a_text(ids):
    assert isinstance(decode(ids), str)


@given(messages, messages)
def test_a_longer_conversation_extends_the_shorter(first, more):
    short = encode_chat({"messages": first, "add_generation_prompt": False}).tolist()
    long = encode_chat({"messages": first + more}).tolist()
    assert long[: len(short)] == short


def test_an_answer_that_comes_back_as_history_has_its_tokens():
    question = [{"role": "user", "content": "And then?"}]
    answer = Answer(42)
    asked = encode_chat({"messages": question}).tolist()
    history = [*question, {"role": "assistant", "content": answer.text(50)}]
    told = encode_chat({"messages": history, "add_generation_prompt": False}).tolist()
    assert told[: len(asked) + 50] == asked + answer.token_ids(0, 50)


def test_what_a_template_renders_changes_the_prompt_and_nothing_else_does():
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    plain = encode_chat(body).tolist()
    changes: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": "Hi", "tool_call_id": "c1"}]},
    ]
    rendered = [tuple(encode_chat(body | change).tolist()) for change in changes]
    assert len({*rendered, tuple(plain)}) == len(changes) + 1
    assert encode_chat(body | {"temperature": 1, "user": "u", "unknown": [1]}).tolist() == plain


def test_text_parts_are_text():
    whole = {"messages": [{"role": "user", "content": "Hello"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    assert encode_chat(whole).tolist() == encode_chat(parts).tolist()


def test_a_continued_message_is_left_open():
    body = {"messages": [{"role": "assistant", "content": "Once upon"}]}
    open_ended = encode_chat(body | {"continue_final_message": True}).tolist()
    closed = encode_chat(body | {"add_generation_prompt": False}).tolist()
    assert closed[:-1] == open_ended


def test_special_tokens_have_names():
    text = decode(encode_chat({"messages": [{"role": "user", "content": "Hi"}]}))
    assert text == "<|begin|><|user|>Hi<|end|><|assistant|>"


def test_it_takes_hundreds_of_megabytes_a_minute():
    text = "tokens and more tokens, " * 200_000
    start = perf_counter()
    encode_chat({"messages": [{"role": "user", "content": text}]})
    seconds = perf_counter() - start
    assert len(text) / seconds > 500e6 / 60
