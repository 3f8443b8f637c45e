import subprocess
import sys

import pytest

from bench import cluster
from bench.cluster import ClusterError, Fleet, Worker


def test_the_router_gets_one_pool_per_role():
    workers = [Worker("p0", "prefill", "http://a"), Worker("d0", "decode", "http://b")]
    fleet = Fleet(router={"log": {"access": False}})
    config = cluster.router_config(workers, 8000, fleet)
    pools = config["models"][0]["pools"]
    assert [(pool["role"], len(pool["workers"])) for pool in pools] == [
        ("prefill", 1),
        ("decode", 1),
    ]
    assert config["listen"]["port"] == 8000
    assert config["log"] == {"access": False}


def test_the_simulator_gets_its_workers_and_speed():
    fleet = Fleet(speed=2.5, args=["--capacity-tokens", "9"])
    command = cluster.simulator_command([("prefill", "p0"), ("prefill", "p1")], fleet, ["--x"])
    assert command.count("--worker") == 2
    assert "prefill:0:p1" in command
    assert command[-5:] == ["--speed", "2.5", "--capacity-tokens", "9", "--x"]


def test_a_child_is_stopped_whatever_happens(tmp_path):
    log = tmp_path / "log"

    def fail():
        with cluster.process([sys.executable, "-c", "import time;time.sleep(60)"], log) as child:
            held.append(child)
            raise KeyError

    held: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyError):
        fail()
    assert held[0].poll() is not None


def test_a_dead_router_is_reported_with_its_words(tmp_path):
    log = tmp_path / "log"
    code = "import sys; sys.exit('no such key: liste')"
    with cluster.process([sys.executable, "-c", code], log) as child:
        child.wait(10)
        with pytest.raises(ClusterError, match="no such key"):
            cluster.wait_ready("http://127.0.0.1:1", child, log, timeout_s=5)


def test_a_silent_simulator_is_reported(tmp_path):
    fleet = Fleet(args=["--no-such-option"])
    with pytest.raises(ClusterError, match="ended"):
        with cluster.simulators([("both", "a")], fleet, [], tmp_path / "log"):
            pass


@pytest.mark.slow
def test_a_cluster_starts_and_stops():
    with cluster.cluster(Fleet(prefill=1, decode=1, speed=50)) as running:
        assert [worker.role for worker in running.workers] == ["prefill", "decode"]
        assert set(running.pids) == {"router", "prefill", "decode"}
        assert running.of_role("decode")[0].url.startswith("http://127.0.0.1:")
