"""Writes the generated tables into docs/: `make docs` after a key, metric or module changed.

A document holds a table between `<!-- NAME: generated -->` and `<!-- end -->`; a test compares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from router.config_reference import reference_table as configuration_table
from router.metric_definitions import reference_table as metrics_table

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGES = ("router", "scheduler", "cachemap", "simulator", "bench")


def modules_table() -> str:
    """Every module with the first sentence of its docstring, package by package."""
    lines = []
    for package in PACKAGES:
        lines += [f"### {package}", "", _summary(ROOT / package / "__init__.py"), ""]
        lines += ["| Module | What it is |", "|---|---|"]
        lines += [f"| `{path}` | {summary} |" for path, summary in _modules(package)]
        lines.append("")
    return "\n".join(lines)


def _modules(package: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if path.name == "__init__.py" and (path.parent == ROOT / package or not _summary(path)):
            continue
        yield str(relative).removesuffix("/__init__.py"), _summary(path).replace("|", "\\|")


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]


TABLES: Mapping[str, Callable[[], str]] = {
    "architecture": modules_table,
    "configuration": configuration_table,
    "metrics": metrics_table,
}


def rendered(name: str) -> str:
    """The text that docs/NAME.md should have."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    pattern = rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)"
    new, found = re.subn(
        pattern, lambda m: f"{m[1]}\n{TABLES[name]()}\n{m[2]}", text, flags=re.DOTALL
    )
    if found != 1:
        raise ValueError(f"docs/{name}.md has no place for its table")
    return new


def stale() -> list[str]:
    """The documents whose table is not that of the code."""
    return [
        name
        for name in TABLES
        if (DOCS / f"{name}.md").read_text(encoding="utf-8") != rendered(name)
    ]


def main() -> None:
    for name in TABLES:
        (DOCS / f"{name}.md").write_text(rendered(name), encoding="utf-8")


if __name__ == "__main__":
    main()
