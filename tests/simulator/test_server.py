"""A process of several workers: listed, controlled from one port, each its own engine."""

from __future__ import annotations


def test_workers_are_listed_and_controlled_through_one_port(serve):
    served = serve("prefill", "decode")
    admin = served.fleet.admin_url + "/sim/workers"
    listed = served.client.get(admin).json()
    assert [worker["role"] for worker in listed["workers"]] == ["prefill", "decode"]
    assert listed["workers"][0]["url"] == served.url(0)
    state = served.client.get(admin + "/d1/state").json()
    assert (state["name"], state["role"]) == ("d1", "decode")
    assert served.client.put(admin + "/d1/faults", json={"slow": 2}).json()["slow"] == 2
    assert served.state(1)["faults"]["slow"] == 2
    assert served.state(0)["faults"]["slow"] == 1
    assert served.client.post(admin + "/d1/restart").status_code == 200
    assert served.state(1)["engine_id"] != state["engine_id"]


def test_what_is_not_there_is_not_found(serve):
    served = serve("both")
    for path in ("/sim/workers/x/state", "/sim", "/", "/sim/workers/b0/melt"):
        assert served.client.get(served.fleet.admin_url + path).status_code == 404


def test_caches_are_the_workers_own(serve):
    served = serve("both", "both")
    body = {"model": "tiny", "prompt": "the same prompt for both of them " * 9, "max_tokens": 1}
    cached = [
        served.post("/v1/completions", body, at).json()["usage"]["prompt_tokens_details"]
        for at in (0, 0, 1)
    ]
    assert [details["cached_tokens"] > 0 for details in cached] == [False, True, False]
