import json

import pytest

from bench.__main__ import main
from bench.answers import Answer
from bench.conversations import Request
from bench.equality import Tally

REQUEST = Request(3, 1, "/v1/chat/completions", {"stream": True})


def test_differences_are_counted_by_kind():
    tally = Tally()
    tally.add(REQUEST, Answer(200, {0: "a"}), Answer(200, {0: "a"}), "pd")
    tally.add(REQUEST, Answer(200, {0: "a"}), Answer(200, {0: "b"}), "decode")
    assert tally.calls == {"chat stream": 2}
    assert tally.mismatches == {("chat stream", "texts"): 1}
    assert tally.plans == {"pd": 1, "decode": 1}
    assert tally.examples == ["chat stream: texts (conversation 3, turn 1)"]


@pytest.mark.slow
def test_a_few_conversations_end_to_end(capsys):
    assert main(["equality", "--conversations", "8", "--seed", "5"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"]
    assert last["mismatches"] == {}
    assert last["plans"]["pd"] > 0
