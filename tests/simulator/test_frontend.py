"""A worker's HTTP endpoints beside the answers themselves."""

from __future__ import annotations

from typing import Any

CHAT: Any = {
    "model": "tiny",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Who? " * 80}],
}
PATH = "/v1/chat/completions"


def test_an_api_key_is_asked_for(serve):
    served = serve("both", api_key="secret")
    refused = served.post(PATH, CHAT)
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    assert served.get("/health").status_code == 200
    allowed = served.post(PATH, CHAT, headers={"authorization": "Bearer secret"})
    assert allowed.status_code == 200


def test_the_prefix_cache_can_be_reset(serve):
    served = serve("both")
    served.post(PATH, CHAT)
    assert served.post("/reset_prefix_cache", {}).json() == {"success": True}
    reply = served.post(PATH, CHAT).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_load_counts_calls(serve):
    served = serve("both", speed=1.0)
    body = CHAT | {"max_tokens": 2000, "stream": True}
    with served.client.stream("POST", served.url() + PATH, json=body):
        assert served.get("/load").json()["server_load"] == 1
    for _ in range(200):
        if served.get("/load").json()["server_load"] == 0:
            return
    raise AssertionError("the call was not forgotten")


def test_the_host_header_can_be_checked(serve):
    served = serve("both")
    served.faults(host_check=True)
    assert served.post(PATH, CHAT).status_code == 200
    assert served.post(PATH, CHAT, headers={"host": "router.example"}).status_code == 421
    assert served.get("/health").status_code == 200


def test_a_fraction_of_server_errors(serve):
    served = serve("both")
    served.faults(error_5xx=0.25, error_status=503)
    codes = [served.post(PATH, CHAT).status_code for _ in range(40)]
    assert codes.count(503) == 10
    assert codes.count(200) == 30


def test_paths_and_methods_that_are_not_served(serve):
    served = serve("both")
    for path, method, status, allowed in (
        ("/v1/nothing", "GET", 404, None),
        ("/v1/chat/completions", "GET", 405, "POST"),
        ("/health", "POST", 405, "GET"),
        ("/tokenize", "GET", 405, "POST"),
    ):
        reply = served.client.request(method, served.url() + path)
        assert (reply.status_code, reply.headers.get("allow")) == (status, allowed)


def test_a_query_does_not_hide_a_path(serve):
    served = serve("both")
    assert served.get("/health?x=1").status_code == 200
    assert served.client.post(served.url() + "/reset_prefix_cache?x=1").status_code == 200
