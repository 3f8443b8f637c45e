"""Habits are checks: layout, documentation, imports and words of the whole repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from router.config_reference import keys
from router.metric_definitions import definitions

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("router", "scheduler", "cachemap", "simulator", "bench")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=!~ \[;]", line)[0] for line in requirements]


RUNTIME = _names(PROJECT["project"]["dependencies"])
EXTRAS = {
    extra: _names(lines) for extra, lines in PROJECT["project"]["optional-dependencies"].items()
}

# Source modules without a test module of their own, each with the reason.
UNTESTED_ALONE: dict[str, str] = {}

# What a dependency is imported as, where the name differs.
IMPORTED_AS = {"prometheus-client": "prometheus_client", "pyyaml": "yaml", "pyzmq": "zmq"}

# The extra that a package may import from.
EXTRA_OF = {"bench": "bench", "simulator": "events"}


def source_modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py"):
                yield path.relative_to(ROOT)


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str:
    """The file's text; nothing for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_every_source_module_has_a_test_module():
    missing = [
        str(module)
        for module in source_modules()
        if not any((ROOT / "tests" / module.parts[0]).rglob(f"test_{module.name}"))
        and str(module) not in UNTESTED_ALONE
    ]
    assert not missing


def test_exceptions_from_that_rule_are_still_needed():
    modules = {str(module) for module in source_modules()}
    for module in UNTESTED_ALONE:
        assert module in modules
        assert not any((ROOT / "tests").rglob(f"test_{Path(module).name}")), module


def test_packages_hold_no_module_named_after_nothing():
    vague = {"utils", "util", "common", "helpers", "misc", "core", "manager"}
    assert not [module for module in source_modules() if module.stem in vague]


def test_generated_tables_are_those_of_the_code():
    """`make docs` writes them."""
    checked = subprocess.run(
        [sys.executable, "-c", "import render_tables as r; [print(n) for n in r.stale()]"],
        cwd=ROOT / "docs",
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not checked.stdout.split(), "run `make docs`"


def test_every_configuration_key_is_documented():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert not [key.path for key in keys() if f"`{key.path}`" not in text]


def test_every_metric_is_documented():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert not [metric.name for metric in definitions() if f"`{metric.name}`" not in text]


def test_documented_metrics_exist():
    known = {metric.name for metric in definitions()}
    known |= {f"{metric.name}_bucket" for metric in definitions() if metric.kind == "histogram"}
    for name in ("README.md", "docs/metrics.md", "docs/operations.md", "docs/architecture.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"\bpdrouter_[a-z0-9_]+\b", text)) <= known, name


def test_documents_link_to_files_that_exist():
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_document_can_be_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        document = ahead.pop()
        if document in reached:
            continue
        reached.add(document)
        if document.is_dir():
            ahead += document.glob("README.md")
        elif document.suffix == ".md":
            targets = re.findall(r"\]\(([^)#\s:]+)\)", document.read_text(encoding="utf-8"))
            ahead += [(document.parent / target).resolve() for target in targets]
    assert set(ROOT.glob("docs/**/*.md")) <= reached


def test_documents_named_in_the_source_exist():
    for module in source_modules():
        for name in re.findall(r"docs/[\w./-]+\.md", (ROOT / module).read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{module}: {name}"


def test_import_rules_hold():
    linted = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_every_dependency_is_used_and_explained():
    imported = set().union(*(imports_of(ROOT / module) for module in source_modules()))
    document = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    for name in RUNTIME + EXTRAS["events"]:
        assert IMPORTED_AS.get(name, name) in imported, f"{name} is not imported anywhere"
        assert f"| {name} |" in document, f"{name} has no reason in docs/dependencies.md"


def test_every_import_is_a_declared_dependency():
    declared = {IMPORTED_AS.get(name, name) for name in RUNTIME}
    known = declared | set(PACKAGES) | set(sys.stdlib_module_names)
    # FastAPI's own foundation, of one version with it.
    known.add("starlette")
    for module in source_modules():
        extra = EXTRAS.get(EXTRA_OF.get(module.parts[0], ""), [])
        allowed = known | {IMPORTED_AS.get(name, name) for name in extra}
        assert imports_of(ROOT / module) <= allowed, module


def imports_of(path: Path) -> set[str]:
    """Top-level names that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_locks_hold_every_direct_dependency_with_hashes(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    wanted = RUNTIME
    if name == "requirements-dev.txt":
        wanted = [*RUNTIME, *chain.from_iterable(EXTRAS.values())]
    for dependency in wanted:
        assert re.search(rf"^{re.escape(dependency)}==\S+ \\\n    --hash=", text, re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-dev.txt", "requirements-build.txt"]
)
def test_locks_name_no_place_to_fetch_from(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"://|^-(?!-hash)|^--|find-links|file:|trusted-host", text, re.MULTILINE)


# The project speaks of itself alone: no tracker, no machine, no registry. In pieces, so that
# this file does not hold what it looks for.
FORBIDDEN = (
    r"\bissue" + r"s? #?\d",
    r"(?<![\w&/])#" + r"\d{1,5}\b(?![-\w])",
    r"(?<![\w.])/(work|root|home/\w+)" + r"/",
    r"pypi" + r"\.org|pythonhosted" + r"\.org|registry\.npmjs" + r"\.org|deb\.debian" + r"\.org",
    r"\bTO" + r"DO\b|\bFIX" + r"ME\b",
)


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_tracked_files_speak_of_the_project_alone(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked_files()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found


def test_no_tracked_file_is_large():
    large = [path.relative_to(ROOT) for path in tracked_files() if path.stat().st_size > 1 << 20]
    assert not large
