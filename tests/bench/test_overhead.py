import json

import pytest

from bench.__main__ import main


def test_peers_need_the_compiled_rig(tmp_path, capsys):
    arguments = ["--peers", str(tmp_path), "--shared", str(tmp_path), "--out", str(tmp_path / "o")]
    assert main(["overhead", *arguments]) == 1
    assert "compiled rig" in capsys.readouterr().out


@pytest.mark.slow
def test_the_own_rig_end_to_end(tmp_path, capsys):
    out = str(tmp_path / "out")
    main(["overhead", "--own-rig", "--reps", "1", "--secs", "0.3", "--quiet", "0", "--out", out])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["rig"] == "python"
    assert last["failures"] == []
    assert sum(last["failed"]) == 0
    assert last["cpu_ms_per_1k_call"][0] > 0
    assert last["cpu_us_per_chunk"][0] > 0
