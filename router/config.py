"""Configuration: parsed once, strictly, at the edge.

The only reader of files, of YAML and of the environment. `load` gives a frozen `Config` or
raises `ConfigError`, whose text names the path of every wrong field and what would be right.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

PriceProfile = Literal["b300-tp4", "h200-llama8b"]
HandoffName = Literal["vllm-nixl"]
Role = Literal["prefill", "decode", "both"]
LogLevel = Literal["debug", "info", "warning", "error"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AtLeastOne = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")]


class ConfigError(Exception):
    """The configuration cannot be used. The text has one line per fault: `path: what and why`."""


def _worker_url(url: str) -> str:
    """Normalise a worker's base URL: lower-case scheme and host, no trailing slash."""
    example = "expected something like http://10.0.0.1:8100"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{error}; {example}") from None
    if parts.scheme.lower() != "http" or not parts.hostname:
        raise ValueError(f"not an http:// address with a host; {example}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"must hold no credentials, query or fragment; {example}")
    if parts.path not in ("", "/"):
        raise ValueError(f"must have no path (the router adds /v1/...); {example}")
    if port == 0:
        raise ValueError(f"port 0 cannot be connected to; {example}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}" if port is None else f"http://{host}:{port}"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ListenConfig(Strict):
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )


class AuthConfig(Strict):
    keys_env: str | None = Field(
        default=None,
        min_length=1,
        description="Environment variable that holds the accepted API keys, separated by commas. "
        "Without it every caller is served.",
    )


class WorkerConfig(Strict):
    url: Annotated[str, AfterValidator(_worker_url)] = Field(
        description="Base address of the engine, `http://HOST:PORT`."
    )


class PoolConfig(Strict):
    name: Name = Field(description="Name of the pool, unique in the configuration.")
    role: Role = Field(
        description="What its workers do. `decode` and `both` can also serve a call alone."
    )
    weight: Positive = Field(
        default=1.0,
        description="Share of the decode work, relative to the model's other decode pools.",
    )
    workers: tuple[WorkerConfig, ...] = Field(
        min_length=1, strict=False, description="The pool's workers, each address once."
    )


class PrefillPrice(Strict):
    """Milliseconds to prefill u new tokens behind c cached ones."""

    base_ms: NotNegative = Field(description="Cost of any prefill step.")
    per_token_ms: Positive = Field(description="Per new token u.")
    per_token_context_ms: NotNegative = Field(description="Per u x (c + u/2): attention.")
    per_cached_token_ms: NotNegative = Field(description="Per cached token c.")


class DecodePrice(Strict):
    """Milliseconds of one decode step."""

    base_ms: Positive = Field(description="Cost of any decode step.")
    per_sequence_ms: NotNegative = Field(description="Per sequence in the batch.")
    per_sequence_context_ms: NotNegative = Field(description="Per sequence and context token.")


class TransferPrice(Strict):
    """Milliseconds to move the KV cache of a prompt from prefill to decode."""

    base_ms: NotNegative = Field(description="Cost of any transfer.")
    per_token_ms: NotNegative = Field(description="Per prompt token moved.")


class PriceConfig(Strict):
    prefill: PrefillPrice = Field(description="Time of a prefill.")
    decode_step: DecodePrice = Field(description="Time of a decode step.")
    transfer: TransferPrice = Field(description="Time of a KV transfer.")


# Tags in parentheses are dropped from error paths: they are not keys of the file.
_PROFILE_TAG, _CONSTANTS_TAG = "(profile)", "(constants)"


def _price_kind(value: object) -> str:
    return _CONSTANTS_TAG if isinstance(value, Mapping | PriceConfig) else _PROFILE_TAG


Prices = Annotated[
    Annotated[PriceProfile, Tag(_PROFILE_TAG)] | Annotated[PriceConfig, Tag(_CONSTANTS_TAG)],
    Discriminator(_price_kind),
]


class ModelConfig(Strict):
    name: Name = Field(description="Name of the model, as its workers serve it.")
    aliases: tuple[Name, ...] = Field(
        default=(), strict=False, description="Further names under which callers may ask for it."
    )
    handoff: HandoffName = Field(
        default="vllm-nixl", description="Protocol that moves KV from prefill to decode workers."
    )
    prices: Prices = Field(
        default="b300-tp4",
        description="Cost constants to start from: the name of a shipped profile, or constants.",
    )
    bytes_per_token: Positive = Field(
        default=4.0, description="Prompt bytes per token, until the engines' own counts are known."
    )
    pools: tuple[PoolConfig, ...] = Field(
        min_length=1, strict=False, description="The model's pools of workers."
    )


class QueueConfig(Strict):
    max_waiting: int = Field(
        default=8192, ge=0, description="Calls that may wait for a placement; further ones get 429."
    )
    max_waiting_bytes: int = Field(
        default=536_870_912,
        ge=0,
        description="Request bodies that may wait for a placement, in bytes together; in memory a "
        "waiting call takes about three times its body. Further calls get 429.",
    )
    timeout_s: Positive = Field(default=60.0, description="Longest wait for a placement; then 429.")


class IoRatioConfig(Strict):
    prior: Positive = Field(
        default=4.0,
        description="Expected output tokens per prompt token, until it has been learned.",
    )


class CachemapConfig(Strict):
    max_bytes: AtLeastOne = Field(
        default=536_870_912, description="Hard limit on the memory of the prefix map."
    )
    default_capacity_tokens: AtLeastOne = Field(
        default=1_000_000,
        description="KV capacity assumed of a worker that does not report its own.",
    )


class TimeoutsConfig(Strict):
    connect_s: Positive = Field(default=5.0, description="To open a connection to a worker.")
    first_byte_s: Positive = Field(
        default=300.0, description="From an upstream request to its answer."
    )
    idle_s: Positive = Field(default=60.0, description="Longest silence within a worker's answer.")
    client_stall_s: Positive = Field(
        default=300.0, description="Longest time a client may leave its answer unread."
    )
    handoff_gap_s: Positive = Field(
        default=20.0,
        description="Longest time from the end of prefill to the start of decode. Past it the call "
        "is prefilled again. Keep it well below the engine's KV lease (vLLM: 30 s).",
    )


class RetriesConfig(Strict):
    max_attempts: AtLeastOne = Field(
        default=3, description="Attempts per call before its first byte, the first one included."
    )


class MonitorConfig(Strict):
    interval_s: Positive = Field(
        default=1.0, description="Time between two health probes of a worker."
    )
    timeout_s: Positive = Field(default=2.0, description="Longest time a probe may take.")
    fail_after: AtLeastOne = Field(
        default=2,
        description="Failed probes in a row that take a worker out; a refused one does at once.",
    )
    pass_after: AtLeastOne = Field(
        default=1, description="Good probes in a row that take a worker in."
    )
    scrape_s: Positive = Field(
        default=2.0, description="Time between two readings of a worker's metrics."
    )


class LimitsConfig(Strict):
    max_body_bytes: AtLeastOne = Field(
        default=67_108_864, description="Largest request body accepted; larger ones get 413."
    )


class LogConfig(Strict):
    access: bool = Field(
        default=True, description="Write one JSON line per call to standard output."
    )
    level: LogLevel = Field(
        default="info", description="Least severity of the router's own log lines."
    )


class Config(Strict):
    listen: ListenConfig = Field(default=ListenConfig(), description="Where the router listens.")
    auth: AuthConfig = Field(default=AuthConfig(), description="Who may call.")
    models: tuple[ModelConfig, ...] = Field(
        min_length=1, strict=False, description="The models served and their workers."
    )
    queue: QueueConfig = Field(default=QueueConfig(), description="Limits on waiting calls.")
    io_ratio: IoRatioConfig = Field(
        default=IoRatioConfig(), description="Expected output per input."
    )
    cachemap: CachemapConfig = Field(
        default=CachemapConfig(), description="The map of held prefixes."
    )
    timeouts: TimeoutsConfig = Field(
        default=TimeoutsConfig(), description="Limits on upstream requests."
    )
    retries: RetriesConfig = Field(default=RetriesConfig(), description="Attempts on failure.")
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="Probing of workers.")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="Limits on calls.")
    log: LogConfig = Field(default=LogConfig(), description="What is logged.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = list(_contradictions(self))
        if faults:
            raise ValueError("\n".join(faults))
        return self


def load(path: str | Path, *, environ: Mapping[str, str] | None = None) -> Config:
    """Read a YAML file (`-` for standard input), or raise ConfigError."""
    try:
        if str(path) == "-":
            return parse(sys.stdin.read(), environ=environ)
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason}") from None
    return parse(text, environ=environ)


