"""What is held, what flows and what is learned, wherever the engine's packets are cut."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import Disconnected, EngineFailed, TimedOut, WorkerFailure
from router.relay import Relay
from tests.fakes import DONE, ERROR, ROLE, chunk, event

SSE = ((b"content-type", b"text/event-stream; charset=utf-8"),)
USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)
STREAM = ROLE + chunk({"content": "Hel"}) + chunk({"content": "lo"}, "stop") + USAGE + DONE


@dataclass(slots=True)
class Client:
    """Keeps what it is sent."""

    begun: bool = False
    data: bytes = b""

    def start_stream(self, data: bytes) -> None:
        assert not self.begun
        self.begun = True
        self.data = data

    def write(self, data: bytes) -> None:
        assert self.begun
        self.data += data


@dataclass(slots=True)
class Story:
    """How a reply went."""

    client: Client = field(default_factory=Client)
    started: bool | None = None
    failure: WorkerFailure | None = None
    finished: bool = False
    forgone: bool = False  # `started` has failed, and nobody needs to await `finished`
    relay: Any = None

    def ending(self) -> None:
        """Note what the relay's futures say."""
        self.forgone = self.relay.finished.cancelled()
        try:
            if self.relay.started.done():
                self.started = self.relay.started.result()
            if self.relay.finished.done():
                self.relay.finished.result()
                self.finished = True
        except WorkerFailure as raised:
            self.failure = raised


def relayed(
    *pieces: bytes,
    status: int = 200,
    headers: Sequence[tuple[bytes, bytes]] = SSE,
    failure: WorkerFailure | None = None,
    ends: bool = True,
) -> Story:
    """Push a reply into a relay; it ends, fails, or is left open."""
    story = Story()

    async def push() -> None:
        relay = story.relay = Relay(story.client)
        relay.on_head(status, headers)
        for piece in pieces:
            relay.on_data(piece)
        if failure is not None:
            relay.on_failure(failure)
        elif ends:
            relay.on_end()
        story.ending()

    asyncio.run(push())
    return story


def cut(data: bytes, *places: int) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a != b]


def with_crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def test_all_bytes_pass_as_they_are():
    story = relayed(STREAM)
    assert story.client.data == STREAM
    assert (story.started, story.finished, story.failure) == (True, True, None)


@pytest.mark.parametrize("stream", [STREAM, with_crlf(STREAM)], ids=["lf", "crlf"])
def test_cut_at_every_byte(stream):
    for place in range(1, len(stream)):
        story = relayed(*cut(stream, place))
        assert story.client.data == stream
        assert (story.started, story.finished) == (True, True)
        assert story.relay.usage["completion_tokens"] == 2


def test_a_byte_at_a_time():
    story = relayed(*(STREAM[i : i + 1] for i in range(len(STREAM))))
    assert story.client.data == STREAM
    assert story.finished
    assert story.relay.usage["prompt_tokens"] == 7


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_text_in_any_packets(texts, crlf, ascii_only, data):
    pieces = [
        b"data: " + json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        for body in ({"choices": [{"delta": {"content": text}}]} for text in texts)
    ]
    stream = ROLE + b": ping\n\n" + b"".join(piece + b"\n\n" for piece in pieces) + USAGE + DONE
    if crlf:
        stream = with_crlf(stream)
    places = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=6))
    story = relayed(*cut(stream, *places))
    assert story.client.data == stream
    assert story.finished
    assert story.relay.usage["completion_tokens"] == 2


def test_nothing_is_sent_before_the_first_content():
    for piece in cut(ROLE + b": keep-alive\n\n", *range(1, len(ROLE))):
        assert piece
    story = relayed(*cut(ROLE + b": keep-alive\n\n", 5, 50), ends=False)
    assert not story.client.begun
    assert story.started is None


def test_content_flows_with_the_packet_that_completes_its_event():
    first = ROLE + chunk({"content": "Hel"})
    story = relayed(first[:-1], ends=False)
    assert not story.client.begun
    story = relayed(first[:-1], first[-1:], ends=False)
    assert story.client.data == first
    assert story.started is True


