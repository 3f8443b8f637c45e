"""Answers on the wire: streams say what replies say, stop where they should and count right."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.simulator.sse import events

CHAT: Any = {
    "model": "tiny",
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "Tell me."}],
}


@pytest.fixture(scope="module")
def one():
    from tests.simulator.conftest import Served

    served = Served("both", speed=200.0)
    yield served
    served.close()


def chat(served, **members):
    return served.post("/v1/chat/completions", CHAT | members)


def content(reply):
    return reply.json()["choices"][0]["message"]["content"]


def streamed(reply):
    """Text, finish reason and stop reason of a chat stream of one choice."""
    text, finish, stop = "", None, None
    for event in events(reply.text):
        if event == "[DONE]" or not event["choices"]:
            continue
        choice = event["choices"][0]
        text += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        stop = choice.get("stop_reason") or stop
    return text, finish, stop


def test_a_stream_says_what_the_reply_says(one):
    whole = chat(one)
    text, finish, _ = streamed(chat(one, stream=True))
    assert text == content(whole)
    assert finish == whole.json()["choices"][0]["finish_reason"] == "length"
    assert len(text) == 160


def test_each_token_is_an_event_in_a_chunk_of_its_own(one):
    with one.client.stream(
        "POST", one.url() + "/v1/chat/completions", json=CHAT | {"stream": True}
    ) as r:
        found = events("".join(r.iter_text()))
    assert len(found) == 1 + 40 + 1
    assert found[-1] == "[DONE]"
    assert len({event["id"] for event in found[:-1]}) == 1


def test_stream_interval_groups_tokens(one):
    text, finish, _ = streamed(chat(one, stream=True, stream_interval=7))
    found = events(chat(one, stream=True, stream_interval=7).text)
    assert text == content(chat(one))
    assert finish == "length"
    assert len(found) <= 1 + 1 + 40 // 7 + 2 + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_before_it(one, stream, include):
    whole = content(chat(one))
    stop = whole[50:57]
    expected = whole[: whole.find(stop)] + (stop if include else "")
    reply = chat(one, stop=[stop, "\0"], stream=stream, include_stop_str_in_output=include)
    if stream:
        text, finish, reason = streamed(reply)
    else:
        choice = reply.json()["choices"][0]
        text, finish, reason = content(reply), choice["finish_reason"], choice["stop_reason"]
        assert reply.json()["usage"]["completion_tokens"] == 15
    assert (text, finish, reason) == (expected, "stop", stop)
    assert one.state()["running"] == 0


def test_no_limit_ends_by_itself(one):
    body = {"model": "tiny", "messages": CHAT["messages"]}
    reply = one.post("/v1/chat/completions", body).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert 64 <= reply["usage"]["completion_tokens"] <= 575


def test_choices_differ_and_are_counted_together(one):
    reply = chat(one, n=3).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert len(set(texts)) == 3
    assert texts[0] == content(chat(one))
    assert reply["usage"]["completion_tokens"] == 120
    found = events(chat(one, n=3, stream=True).text)
    parts = ["", "", ""]
    for event in found[:-1]:
        choice = event["choices"][0]
        parts[choice["index"]] += choice["delta"].get("content") or ""
    assert parts == texts


def test_several_prompts_stream_by_index(one):
    body = {"model": "tiny", "prompt": ["One", "Two"], "max_tokens": 9}
    whole = [choice["text"] for choice in one.post("/v1/completions", body).json()["choices"]]
    parts = ["", ""]
    for event in events(one.post("/v1/completions", body | {"stream": True}).text)[:-1]:
        parts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert parts == whole
    assert whole[0] != whole[1]


def test_echo_repeats_the_prompt(one):
    body = {"model": "tiny", "prompt": "Echo this", "max_tokens": 4, "echo": True}
    text = one.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text.startswith("Echo this")
    assert len(text) == len("Echo this") + 16
    found = events(one.post("/v1/completions", body | {"stream": True}).text)
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == text


def test_token_ids_are_the_texts(one):
    reply = chat(one, return_token_ids=True).json()
    ids = reply["choices"][0]["token_ids"]
    told = one.post("/detokenize", {"model": "tiny", "tokens": ids}).json()["prompt"]
    assert told == reply["choices"][0]["message"]["content"]
    asked = one.post("/tokenize", {"messages": CHAT["messages"]}).json()
    assert asked["tokens"] == reply["prompt_token_ids"]
    assert asked["count"] == reply["usage"]["prompt_tokens"]
    found = events(chat(one, return_token_ids=True, stream=True).text)
    assert found[0]["prompt_token_ids"] == asked["tokens"]
    assert [i for e in found[1:-1] for i in e["choices"][0]["token_ids"]] == ids


def test_continuous_usage_counts_up(one):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(chat(one, stream=True, stream_options=options).text)
    counts = [event["usage"]["completion_tokens"] for event in found[:-1]]
    assert counts == [*range(41), 40]


def test_a_forced_tool_is_called(one):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    named = {"type": "function", "function": {"name": "look_up"}}
    for choice in ("required", named):
        reply = chat(one, tools=tools, tool_choice=choice).json()["choices"][0]
        assert reply["finish_reason"] == "tool_calls"
        call = reply["message"]["tool_calls"][0]["function"]
        assert call["name"] == "look_up"
    arguments = ""
    for event in events(chat(one, tools=tools, tool_choice="required", stream=True).text)[1:-1]:
        arguments += event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == call["arguments"]
    assert chat(one, tools=tools).json()["choices"][0]["finish_reason"] == "length"


def test_request_ids_become_ids(one):
    with_header = one.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": "abc"})
    assert with_header.json()["id"] == "chatcmpl-abc"
    assert chat(one, request_id="def").json()["id"] == "chatcmpl-def"
    assert chat(one).json()["id"] != chat(one).json()["id"]


def test_cache_salt_separates(one):
    long = CHAT | {"messages": [{"role": "user", "content": "salted " * 50}]}
    cached = []
    for salt in ("a", "a", "b"):
        reply = one.post("/v1/chat/completions", long | {"cache_salt": salt}).json()
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_the_openai_client_is_content(one):
    with openai.OpenAI(base_url=one.url() + "/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        assert len(reply.choices[0].logprobs.content) == 40
        with client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == reply.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 40
        assert client.models.list().data[0].id == "tiny"
        legacy = client.completions.create(model="tiny", prompt="Hi", max_tokens=3, logprobs=2)
        logprobs: Any = legacy.choices[0].logprobs
        assert len(logprobs.tokens) == 3
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**(CHAT | {"model": "nope"}))
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**(CHAT | {"max_tokens": 0}))
