import json
import math
import re

from bench import report
from bench.report import Mark, Section


def test_marks_hold_up_to_their_limit():
    assert Mark("a", 1.0, 1.0).ok
    assert not Mark("a", 1.01, 1.0).ok
    assert Mark("a", 0.9, 0.9, at_least=True).ok
    assert not Mark("a", math.nan, 1.0).ok
    assert str(Mark("a", 2.0, 1.0)) == "a: 2 <= 1 FAILED"


def test_a_table_has_aligned_columns():
    lines = report.table(["name", "n"], [("a", 1), ("long name", 12345)]).splitlines()
    assert lines[2] == "a               1"
    assert lines[3] == "long name  12,345"


def test_the_last_line_is_one_json_object(capsys):
    status = report.finish({"x": math.nan, "y": [0.123456789]}, ok=False)
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"x": None, "y": [0.123457], "ok": False}
    assert status == 1
    assert report.finish({}, ok=True) == 0


def test_the_page_stands_alone_and_escapes(tmp_path):
    section = Section("<t>", [("a & b", 1.5)], [Mark("m", 1.0, 2.0)], ["<svg></svg>"])
    document = report.page("T", [section])
    assert "&lt;t&gt;" in document
    assert "a &amp; b" in document
    assert not re.search(r"(src|href)=|@import|url\(", document)
    files = report.write(tmp_path / "new", "r", {"a": math.inf}, document)
    assert json.loads(files[0].read_text()) == {"a": None}
    assert files[1].read_text() == document