def test_whole_events_flow_at_once_and_a_piece_of_one_waits_for_its_rest():
    first, second = ROLE + chunk({"content": "Hel"}), chunk({"content": "lo"})
    for place in range(1, len(second)):
        story = relayed(first, second + second[:place], ends=False)
        assert story.client.data == first + second
        story = relayed(first, second + second[:place], second[place:], ends=False)
        assert story.client.data == first + second + second


def test_the_packet_that_begins_the_stream_is_split_likewise():
    first = ROLE + chunk({"content": "Hel"})
    story = relayed(first + b'data: {"cho', ends=False)
    assert story.client.data == first


def test_a_long_piece_of_an_event_does_not_wait_for_ever():
    """What waits is bounded, in memory and so in work."""
    first = ROLE + chunk({"content": "Hel"})
    piece = b"x" * 100_000
    story = relayed(first, b'data: {"cho', *[piece] * 10, ends=False)
    assert story.client.data == first
    story = relayed(first, b'data: {"cho', *[piece] * 11, ends=False)
    assert story.client.data == first + b'data: {"cho' + piece * 11


def test_a_long_event_passes_whole():
    long = chunk({"content": "x" * 2_500_000})
    stream = ROLE + chunk({"content": "Hel"}) + long + USAGE + DONE
    story = relayed(*cut(stream, *range(60_000, len(stream), 60_000)))
    assert story.client.data == stream
    assert story.finished
    assert story.relay.usage["completion_tokens"] == 2


@pytest.mark.parametrize(
    "content",
    [
        chunk({"content": "x"}),
        chunk({"reasoning_content": "x"}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
        chunk({"role": "assistant", "content": "at once"}),
        chunk({}, "stop"),
        event({"choices": [{"index": 0, "text": "x"}]}),
        event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}),
        b"data: not json\n\n",
        b"data:" + chunk({"content": "no space"})[6:],
        b"id: 1\nevent: message\n" + chunk({"content": "x"}),
        DONE,
    ],
)
def test_what_counts_as_content(content):
    story = relayed(ROLE, b": comment\n\n", content, ends=False)
    assert story.client.data == ROLE + b": comment\n\n" + content


@pytest.mark.parametrize(
    "silence",
    [
        ROLE,
        b": comment\n\n",
        b"\n\n",
        b"event: ping\n\n",
        chunk({}),
        chunk({"content": None}),
        event({"choices": []}),
        event({"choices": [{"index": 0, "text": ""}]}),
        event({"choices": [], "usage": {"prompt_tokens": 3}}),
    ],
)
def test_what_does_not(silence):
    story = relayed(silence, silence, ends=False)
    assert not story.client.begun


@pytest.mark.parametrize("before", [b"", ROLE, b": comment\n\n" + ROLE, with_crlf(ROLE)])
@pytest.mark.parametrize("behind", [b"", DONE])
def test_an_error_before_content_is_a_failure_the_client_does_not_see(before, behind):
    for place in range(len(before), len(before + ERROR)):
        story = relayed(*cut(before + ERROR + behind, place))
        assert isinstance(story.failure, EngineFailed)
        assert not story.client.begun


def test_an_error_behind_content_ends_the_stream():
    """What the engine says behind it would tell the client that all is well."""
    begun = ROLE + chunk({"content": "x"})
    story = relayed(begun, ERROR + DONE)
    assert story.started is True
    assert isinstance(story.failure, EngineFailed)
    assert story.client.data == begun


@pytest.mark.parametrize("crlf", [False, True], ids=["lf", "crlf"])
def test_an_error_behind_content_ends_the_stream_wherever_it_is_cut(crlf):
    begun, failed, done = ROLE + chunk({"content": "x"}), ERROR, DONE
    if crlf:
        begun, failed, done = with_crlf(begun), with_crlf(failed), with_crlf(done)
    for place in range(1, len(begun + failed) + 1):
        story = relayed(*cut(begun + failed + done, place))
        assert isinstance(story.failure, EngineFailed)
        assert story.client.data == begun


