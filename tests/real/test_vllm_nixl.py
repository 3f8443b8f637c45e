"""Through the router and two engines, a client reads what one engine alone would have answered."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.real.conftest import MODEL, Fleet, Router, launcher

BLOCK_TOKENS = 32
WORDS = (
    "router",
    "engine",
    "prompt",
    "cache",
    "token",
    "answer",
    "city",
    "train",
    "paper",
    "night",
)


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def eventually(check: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until `check` held."""
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        if check():
            return time.monotonic() - start
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s: {what}")


def streamed_chat(client: Any, **arguments) -> tuple[str, str | None, int]:
    """Text, finish reason and usage's completion tokens of a streamed chat."""
    text, finish, tokens = "", None, 0
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(stream=True, stream_options=options, **arguments):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return text, finish, tokens


def test_models_are_those_of_the_configuration(routed):
    models = {model.id for model in routed.models.list()}
    assert models == {MODEL, "tiny-alias"}


@pytest.mark.parametrize("seed", range(12))
def test_a_conversation_reads_as_from_one_engine(routed, plain, seed):
    """Three turns each, streamed and not in turn; the reference is asked the same turns."""
    messages = [{"role": "system", "content": words(20 + 15 * seed, seed)}]
    for turn in range(3):
        messages.append({"role": "user", "content": words(10 + 25 * turn, 100 * seed + turn)})
        arguments = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
        }
        right = plain.chat.completions.create(**arguments)
        expected = right.choices[0].message.content
        if (seed + turn) % 2:
            text, finish, tokens = streamed_chat(routed, **arguments)
        else:
            answer = routed.chat.completions.create(**arguments)
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            tokens = answer.usage.completion_tokens
            assert answer.usage.prompt_tokens == right.usage.prompt_tokens
        assert text == expected
        assert finish == right.choices[0].finish_reason
        assert tokens == right.usage.completion_tokens
        messages.append({"role": "assistant", "content": expected})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "prompt", [words(150, 7), list(range(300, 500)), "Hi"], ids=["text", "token-ids", "short"]
)
def test_a_completion_reads_as_from_one_engine(routed, plain, prompt, stream):
    arguments = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    right = plain.completions.create(**arguments).choices[0].text
    if stream:
        chunks = routed.completions.create(stream=True, **arguments)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    else:
        text = routed.completions.create(**arguments).choices[0].text
    assert text == right


def test_tools_and_unknown_fields_reach_the_engine(routed, plain):
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Weather of a city",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
        "tool_choice": "none",
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"repetition_penalty": 1.3},
    }
    right = plain.chat.completions.create(**arguments)
    answer = routed.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == right.choices[0].message.content
    assert answer.usage.prompt_tokens == right.usage.prompt_tokens


def test_the_kv_cache_comes_over_the_transfer(fleet: Fleet, routed):
    """Decode engines get whole prompts over NIXL and compute at most what is left of a block."""
    before, computed = fleet.external_tokens(), fleet.computed_tokens()
    prompt_tokens = 0
    for seed in range(6):
        answer = routed.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": words(250, 1000 + seed)}],
            max_tokens=4,
            temperature=0,
        )
        assert answer.headers["x-pdrouter-prefill"]
        assert answer.headers["x-pdrouter-decode"]
        prompt_tokens += answer.parse().usage.prompt_tokens
    moved = fleet.external_tokens() - before
    # All prompts begin with the same few template tokens: less than a block.
    assert prompt_tokens - 6 * BLOCK_TOKENS <= moved <= prompt_tokens
    assert fleet.computed_tokens() - computed <= 6 * BLOCK_TOKENS


def test_a_repeated_prompt_is_reused_and_counted(router: Router, routed):
    """The second time goes where the prefix is; the engine's own count reaches the client."""
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": words(300, 2000)}],
        "max_tokens": 4,
        "temperature": 0,
    }
    first = routed.chat.completions.create(**arguments)
    delivered = router.metric("pdrouter_prefix_tokens_total")
    second = routed.chat.completions.create(**arguments)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 2 * BLOCK_TOKENS
    assert router.metric("pdrouter_prefix_tokens_total") > delivered
    assert second.choices[0].message.content == first.choices[0].message.content


