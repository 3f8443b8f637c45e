import httpx
import pytest


@pytest.fixture
def ask(engine):
    def post(port, **body):
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        body = {"model": "mock", "messages": []} | body
        return httpx.post(url, json=body, trust_env=False, timeout=10)

    return post


def get(port, path):
    return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).json()


def test_both_legs_of_a_handoff_are_counted(engine, ask):
    first = ask(engine.prefill[0], kv_transfer_params={"do_remote_decode": True}).json()
    params = first["kv_transfer_params"]
    assert params["remote_engine_id"] == f"engine-{engine.prefill[0]}"
    ask(engine.decode[1], kv_transfer_params=params)
    stats = get(engine.regular, "/_stats")
    assert stats[str(engine.prefill[0])]["nixl_prefill"] == 1
    assert stats[str(engine.decode[1])]["nixl_decode_ok"] == 1
    assert stats[str(engine.decode[1])]["role"] == "decode"
    get(engine.regular, "/_ctl?reset=1")
    assert get(engine.regular, "/_stats")[str(engine.decode[1])]["reqs"] == 0


@pytest.mark.parametrize("itl_us", [0, 1000])
def test_a_stream_has_its_events(engine, ask, itl_us):
    get(engine.regular, f"/_ctl?itl_us={itl_us}")
    text = ask(engine.regular, stream=True, max_tokens=5).text
    assert text.count(" token") == 5
    assert text.endswith("data: [DONE]\n\n")


def test_probes_are_answered(engine):
    assert get(engine.regular, "/v1/models")["data"][0]["id"] == "mock"
    assert get(engine.regular, "/version")["version"]
    assert get(engine.regular, "/health") == {}
