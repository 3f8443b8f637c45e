"""OpenAI's own Python client, an independent implementation, as judge of the wire format."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.cluster import chat, http, prompt, streamed_text, text_of, until
from tests.fakes import (
    ERROR,
    ROLE,
    Answer,
    Received,
    chunk,
    completion,
    events,
    hang_up,
    prefilled,
    silent,
    whole,
)

JSON = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
]


def test_a_whole_answer(sdk, sims):
    body = chat(prompt("whole"))
    answer = sdk.chat.completions.create(**body)
    choice = answer.choices[0]
    assert choice.message.content == sims.text(body)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_streamed_answer(sdk, sims):
    body = chat(prompt("streamed"))
    chunks = list(sdk.chat.completions.create(**body, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == sims.text(body)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1
    assert len(chunks) > 20
    # Nobody asked for usage, so there is none.
    assert all(c.choices and c.usage is None for c in chunks)


def test_usage_at_the_end_of_a_stream_when_asked_for(sdk):
    body = chat(prompt("usage"), stream=True, stream_options={"include_usage": True})
    *chunks, last = sdk.chat.completions.create(**body)
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.usage.prompt_tokens > 60
    assert all(c.choices for c in chunks)


def test_a_prompt_sent_twice_is_reported_as_cached(sdk):
    body = chat(prompt("cached", 400))
    sdk.chat.completions.create(**body)
    answer = sdk.chat.completions.create(**body)
    usage = answer.usage
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens - 32


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_passed_through(sdk, sims, stream):
    choice = {"type": "function", "function": {"name": "weather"}}
    body = chat(prompt(f"tools-{stream}"), tools=TOOLS, tool_choice=choice)
    if stream:
        chunks = list(sdk.chat.completions.create(**body, stream=True))
        calls = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
        name = calls[0].function.name
        arguments = "".join(call.function.arguments or "" for call in calls)
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = sdk.chat.completions.create(**body)
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        finish = answer.choices[0].finish_reason
    assert (name, finish) == ("weather", "tool_calls")
    alone = http("POST", sims["alone"].url + "/v1/chat/completions", json=body)
    message = alone.json()["choices"][0]["message"]
    assert json.loads(arguments) == json.loads(message["tool_calls"][0]["function"]["arguments"])


def test_completions_whole_and_streamed(sdk, sims):
    body = {"model": "sim", "prompt": prompt("completion"), "max_tokens": 24}
    expected = sims.text(body, "/v1/completions")
    assert sdk.completions.create(**body).choices[0].text == expected
    chunks = sdk.completions.create(**body, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == expected


def test_a_prompt_of_token_ids(sdk, sims):
    asked = {"model": "sim", "prompt": prompt("ids", 200)}
    ids = http("POST", f"{sims['alone'].url}/tokenize", json=asked).json()["tokens"]
    body = {"model": "sim", "prompt": ids, "max_tokens": 8}
    answer = sdk.completions.create(**body)
    assert answer.choices[0].text == sims.text(body, "/v1/completions")
    assert answer.usage.prompt_tokens == len(ids)


def test_several_choices_and_prompts(sdk):
    answer = sdk.chat.completions.create(**chat(prompt("n"), n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    answer = sdk.completions.create(model="sim", prompt=[prompt("a"), prompt("b")], max_tokens=4)
    assert len(answer.choices) == 2


def test_log_probabilities(sdk):
    answer = sdk.chat.completions.create(**chat(prompt("logprobs"), logprobs=True, top_logprobs=2))
    assert len(answer.choices[0].logprobs.content) == 24


def test_the_model_list_and_aliases(sdk, sims):
    ids = [card.id for card in sdk.models.list()]
    assert {"sim", "sim-alias", "wide", "scripted"} <= set(ids)
    body = chat(prompt("alias"))
    answer = sdk.chat.completions.create(**(body | {"model": "sim-alias"}))
    assert answer.choices[0].message.content == sims.text(body)


def test_raw_response_headers(sdk):
    raw = sdk.chat.completions.with_raw_response.create(
        **chat(prompt("headers")), extra_headers={"x-request-id": "my-id.1"}
    )
    assert raw.headers["x-request-id"] == "my-id.1"
    assert raw.headers["x-pdrouter-prefill"].startswith("127.0.0.1:")
    assert raw.headers["x-pdrouter-decode"].startswith("127.0.0.1:")
    assert raw.headers["x-pdrouter-cached-tokens"].isdecimal()


# -- errors ----------------------------------------------------------------------------------------


def shaped(error: openai.APIStatusError) -> dict[str, object]:
    """The error object of a reply, which has OpenAI's four members."""
    found = error.response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert error.response.headers["x-request-id"]
    return dict(found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"stream_options": {"include_usage": True}},
        {"messages": "not a list"},
        {"extra_body": {"min_tokens": 30}},
        {"model": 7},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_request_is_a_bad_request(sdk, wrong):
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.chat.completions.create(**(chat(prompt("wrong")) | wrong))
    shaped(raised.value)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_window_is_the_engines_bad_request(scripted, sdk, stream):
    refusal = {
        "error": {
            "message": "This model's maximum context length is 9 tokens.",
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        }
    }
    scripted.prefill.behaviour = whole(400, refusal)
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.chat.completions.create(**chat("hello", "scripted", stream=stream))
    # As the engine said it: neither wrapped again nor another status.
    assert raised.value.response.json() == refusal
    assert scripted.decode.received == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_decode_leg_is_passed_on(scripted, sdk, stream):
    refusal = {"error": {"message": "no", "type": "X", "param": "seed", "code": 422}}
    scripted.decode.behaviour = whole(422, refusal)
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        sdk.chat.completions.create(**chat("hello", "scripted", stream=stream))
    assert raised.value.response.json() == refusal
    assert len(scripted.decode.received) == 1