def test_an_unknown_model_is_404(routed):
    with pytest.raises(openai.NotFoundError) as caught:
        routed.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_too_long_is_400_with_the_engine_words(routed, plain, stream):
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": words(9000, 3)}],
        "stream": stream,
    }
    with pytest.raises(openai.BadRequestError) as right:
        plain.chat.completions.create(**arguments)
    with pytest.raises(openai.BadRequestError) as caught:
        routed.chat.completions.create(**arguments)
    assert caught.value.body == right.value.body


def test_a_bad_field_is_400(routed):
    with pytest.raises(openai.BadRequestError):
        routed.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=-3
        )


def test_handoff_fields_of_a_client_do_not_reach_an_engine(router: Router, routed, plain):
    """Passed on, these would hang the call and end the decode engine."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": words(60, 4000)}],
        "max_tokens": 8,
        "temperature": 0,
    }
    right = plain.chat.completions.create(**body).choices[0].message.content
    own = {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4]]}}
    answer = routed.chat.completions.create(**body, extra_body=own)
    assert answer.choices[0].message.content == right


def leave(client: httpx.Client, url: str, body: dict[str, Any], after_content: bool) -> None:
    """Start a streamed call and close the connection, at once or after the first content."""
    body = body | {"model": MODEL, "stream": True, "temperature": 0}
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if after_content:
            assert answer.status_code == 200
            next(line for line in answer.iter_lines() if '"content":"' in line.replace(" ", ""))


def test_a_client_that_leaves_a_stream_stops_the_engines(fleet: Fleet, router: Router):
    body = {"messages": [{"role": "user", "content": words(100, 5000)}], "max_tokens": 4000}
    with httpx.Client(timeout=60) as client:
        leave(client, router.url, body, after_content=True)
    eventually(lambda: fleet.busy() == 0, 2, "no engine works for nobody")
    eventually(lambda: router.metric("pdrouter_leases") == 0, 2, "no lease is open")


def test_a_client_that_leaves_during_prefill_stops_the_engines(fleet: Fleet, router: Router):
    fleet.empty_caches()
    before = router.metric("pdrouter_disconnects_total")
    body = {"messages": [{"role": "user", "content": words(3000, 6000)}], "max_tokens": 4000}
    with httpx.Client(timeout=httpx.Timeout(60, read=0.15)) as client:
        with pytest.raises(httpx.ReadTimeout):
            leave(client, router.url, body, after_content=False)
    eventually(lambda: router.metric("pdrouter_disconnects_total") > before, 2, "it was noticed")
    eventually(lambda: fleet.busy() == 0, 3, "no engine works for nobody")
    eventually(lambda: router.metric("pdrouter_leases") == 0, 2, "no lease is open")


def test_calls_at_once_are_all_right(fleet: Fleet, routed, plain):
    fleet.empty_caches()

    def ask(client: Any, seed: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": words(80 + 5 * seed, 7000 + seed)}],
            max_tokens=16,
            temperature=0,
        )
        return str(answer.choices[0].message.content)

    right = [ask(plain, seed) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda seed: ask(routed, seed), range(24)))
    assert got == right


def test_a_killed_prefill_engine_costs_no_call(fleet: Fleet, router: Router, routed, plain):
    """The last test: it leaves the fleet with one prefill engine."""
    launcher("stop", fleet.prefill[1].name, "--signal", "KILL", timeout=60)
    for seed in range(6):
        arguments = {
            "model": MODEL,
            "messages": [{"role": "user", "content": words(60, 8000 + seed)}],
            "max_tokens": 8,
            "temperature": 0,
        }
        right = plain.chat.completions.create(**arguments).choices[0].message.content
        assert routed.chat.completions.create(**arguments).choices[0].message.content == right
