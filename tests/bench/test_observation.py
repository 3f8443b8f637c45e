import asyncio

import pytest

from bench.observation import Call, StreamObserver, has_content

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":" hi"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


async def observe(chunks, status=200):
    observer = StreamObserver(Call(0, 0.0))
    observer.started(status, {b"x-pdrouter-prefill": b"p0"})
    for chunk in chunks:
        observer.body(chunk)
    observer.ended()
    return await observer.done


def test_first_content_is_the_first_text_that_is_not_empty():
    assert not has_content(ROLE)
    assert has_content(ROLE + TEXT)
    assert has_content(b'data: {"choices":[{"text":"x"}]}')
    assert not has_content(b'data: {"choices":[{"text":"')


def test_a_whole_stream_is_read():
    call = asyncio.run(observe([ROLE, TEXT, TEXT, USAGE, DONE]))
    assert call.error == ""
    assert (call.prompt_tokens, call.cached_tokens, call.output_tokens) == (9, 4, 3)
    assert call.prefill == "p0"
    assert call.first_s <= call.last_s <= call.end_s
    assert call.events == 5


@pytest.mark.parametrize("size", [1, 7, 50])
def test_chunks_may_break_anywhere(size):
    data = ROLE + TEXT + USAGE + DONE
    call = asyncio.run(observe([data[i : i + size] for i in range(0, len(data), size)]))
    assert call.error == ""
    assert call.first_s is not None
    assert call.prompt_tokens == 9


def test_what_is_wrong_is_named():
    cut = asyncio.run(observe([ROLE, TEXT]))
    assert cut.error == "stream ended without [DONE]"
    failed = asyncio.run(observe([b'data: {"error":{"type":"E","code":500}}\n\n', DONE]))
    assert failed.error == "error event E/500"
    refused = asyncio.run(observe([b'{"error":{"type":"T","code":"c"}}'], status=429))
    assert refused.error == "HTTP 429 T/c"
    silent = asyncio.run(observe([ROLE, USAGE, DONE]))
    assert silent.error == "no content"


def test_a_lost_connection_is_an_error():
    async def lose():
        observer = StreamObserver(Call(0, 0.0))
        observer.failed("connection lost")
        return await observer.done

    assert asyncio.run(lose()).error == "connection lost"


def test_times_are_taken_from_the_send():
    call = Call(0, 0.0, sent_s=1.0, first_s=1.5, last_s=3.5, end_s=4.0, output_tokens=5)
    assert (call.ttft_s, call.tpot_s, call.e2e_s) == (0.5, 0.5, 3.0)
    assert Call(0, 0.0).ttft_s is None
    assert Call(0, 0.0).tpot_s is None