def test_an_unknown_model_is_not_found(sdk):
    with pytest.raises(openai.NotFoundError) as raised:
        sdk.chat.completions.create(**chat("hello", "no-such-model"))
    assert shaped(raised.value)["code"] == "model_not_found"


def test_an_unknown_path_is_not_found(sdk):
    with pytest.raises(openai.NotFoundError) as raised:
        sdk.fine_tuning.jobs.list()
    assert set(raised.value.response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("what", ["chat", "completions", "models"])
def test_a_wrong_key_is_an_authentication_error(strict, what):
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong", max_retries=0) as client:
        calls = {
            "chat": lambda: client.chat.completions.create(**chat("hello")),
            "completions": lambda: client.completions.create(model="sim", prompt="hello"),
            "models": client.models.list,
        }
        with pytest.raises(openai.AuthenticationError) as raised:
            calls[what]()
    assert raised.value.response.json()["error"]["code"] == "invalid_api_key"


def test_the_right_key_is_let_in_and_kept_from_the_engines(strict, strict_sdk, scripted):
    scripted.decode.behaviour = whole(200, completion())
    strict_sdk.chat.completions.create(**chat("hello", "scripted"))
    for received in (*scripted.prefill.received, *scripted.decode.received):
        assert strict.key not in str(received.headers)


def test_a_full_queue_is_a_rate_limit_error(strict, strict_sdk, scripted, loop_thread):
    # The scripted decode engine has room for one call, and one more may wait.
    go_on = threading.Event()

    async def hold(request: Received, answer: Answer) -> None:
        await asyncio.to_thread(go_on.wait, 10)
        answer.reply(200, json.dumps(completion()).encode())

    def code_of(body: JSON) -> int:
        return int(strict.post(body).status_code)

    scripted.decode.behaviour = hold
    body = chat(prompt("longer than all its room"), "scripted")
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(code_of, body) for _ in range(2)]
        until(lambda: strict.page.total("pdrouter_queue_depth") == 1, 5, "one call waits")
        with pytest.raises(openai.RateLimitError) as raised:
            strict_sdk.chat.completions.create(**body)
        go_on.set()
        codes = [call.result(20) for call in calls]
    assert shaped(raised.value)["type"] == "rate_limit_error"
    assert int(raised.value.response.headers["retry-after"]) >= 1
    assert strict.page.total("pdrouter_rejected_total", reason="queue_full") >= 1
    assert codes == [200, 200]


