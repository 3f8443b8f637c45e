from __future__ import annotations

import inspect
import json

import pytest

from router import errors
from router.errors import RouterError, WorkerFailure, error_event, error_object

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RouterError) and (kind is RouterError or not kind.__subclasses__())
]


def test_the_object_is_openais():
    body = json.loads(error_object("what", "server_error", "param", 7))
    assert body == {
        "error": {"message": "what", "type": "server_error", "param": "param", "code": 7}
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_status_a_type_and_a_reason(kind):
    error = kind("what happened", param="model", code="x")
    assert 400 <= error.status < 600
    assert error.reason
    assert " " not in error.reason
    assert json.loads(error.body())["error"] == {
        "message": "what happened",
        "type": error.type,
        "param": "model",
        "code": "x",
    }


def test_reasons_tell_kinds_apart():
    assert len({kind.reason for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.BadRequest, 400),
        (errors.Unauthorized, 401),
        (errors.ModelNotFound, 404),
        (errors.BodyTooLarge, 413),
        (errors.QueueOverflow, 429),
        (errors.QueueTimeout, 429),
        (errors.WorkersFailed, 502),
        (errors.NoWorkers, 503),
        (errors.WorkersTimedOut, 504),
    ],
)
def test_statuses(kind, status):
    assert kind.status == status


def test_an_error_event_is_one_event_whatever_the_message():
    event = error_event(RouterError("two\nlines\n\nand a gap"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["message"] == "two\nlines\n\nand a gap"


def test_a_stale_connection_is_a_lost_one():
    assert issubclass(errors.StaleConnection, errors.Disconnected)
    assert WorkerFailure("word").reason == "word"
    assert not issubclass(WorkerFailure, RouterError)
