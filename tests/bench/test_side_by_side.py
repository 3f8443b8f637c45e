from bench import side_by_side


def sample(name, value, test="short", figure="cpu_ms_per_req", foreign=0.0):
    return {"name": name, "test": test, "fig": {figure: value}, "raw": {"foreign": [foreign, 0]}}


def test_calm_samples_are_preferred():
    rows = [sample("a", 1.0), sample("a", 1.1), sample("a", 9.0, foreign=0.5)]
    assert side_by_side.samples(rows, "a", "short", "cpu_ms_per_req") == (1.0, 1.1)
    noisy = [sample("a", 1.0), sample("a", 9.0, foreign=0.5)]
    assert side_by_side.samples(noisy, "a", "short", "cpu_ms_per_req") == (1.0, 9.0)
    assert side_by_side.samples([sample("a", float("nan"))], "a", "short", "cpu_ms_per_req") == ()


def test_the_best_peer_is_the_one_with_the_lowest_median():
    rows = [sample("pdrouter", v) for v in (0.20, 0.21, 0.2, 0.22)]
    rows += [sample("vllm-router-pd", v) for v in (0.9, 1.0)]
    rows += [sample("sglang-router-pd", v) for v in (0.30, 0.31, 0.29, 0.3)]
    short = side_by_side.costs(rows)[0]
    assert short.best == "sglang-router-pd"
    assert round(short.ratio.ratio, 2) == 0.68
    assert short.ratio.carried
    assert side_by_side.costs(rows)[1].best == "none"
    assert side_by_side.missing_peers(rows) == ["vllm-router-pd-rr", "sglang-router-pd-rr"]


def test_calls_that_skip_a_leg_are_seen():
    def integrity(legs):
        fig = {"legs_ok": legs, "good": 128, "of": 128}
        return {"name": "pdrouter", "test": "integrity", "fig": fig, "raw": {}}

    assert side_by_side.legs_ok([integrity(True)], "pdrouter")
    assert not side_by_side.legs_ok([integrity(True), integrity(False)], "pdrouter")
    assert not side_by_side.legs_ok([], "pdrouter")