def parse(text: str, *, environ: Mapping[str, str] | None = None) -> Config:
    """Read YAML text, or raise ConfigError. `environ` must hold the variables it refers to."""
    try:
        data = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError("the configuration must be a YAML mapping with at least the key `models`")
    config = validate(data)
    api_keys(config, environ)
    return config


def validate(data: Mapping[str, Any]) -> Config:
    """Turn plain data into a Config, or raise ConfigError."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        # Pydantic also calls a list too short when one of its entries is wrong.
        faults = (f for f in error.errors() if f["type"] != "too_short" or not f["input"])
        raise ConfigError("\n".join(_fault(fault) for fault in faults)) from None


def api_keys(config: Config, environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The accepted API keys; empty when every caller is served."""
    variable = config.auth.keys_env
    if variable is None:
        return frozenset()
    listed = (os.environ if environ is None else environ).get(variable, "")
    keys = frozenset(key.strip() for key in listed.split(",") if key.strip())
    if not keys:
        # A typing error must not open the service to everyone.
        raise ConfigError(
            f"auth.keys_env: environment variable {variable} is not set or holds no key; "
            "set it, or remove auth.keys_env to serve every caller"
        )
    return keys


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets a repeated key win silently; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:merge" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _contradictions(config: Config) -> Iterator[str]:
    names: dict[str, str] = {}
    pools: dict[str, str] = {}
    urls: dict[str, str] = {}
    for path, name in _model_names(config):
        yield from _claimed(names, name, path, "name the model or alias otherwise")
    for m, model in enumerate(config.models):
        if all(pool.role == "prefill" for pool in model.pools):
            yield (
                f"models[{m}].pools: {model.name} has no pool that can decode; "
                "add one with role decode or both"
            )
        for p, pool in enumerate(model.pools):
            path = f"models[{m}].pools[{p}]"
            yield from _claimed(pools, pool.name, f"{path}.name", "give each pool its own name")
            for w, worker in enumerate(pool.workers):
                where = f"{path}.workers[{w}].url"
                yield from _claimed(urls, worker.url, where, "a worker belongs to one pool")


