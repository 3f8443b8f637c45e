"""Answers and failures of real sockets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvloop

from router import probe
from router.probe import HttpProbe, ProbeError, Reply

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Sends the next of `answers` for each request; None says nothing and keeps the line open."""

    def __init__(self, *answers: bytes | None, close: bool = False) -> None:
        self.answers = list(answers)
        self.close = close
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader, writer) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer or b"")
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self, host: str = "127.0.0.1"):
        server = await asyncio.start_server(self.serve, host, 0)
        try:
            yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    return request.param


def failure(run, server: Server, timeout_s: float = 5.0) -> ProbeError:
    async def scenario() -> ProbeError:
        async with server.running() as url:
            with pytest.raises(ProbeError) as caught:
                await HttpProbe(url).get("/health", timeout_s=timeout_s)
        return caught.value

    error: ProbeError = run(scenario())
    return error


def test_one_connection_serves_many_probes(run):
    server = Server(OK)

    async def scenario() -> list[Reply]:
        async with server.running() as url:
            subject = HttpProbe(url)
            replies = [await subject.get(path, timeout_s=5) for path in ("/health", "/metrics")]
            subject.close()
        return replies

    assert run(scenario()) == [Reply(200, b"ok", True), Reply(200, b"ok", False)]
    assert server.connections == 1
    assert server.requests[1].startswith(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:")


def test_a_chunked_answer_is_joined(run):
    chunked = (
        b"HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )

    async def scenario() -> Reply:
        async with Server(chunked).running() as url:
            subject = HttpProbe(url)
            reply = await subject.get("/health", timeout_s=5)
            subject.close()
        return reply

    assert run(scenario()) == Reply(503, b"abcde", True)


def test_a_connection_that_the_worker_closed_is_made_anew(run):
    server = Server(OK, close=True)

    async def scenario() -> list[Reply]:
        async with server.running() as url:
            subject = HttpProbe(url)
            return [await subject.get("/health", timeout_s=5) for _ in range(3)]

    assert run(scenario()) == [Reply(200, b"ok", True)] * 3
    assert server.connections == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_where_nothing_listens_is_refused(run, host):
    async def scenario() -> None:
        async with Server(OK).running() as url:
            pass
        await HttpProbe(url.replace("127.0.0.1", host)).get("/health", timeout_s=5)

    with pytest.raises(ProbeError, match="connection refused") as caught:
        run(scenario())
    assert caught.value.refused


def test_a_worker_that_says_nothing_runs_out_of_time(run):
    error = failure(run, Server(None), timeout_s=0.05)
    assert (str(error), error.refused) == ("no answer within 0.05 s", False)


def test_an_answer_that_stops_in_the_middle_runs_out_of_time(run):
    error = failure(run, Server(OK[:-1]), timeout_s=0.05)
    assert str(error) == "no answer within 0.05 s"


def test_a_late_answer_is_never_taken_for_the_next_one(run):
    server = Server(None, OK)

    async def scenario() -> Reply:
        async with server.running() as url:
            subject = HttpProbe(url)
            with pytest.raises(ProbeError):
                await subject.get("/health", timeout_s=0.05)
            reply = await subject.get("/metrics", timeout_s=5)
            subject.close()
        return reply

    assert run(scenario()).reconnected
    assert server.connections == 2


def test_a_connection_that_closes_before_the_answer_is_a_failure(run):
    error = failure(run, Server(b"HTTP/1.1 200 OK\r\n", close=True))
    assert not error.refused


def test_what_is_not_http_is_a_failure(run):
    assert str(failure(run, Server(b"SSH-2.0-OpenSSH\r\n"))) == "the answer is not HTTP"


def test_an_endless_answer_is_a_failure(run, monkeypatch):
    monkeypatch.setattr(probe, "MAX_BODY_BYTES", 1)
    assert "longer than 1 bytes" in str(failure(run, Server(OK)))
