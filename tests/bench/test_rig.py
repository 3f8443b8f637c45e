import os
import time

from bench import rig


def test_ports_differ():
    ports = rig.Ports.free()
    everything = [ports.regular, *ports.prefill, *ports.decode, ports.router]
    assert len(set(everything)) == 6
    assert ports.engine_arguments()[1] == f"{ports.prefill[0]}:prefill"


def test_the_router_is_configured_for_the_rig():
    config = rig.router_config(rig.Ports(1, (2, 3), (4, 5), 6))
    assert config["listen"]["port"] == 6
    urls = [worker["url"] for pool in config["models"][0]["pools"] for worker in pool["workers"]]
    assert urls == [f"http://127.0.0.1:{port}" for port in (2, 3, 4, 5)]


def test_without_sources_there_is_no_compiled_rig(tmp_path):
    assert rig.compiled_tools(tmp_path, tmp_path / "build") is None


def test_a_rig_that_does_not_build_is_none(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("engine.c", "load.c"):
        (source / name).write_text("not C")
    (source / "Makefile").write_text("all:\n\tfalse\n")
    assert rig.compiled_tools(source, tmp_path / "build") is None
    assert sorted(os.listdir(source)) == ["Makefile", "engine.c", "load.c"]


def test_load_runs_against_the_engine_and_reads_cpu(engine):
    running = rig.Rig(rig.own_tools(), engine, os.getpid(), os.getpid())
    running.control("reset=1")
    found = running.load(engine.regular, "--n", "20", "--conc", "4", "--max-tokens", "3")
    assert (found["done"], found["bad"]) == (20, 0)
    assert found["router_cpu"] >= 0
    assert running.legs()["reqs"] == 20


def test_the_wait_for_calm_is_bounded():
    start_s = time.monotonic()
    rig.wait_calm(0.3, busy=-1.0, period_s=0.1)
    assert 0.3 <= time.monotonic() - start_s < 3