@pytest.mark.parametrize("piece", [b"d", b"data: [DONE]"])
def test_a_piece_behind_an_error_is_not_sent_when_the_reply_ends(piece):
    """It would be [DONE], or glued to the error event that the client gets."""
    begun = ROLE + chunk({"content": "x"})
    story = relayed(begun, ERROR + piece)
    assert isinstance(story.failure, EngineFailed)
    assert story.client.data == begun


def test_an_error_in_the_packet_that_begins_the_stream_ends_it():
    begun = ROLE + chunk({"content": "x"})
    story = relayed(begun + ERROR + DONE)
    assert story.started is True
    assert isinstance(story.failure, EngineFailed)
    assert story.client.data == begun


def test_what_comes_behind_an_error_is_dropped():
    begun = ROLE + chunk({"content": "x"})
    story = relayed(begun, ERROR, chunk({"content": "y"}), DONE)
    assert isinstance(story.failure, EngineFailed)
    assert story.client.data == begun


def test_content_before_an_error_in_one_packet_is_passed_on():
    begun, more = ROLE + chunk({"content": "x"}), chunk({"content": "y"})
    story = relayed(begun, more + ERROR + DONE)
    assert story.client.data == begun + more
    assert story.relay.events == 3


def test_text_about_errors_is_no_error():
    quoting = chunk({"content": 'data: {"error": 1}\n\ndata: {"error": 1}'})
    for place in range(1, len(quoting)):
        story = relayed(ROLE, chunk({"content": "x"}), *cut(quoting, place), DONE)
        assert story.finished


@pytest.mark.parametrize("place", ["first", "later"])
def test_an_error_member_that_says_nothing_is_no_error(place):
    harmless = event({"error": None, "choices": [{"index": 0, "delta": {"content": "x"}}]})
    before = chunk({"content": "y"}) if place == "later" else b""
    story = relayed(ROLE, before, harmless, DONE)
    assert story.finished
    assert story.client.data == ROLE + before + harmless + DONE


@pytest.mark.parametrize("stream", [b"", ROLE, b": only a comment\n\n"])
def test_a_stream_without_content_failed(stream):
    story = relayed(stream)
    assert isinstance(story.failure, EngineFailed)
    assert not story.client.begun


@pytest.mark.parametrize("lost", [b"", DONE[:-3], DONE[:8], chunk({"content": "lo"})[:-1]])
def test_a_stream_without_its_end_broke_off(lost):
    """And the piece of an event that came last is kept from the client: an event follows it."""
    begun = ROLE + chunk({"content": "Hel"})
    story = relayed(begun, lost)
    assert isinstance(story.failure, Disconnected)
    assert story.started is True
    assert story.client.data == begun


@pytest.mark.parametrize("failure", [Disconnected("gone"), TimedOut("idle_timeout")])
def test_of_a_reply_that_fails_no_piece_is_sent(failure):
    begun = ROLE + chunk({"content": "Hel"})
    story = relayed(begun, b'data: {"cho', failure=failure)
    assert story.failure is failure
    assert story.client.data == begun


@pytest.mark.parametrize("last", [DONE, DONE[:-1], DONE[:-2], with_crlf(DONE)])
def test_done_at_the_very_end_ends_the_stream_whatever_lines_follow(last):
    begun = ROLE + chunk({"content": "Hel"})
    story = relayed(begun, last)
    assert story.finished
    assert story.client.data == begun + last


def test_done_may_come_without_a_space():
    """As any event of an event stream may."""
    assert relayed(ROLE, chunk({"content": "x"}), b"data:[DONE]\n\n").finished


@pytest.mark.parametrize("failure", [Disconnected("gone"), TimedOut("idle_timeout")])
def test_failures_before_content_are_raised_by_started(failure):
    story = relayed(ROLE, failure=failure)
    assert story.failure is failure
    assert story.started is None
    assert not story.client.begun


def test_failures_behind_content_are_raised_by_finished():
    failure = Disconnected("gone")
    story = relayed(ROLE, chunk({"content": "x"}), failure=failure)
    assert story.started is True
    assert story.failure is failure
    assert not story.finished