def test_a_wait_that_is_too_long_is_a_rate_limit_error(strict_sdk, strict, scripted):
    scripted.decode.behaviour = silent
    body = chat(prompt("longer than all its room"), "scripted")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(strict.post, body)
        until(lambda: scripted.decode.received, 5, "the first call decodes")
        with pytest.raises(openai.RateLimitError) as raised:
            strict_sdk.chat.completions.create(**body)
        assert first.result(20).status_code == 504
    assert "queue.timeout_s" in str(shaped(raised.value)["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_engines_that_fail_are_an_internal_server_error(scripted, sdk, stream):
    scripted.prefill.behaviour = whole(500, {"error": {"message": "boom"}})
    scripted.decode.behaviour = whole(500, {"error": {"message": "boom"}})
    with pytest.raises(openai.InternalServerError) as raised:
        sdk.chat.completions.create(**chat("hello", "scripted", stream=stream))
    assert raised.value.status_code == 502
    assert "boom" not in str(shaped(raised.value)["message"])


def test_an_engine_that_breaks_off_mid_stream_is_an_api_error(scripted, sdk):
    scripted.decode.behaviour = events(ROLE, chunk({"content": "one"}), then="cut")
    seen: list[str] = []
    stream = sdk.chat.completions.create(**chat("hello", "scripted", stream=True))
    with pytest.raises(openai.APIError) as raised:
        seen.extend(item.choices[0].delta.content for item in stream)
    assert type(raised.value) is openai.APIError
    assert seen == ["", "one"]
    assert len(scripted.decode.received) == 1


def test_an_error_event_mid_stream_is_an_api_error(scripted, sdk):
    scripted.decode.behaviour = events(ROLE, chunk({"content": "one"}), ERROR, b"data: [DONE]\n\n")
    with pytest.raises(openai.APIError):
        list(sdk.chat.completions.create(**chat("hello", "scripted", stream=True)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_client_whose_patience_ends_is_gone_from_the_engines(sdk, scripted, stage, stream):
    engine = getattr(scripted, stage)
    engine.behaviour = silent
    hurried = sdk.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        hurried.chat.completions.create(**chat("hello", "scripted", stream=stream))
    assert engine.received
    until(lambda: engine.active == 0, 1.0, "the upstream connection closed")


def test_the_clients_own_retries_find_a_recovered_router(gateway, scripted):
    scripted.prefill.behaviour = hang_up
    scripted.decode.behaviour = hang_up
    healed = whole(200, completion("well again"))

    class Recovering(httpx2.HTTPTransport):
        def handle_request(self, request):
            reply = super().handle_request(request)
            scripted.prefill.behaviour = whole(200, prefilled())
            scripted.decode.behaviour = healed
            return reply

    with (
        httpx2.Client(transport=Recovering()) as transport,
        openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=2, http_client=transport
        ) as client,
    ):
        answer = client.chat.completions.create(**chat("hello", "scripted"))
    assert answer.choices[0].message.content == "well again"


# -- curl ------------------------------------------------------------------------------------------


def curl(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    return subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "--max-time", "20", *arguments],
        input=data,
        capture_output=True,
        timeout=30,
        check=True,
    )


def test_curl_streams(gateway, sims):
    body = chat(prompt("curl"), stream=True)
    url = f"{gateway.url}/v1/chat/completions"
    kind = "content-type: application/json"
    done = curl("-N", "-i", url, "-H", kind, "-d", json.dumps(body))
    head, _, stream = done.stdout.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream" in head.lower()
    assert stream.endswith(b"data: [DONE]\n\n")
    assert streamed_text(stream.decode()) == sims.text(body)


@pytest.mark.parametrize(
    "options",
    [[], ["-H", "Transfer-Encoding: chunked"], ["--http1.0"], ["-H", "Expect: 100-continue"]],
    ids=["plain", "chunked", "old", "expect"],
)
def test_curl_sends_a_large_body_in_any_framing(gateway, sims, options):
    body = chat(prompt("large"), unknown="x" * 2_000_000)
    data = json.dumps(body).encode()
    url = f"{gateway.url}/v1/chat/completions"
    done = curl(*options, url, "--data-binary", "@-", data=data)
    assert text_of(json.loads(done.stdout)) == sims.text(body)


def test_curl_http10_stream_ends_with_its_connection(gateway, sims):
    body = chat(prompt("old"), stream=True)
    done = curl("--http1.0", "-i", f"{gateway.url}/v1/chat/completions", "-d", json.dumps(body))
    head, _, stream = done.stdout.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert streamed_text(stream.decode()) == sims.text(body)
