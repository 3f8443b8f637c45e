"""How results are shown: a table on the terminal, one line of JSON, one self-contained page."""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = dict[str, Any]

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .7rem;border-bottom:1px solid #e2e8f0;text-align:right}
td:first-child,th:first-child{text-align:left}
h2{margin-top:2.5rem}
.charts{display:flex;flex-wrap:wrap;gap:1rem}
.good{color:#047857}
.bad{color:#b91c1c;font-weight:600}
""".strip()


@dataclass(frozen=True, slots=True)
class Mark:
    """A pass mark: what was measured against which limit."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        if math.isnan(self.value):
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "ok" if self.ok else "FAILED"
        return f"{self.name}: {number(self.value)} {sign} {number(self.limit)} {verdict}"

    def as_json(self) -> JSON:
        return {"name": self.name, "value": self.value, "limit": self.limit, "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Section:
    """One run on the page: figures as rows of a table, marks, charts as SVG."""

    title: str
    figures: Sequence[tuple[str, Any]]
    marks: Sequence[Mark]
    charts: Sequence[str] = ()


def number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "-"
    if isinstance(value, int) or abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text columns: the first aligned left, the others right."""
    cells = [list(headers), *([number(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        first, rest = row[0].ljust(widths[0]), zip(row[1:], widths[1:], strict=True)
        lines.append("  ".join([first, *(cell.rjust(width) for cell, width in rest)]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def say(text: str = "") -> None:
    """A line for the reader; standard output, since the figures are the command's product."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def finish(figures: Mapping[str, Any], ok: bool) -> int:
    """Print the last line, one JSON object, and return the exit status."""
    say(json.dumps({**jsonable(dict(figures)), "ok": ok}, allow_nan=False))
    return 0 if ok else 1


def jsonable(value: Any) -> Any:
    """The same with numbers that JSON cannot hold as null, and floats at six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def page(title: str, sections: Sequence[Section]) -> str:
    """One HTML document without any reference to another file."""
    body = "".join(_section(section) for section in sections)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )


def write(folder: Path, name: str, figures: Mapping[str, Any], document: str) -> list[Path]:
    """The JSON and the page, side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    data, view = folder / f"{name}.json", folder / f"{name}.html"
    data.write_text(json.dumps(jsonable(dict(figures)), indent=1, allow_nan=False) + "\n")
    view.write_text(document, encoding="utf-8")
    return [data, view]


def _section(section: Section) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(number(value))}</td></tr>"
        for name, value in section.figures
    )
    marks = "".join(
        f'<li class="{"good" if mark.ok else "bad"}">{html.escape(str(mark))}</li>'
        for mark in section.marks
    )
    return (
        f"<h2>{html.escape(section.title)}</h2><ul>{marks}</ul>"
        f'<div class="charts">{"".join(section.charts)}</div><table>{rows}</table>'
    )
