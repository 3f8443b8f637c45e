"""Canonical bytes: equal exactly where an engine would print the same prompt."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import Prompt, read_prompt
from cachemap.prompt import TOKEN_ID_BYTES

# A busy machine is not a failure.
quick = settings(deadline=None, max_examples=50)

MODEL = "m"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
odd_values = st.recursive(
    scalars | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
texts = st.text(max_size=60)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": texts
            | st.none()
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3),
        },
        optional={
            "name": texts,
            "reasoning_content": texts,
            "tool_calls": st.lists(st.fixed_dictionaries({"id": texts}), min_size=1, max_size=2),
        },
    ),
    max_size=6,
)
MEMBERS = (
    *("messages", "prompt", "tools", "documents", "chat_template", "chat_template_kwargs"),
    *("cache_salt", "reasoning_effort", "model", "stop"),
)


def chat(*contents: Any, **members: Any) -> Prompt:
    turns = [{"role": "user", "content": content} for content in contents]
    return read_prompt({"messages": turns, **members}, MODEL)


def identity(prompt: Prompt) -> tuple[int, bytes]:
    return prompt.seed, prompt.data


@quick
@given(messages)
def test_the_same_conversation_gives_the_same_bytes(conversation):
    first = read_prompt({"messages": conversation}, MODEL)
    assert read_prompt({"messages": copy.deepcopy(conversation)}, MODEL) == first


@quick
@given(messages, messages, st.none() | st.lists(st.just({"type": "function"}), min_size=1))
def test_a_longer_conversation_extends_the_bytes_of_the_shorter_one(start, more, tools):
    shorter = read_prompt({"messages": start, "tools": tools}, MODEL)
    longer = read_prompt({"messages": start + more, "tools": tools}, MODEL)
    assert longer.seed == shorter.seed
    assert longer.data.startswith(shorter.data)
    assert longer.message_ends[: len(shorter.message_ends)] == shorter.message_ends


@quick
@given(messages)
def test_message_ends_ascend_and_the_last_one_is_the_end(conversation):
    prompt = read_prompt({"messages": conversation, "tools": [{"type": "function"}]}, MODEL)
    assert list(prompt.message_ends) == sorted(set(prompt.message_ends))
    assert prompt.message_ends[-1] == len(prompt.data)
    assert len(prompt.message_ends) == len(conversation) + 1  # the tools stand before them


@pytest.mark.parametrize(
    "member",
    [
        {"temperature": 0.3},
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"stream": True},
        {"stream_options": {"include_usage": True}},
        {"stop": ["x"]},
        {"seed": 1},
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"n": 2},
        {"logprobs": True},
        {"tools": []},
        {"tools": None},
        {"documents": None},
        {"cache_salt": None},
        {"unknown_member": {"deep": [1]}},
    ],
    ids=lambda member: next(iter(member)),
)
def test_members_that_do_not_reach_the_prompt_change_nothing(member):
    assert chat("hello", **member) == chat("hello")


@pytest.mark.parametrize(
    "member",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template": "{{ x }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "t"}]},
        {"reasoning_effort": "high"},
        {"cache_salt": "tenant"},
    ],
    ids=lambda member: next(iter(member)),
)
def test_members_that_reach_the_prompt_separate(member):
    assert identity(chat("hello", **member)) != identity(chat("hello"))


def test_equal_values_of_different_members_are_different_prompts():
    value = [{"name": "f"}]
    assert identity(chat("hello", tools=value)) != identity(chat("hello", documents=value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "n"}),
        (
            {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        ),
        (
            {"role": "tool", "content": "x", "tool_call_id": "1"},
            {"role": "tool", "content": "x", "tool_call_id": "2"},
        ),
        ({"role": "user", "content": "ab"}, {"role": "user", "content": "a"}),
    ],
)
def test_what_a_message_prints_separates(one, other):
    first = read_prompt({"messages": [one]}, MODEL)
    assert identity(first) != identity(read_prompt({"messages": [other]}, MODEL))


def test_two_messages_are_not_one_with_both_texts():
    assert chat("ab").data != chat("a", "b").data


def test_models_separate_prompts_of_equal_text():
    body = {"prompt": "same text"}
    assert read_prompt(body, "a").seed != read_prompt(body, "b").seed


@quick
@given(st.lists(st.text(max_size=5), min_size=2, max_size=4, unique=True))
def test_cache_salts_separate_tenants(salts):
    seeds = {chat("hello", cache_salt=salt).seed for salt in salts}
    assert len(seeds) == len(salts)


def test_text_parts_are_their_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert chat(parts) == chat("one two")


def test_media_count_by_content_and_little():
    def picture(url: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]

    large = chat(picture("data:image/png;base64," + "A" * 1_000_000))
    assert len(large.data) < 100
    assert large == chat(picture("data:image/png;base64," + "A" * 1_000_000))
    assert large != chat(picture("data:image/png;base64," + "A" * 999_999 + "B"))


@quick
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50), st.data())
def test_token_ids_take_four_bytes_each_and_extend(tokens, data):
    prompt = read_prompt({"prompt": tokens}, MODEL)
    assert prompt.is_token_ids
    assert len(prompt.data) == TOKEN_ID_BYTES * len(tokens)
    cut = data.draw(st.integers(2, len(tokens)))
    assert prompt.data.startswith(read_prompt({"prompt": tokens[:cut]}, MODEL).data)


def test_one_token_is_a_prompt_of_token_ids():
    assert read_prompt({"prompt": [5]}, MODEL).is_token_ids


@pytest.mark.parametrize("prompt", ["some text", [1, 2, 3]])
def test_a_batch_of_one_is_the_same_prompt(prompt):
    assert read_prompt({"prompt": [prompt]}, MODEL) == read_prompt({"prompt": prompt}, MODEL)


def test_token_ids_are_not_text():
    assert not read_prompt({"prompt": ["a", "b"]}, MODEL).is_token_ids
    assert not read_prompt({"prompt": []}, MODEL).is_token_ids
    assert not read_prompt({"prompt": [True, False]}, MODEL).is_token_ids


def test_a_lone_surrogate_has_bytes_of_its_own():
    lone = [json.loads(f'"{spelling}"') for spelling in ("\\ud83d", "\\ud83e")]
    assert chat(lone[0]).data != chat(lone[1]).data
    assert chat("x", chat_template_kwargs={"a": lone[0]}).data != chat("x").data


@quick
@given(st.dictionaries(st.sampled_from(MEMBERS), odd_values))
def test_odd_types_never_raise(body):
    prompt = read_prompt(body, MODEL)
    assert all(0 <= end <= len(prompt.data) for end in prompt.message_ends)
    assert 0 <= prompt.seed < 2**64


@quick
@given(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), odd_values))
def test_odd_messages_never_raise(message):
    read_prompt({"messages": [message]}, MODEL)


def test_integers_beyond_64_bits_never_raise():
    assert chat("x", tools=[10**30]).data != chat("x", tools=[10**31]).data
    assert read_prompt({"prompt": [2**70, -1]}, MODEL).is_token_ids


def test_deep_nesting_never_raises():
    """As deep as the body's parser lets through."""
    content: Any = "leaf"
    for _ in range(1015):
        content = [content]
    chat({"a": content})