def _model_names(config: Config) -> Iterator[tuple[str, str]]:
    for m, model in enumerate(config.models):
        yield f"models[{m}].name", model.name
        for a, alias in enumerate(model.aliases):
            yield f"models[{m}].aliases[{a}]", alias


def _claimed(seen: dict[str, str], value: str, path: str, remedy: str) -> Iterator[str]:
    first = seen.setdefault(value, path)
    if first != path:
        yield f"{path}: {value} is already taken by {first}; {remedy}"


_MESSAGES = {
    "too_short": "must hold at least one entry",
    "tuple_type": "must be a list",
    "string_type": "must be text (quote it if it looks like a number)",
    "string_too_short": "must not be empty",
    "string_too_long": "is longer than 200 characters",
    "string_pattern_mismatch": "must not contain spaces or control characters",
}


def _fault(fault: Any) -> str:
    """One line for one pydantic error."""
    loc = tuple(part for part in fault["loc"] if not str(part).startswith("("))
    if not loc:
        # A contradiction brings its own paths.
        return str(fault["ctx"]["error"]) if "ctx" in fault else str(fault["msg"])
    return f"{_path(loc)}: {_reason(fault, loc)}"


def _reason(fault: Any, loc: tuple[str | int, ...]) -> str:
    kind = fault["type"]
    if kind == "extra_forbidden":
        return _unknown_key(loc)
    if kind == "missing":
        return f"is required: {_description(loc)}"
    if kind == "value_error":
        message = str(fault["ctx"]["error"])
    elif kind == "model_type":
        message = f"must be a mapping with the keys {', '.join(_keys_at(loc))}"
    else:
        message = _MESSAGES.get(kind) or fault["msg"].replace("Input should", "must")
    return f"{message}, got {_shown(fault['input'])}"


def _unknown_key(loc: tuple[str | int, ...]) -> str:
    known = _keys_at(loc[:-1])
    near = difflib.get_close_matches(str(loc[-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"unknown key; {hint}"


def _keys_at(loc: tuple[str | int, ...]) -> list[str]:
    model = _schema_at(loc)
    return list(model.model_fields) if model else []


def _description(loc: tuple[str | int, ...]) -> str:
    model = _schema_at(loc[:-1])
    field = model.model_fields.get(str(loc[-1])) if model else None
    return (field.description if field else None) or "see docs/configuration.md"


def _schema_at(loc: tuple[str | int, ...]) -> type[Strict] | None:
    """The model class that validates what lies at `loc`."""
    model: type[Strict] | None = Config
    for part in loc:
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = section_of(field.annotation) if field else None
    return model


def section_of(annotation: object) -> type[Strict] | None:
    """The nested section inside a field's type, if it has one."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    inner = (section_of(arg) for arg in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found), None)


def _path(loc: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


def _shown(value: object) -> str:
    # An address may carry a password before its "@".
    text = re.sub(r"//[^/]*@", "//***@", repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
