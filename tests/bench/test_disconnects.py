import json

from bench import disconnects
from bench.disconnects import Tally

PHASES = {"waiting": 1.0, "prefill": 2.0, "transfer": 1.0, "decode": 3.0}


def tally(gone_s=0.1, files=(40, 41, 40), rss_mb=(50.0, 60.0, 61.0)):
    found = Tally(cuts=2, gone_s=[0.05, gone_s], leases_s=[0.05, gone_s])
    found.files, found.rss_mb = list(files), list(rss_mb)
    return found


def shown(capsys, found, phases, expired):
    status = disconnects._show(found, phases, expired, wanted=2)
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_clean_run_is_ok(capsys):
    status, figures = shown(capsys, tally(), PHASES, 0)
    assert status == 0
    assert figures["ok"]
    assert figures["gone_s"]["max"] == 0.1


def test_what_is_left_behind_fails(capsys):
    for arguments in (
        (tally(gone_s=1.2), PHASES, 0),
        (tally(files=(40, 50)), PHASES, 0),
        (tally(rss_mb=(50.0, 50.0, 80.0)), PHASES, 0),
        (tally(), PHASES, 1),
        (tally(), PHASES | {"waiting": 0.0}, 0),
    ):
        status, figures = shown(capsys, *arguments)
        assert status == 1
        assert sum(not mark["ok"] for mark in figures["marks"]) in (1, 2)