def test_only_the_first_failure_counts():
    async def twice() -> Relay:
        relay = Relay(Client())
        relay.on_head(200, SSE)
        relay.on_data(ERROR)
        relay.on_failure(Disconnected("gone"))
        relay.on_end()
        with pytest.raises(EngineFailed, match="engine_error_event"):
            await relay.started
        assert relay.finished.cancelled()
        return relay

    asyncio.run(twice())


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, ((b"content-type", b"application/json"),)),
        (400, ((b"content-type", b"application/json"),)),
        (500, SSE),
        (200, ()),
    ],
)
def test_a_reply_that_is_no_stream_is_kept_whole(status, headers):
    story = relayed(b'{"a":', b"1}", status=status, headers=headers)
    assert story.started is False
    assert story.finished
    assert not story.client.begun
    assert (story.relay.status, story.relay.body) == (status, b'{"a":1}')


def test_an_engine_that_only_chatters_is_relayed_in_the_end():
    """What is held is bounded."""
    comment = b": " + b"x" * 100_000 + b"\n\n"
    story = relayed(*[comment] * 11, ends=False)
    assert story.client.begun
    assert story.client.data == comment * 11


def test_holding_costs_no_more_for_being_long():
    """Four times the packets take some four times the work."""

    def cost_s(packets: int) -> float:
        before_s = time.process_time()
        relayed(*[b": " + b"x" * 1000 + b"\n\n"] * packets, ends=False)
        return time.process_time() - before_s

    assert min(cost_s(120) for _ in range(2)) < 20 * max(cost_s(30) for _ in range(3))


def test_usage_is_read_from_the_end_of_a_long_stream():
    long = b"".join(chunk({"content": f"word {i} "}) for i in range(2000))
    pieces = cut(ROLE + long + USAGE + DONE, *range(100, len(long), 777))
    assert relayed(*pieces).relay.usage["completion_tokens"] == 2
    assert relayed(ROLE + long + USAGE + DONE).relay.usage["completion_tokens"] == 2


def test_no_usage_is_none():
    assert relayed(ROLE + chunk({"content": '"usage":{'}) + DONE).relay.usage is None
    assert (
        relayed(ROLE + chunk({"content": "x"}) + b'data: {"usage":{\n\n' + DONE).relay.usage is None
    )
    assert (
        relayed(ROLE + chunk({"content": "x"}) + b'data: {"usage":null}\n\n' + DONE).relay.usage
        is None
    )


def test_the_last_usage_counts():
    """Some engines count with every event."""
    counted = [
        event({"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": i}})
        for i in range(3)
    ]
    assert relayed(ROLE, *counted, DONE).relay.usage == {"completion_tokens": 2}


def test_usage_beside_text_about_event_streams():
    counted = event({"choices": [{"delta": {"content": "data: x"}}], "usage": {"prompt_tokens": 3}})
    assert relayed(ROLE, counted, DONE).relay.usage == {"prompt_tokens": 3}


def test_events_are_counted():
    stream = ROLE + chunk({"content": "a"}) + chunk({"content": "b"}) + DONE
    assert relayed(stream).relay.events == 4
    assert relayed(*cut(stream, len(ROLE), len(stream) - len(DONE))).relay.events == 4


@pytest.mark.parametrize(
    "stream",
    [
        ROLE + chunk({"content": "a"}) + chunk({"content": "b"}) + DONE,
        with_crlf(ROLE + chunk({"content": "a"}) + chunk({"content": "b"}) + DONE),
    ],
    ids=["lf", "crlf"],
)
def test_events_are_counted_however_they_are_cut(stream):
    assert relayed(stream).relay.events == 4
    for place in range(1, len(stream)):
        assert relayed(*cut(stream, place)).relay.events == 4


def test_a_reply_that_failed_before_content_leaves_no_second_failure():
    """Nobody awaits `finished` then, and the loop would log what nobody has looked at."""
    for story in (
        relayed(ROLE + ERROR + DONE),
        relayed(ROLE),
        relayed(ROLE, failure=Disconnected("gone")),
    ):
        assert story.failure is not None
        assert story.forgone


def test_times_of_first_and_last_content():
    relay = relayed(STREAM).relay
    assert 0 < relay.first_content_s <= relay.last_content_s
