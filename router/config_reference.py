"""The table of configuration keys, made from the schema itself.

`docs/configuration.md` holds this table between markers; a test compares the two.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from router.config import Config, Strict, section_of

_TYPES = {str: "text", int: "integer", float: "number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    path: str  # such as models[].pools[].weight
    type: str
    default: str  # "required" when there is none
    description: str


def keys(section: type[Strict] = Config, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key, sections before what they hold."""
    for name, field in section.model_fields.items():
        kind, inner = _kind(field.annotation), section_of(field.annotation)
        path = f"{prefix}{name}[]" if kind == "list of mappings" else f"{prefix}{name}"
        default = "required" if field.is_required() else _default(field.default)
        yield ConfigKey(path, kind, default, field.description or "")
        if inner is not None:
            yield from keys(inner, f"{path}.")


def reference_table() -> str:
    """The keys as a Markdown table."""
    rows = ["| Key | Type | Default | Description |", "|---|---|---|---|"]
    for key in keys():
        cells = (f"`{key.path}`", key.type, key.default, key.description)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(args[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return "list of mappings" if section_of(annotation) else f"list of {_kind(args[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(arg) for arg in args if arg is not type(None))
    return "mapping" if section_of(annotation) else _TYPES[annotation]


def _default(value: object) -> str:
    if isinstance(value, Strict):
        return ""
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
