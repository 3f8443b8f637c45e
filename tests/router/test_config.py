"""What is refused, and how the refusal reads."""

from __future__ import annotations

import io

import pytest

from router.config import Config, ConfigError, PriceConfig, api_keys, load, parse, validate

BASE = """
models:
  - name: glm
    aliases: [glm-latest]
    pools:
      - {name: pre, role: prefill, workers: [{url: http://a:1}]}
      - {name: dec, role: decode, weight: 2, workers: [{url: http://b:1}]}
"""


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, environ={})
    return str(caught.value)


def test_a_minimal_file_gets_every_default():
    config = parse(BASE)
    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 8000)
    assert config.models[0].handoff == "vllm-nixl"
    assert config.models[0].prices == "b300-tp4"
    assert [pool.weight for pool in config.models[0].pools] == [1.0, 2.0]
    assert config.cachemap.max_bytes == 512 * 1024 * 1024
    assert config.retries.max_attempts == 3


def test_a_configuration_cannot_be_changed_in_place():
    config = parse(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.listen.port = 1


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("http://b:1/", "http://b:1"),
        ("HTTP://Node-7.Example:8100", "http://node-7.example:8100"),
        ("http://10.0.0.1", "http://10.0.0.1"),
        ("'http://[::1]:8100'", "http://[::1]:8100"),
    ],
)
def test_worker_addresses_are_normalised(written, read):
    config = parse(BASE.replace("http://b:1", written))
    assert config.models[0].pools[1].workers[0].url == read


def test_prices_can_be_constants():
    inline = (
        "prices: {prefill: {base_ms: 2, per_token_ms: 0.1, per_token_context_ms: 1.0e-6, "
        "per_cached_token_ms: 0}, decode_step: {base_ms: 8, per_sequence_ms: 0.05, "
        "per_sequence_context_ms: 1.0e-6}, transfer: {base_ms: 5, per_token_ms: 0.01}}"
    )
    prices = parse(BASE.replace("    pools:", f"    {inline}\n    pools:")).models[0].prices
    assert isinstance(prices, PriceConfig)
    assert prices.prefill.per_token_ms == 0.1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("models:", "lisen: {}\nmodels:", "lisen: unknown key; did you mean listen?"),
        ("models:", "listen: {a: 1}\nmodels:", "listen.a: unknown key; known here: host, port"),
        ("models:", "listen: 3\nmodels:", "listen: must be a mapping with the keys host, port"),
        ("models:", "listen: {port: '80'}\nmodels:", "listen.port: must be a valid integer"),
        ("models:", "listen: {port: 70000}\nmodels:", "listen.port: must be less than or equal"),
        ("models:", "queue: {timeout_s: .nan}\nmodels:", "queue.timeout_s: must be a finite"),
        ("models:", "queue: {timeout_s: 0}\nmodels:", "queue.timeout_s: must be greater than 0"),
        ("models:", "log: {access: 'yes'}\nmodels:", "log.access: must be a valid boolean"),
        ("role: decode", "role: dec", "models[0].pools[1].role: must be 'prefill', 'decode' or"),
        ("weight: 2", "weight: 0", "models[0].pools[1].weight: must be greater than 0, got 0"),
        ("name: glm", "name: 3", "models[0].name: must be text (quote it"),
        ("[glm-latest]", "glm-latest", "models[0].aliases: must be a list, got 'glm-latest'"),
        ("[glm-latest]", "[a b]", "models[0].aliases[0]: must not contain spaces"),
        ("    pools", "    handoff: x\n    pools", "models[0].handoff: must be 'vllm-nixl'"),
        ("    pools", "    prices: x\n    pools", "models[0].prices: must be 'b300-tp4' or"),
        (
            "    pools",
            "    prices: {decode: 1}\n    pools",
            "models[0].prices.prefill: is required: Time of a prefill.",
        ),
        ("[{url: http://a:1}]", "[]", "models[0].pools[0].workers: must hold at least one entry"),
        ("http://a:1", "ftp://a:1", "models[0].pools[0].workers[0].url: not an http:// address"),
        ("http://a:1", "a:1", "models[0].pools[0].workers[0].url: not an http:// address"),
        ("http://a:1", "http://a:99999", "models[0].pools[0].workers[0].url: Port out of range"),
        ("http://a:1", "http://a:1/v1", "models[0].pools[0].workers[0].url: must have no path"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(old, new, expected):
    assert expected in refusal(BASE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "http://b:1",
            "http://A:1/",
            "models[0].pools[1].workers[0].url: http://a:1 is already taken by "
            "models[0].pools[0].workers[0].url",
        ),
        ("name: dec", "name: pre", "models[0].pools[1].name: pre is already taken by"),
        ("[glm-latest]", "[glm]", "models[0].aliases[0]: glm is already taken by models[0].name"),
        ("role: decode", "role: prefill", "models[0].pools: glm has no pool that can decode"),
    ],
)
def test_a_contradiction_is_refused_with_its_path(old, new, expected):
    assert expected in refusal(BASE.replace(old, new, 1))


def test_every_fault_is_named_and_only_real_ones():
    text = BASE.replace("http://a:1", "x").replace("weight: 2", "weight: -1")
    assert [line.split(":")[0] for line in refusal(text).splitlines()] == [
        "models[0].pools[0].workers[0].url",
        "models[0].pools[1].weight",
    ]


def test_a_password_in_an_address_is_not_repeated():
    text = refusal(BASE.replace("http://a:1", "http://me:hunter2@a:1"))
    assert "must hold no credentials" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("just words", "must be a YAML mapping"),
        ("", "must be a YAML mapping"),
        ("listen: {}", "models: is required: The models served and their workers."),
        ("models: []", "models: must hold at least one entry"),
        (BASE + BASE, "key 'models' is given twice"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(text, expected):
    assert expected in refusal(text)


def test_keys_come_from_the_named_variable():
    text = BASE + "auth: {keys_env: KEYS}\n"
    config = parse(text, environ={"KEYS": "one, two,"})
    assert api_keys(config, {"KEYS": "one, two,"}) == {"one", "two"}
    assert api_keys(parse(BASE)) == frozenset()


@pytest.mark.parametrize("environ", [{}, {"KEYS": ""}, {"KEYS": " , "}])
def test_a_missing_key_variable_does_not_open_the_service(environ):
    with pytest.raises(ConfigError, match=r"auth\.keys_env: environment variable KEYS is not set"):
        parse(BASE + "auth: {keys_env: KEYS}\n", environ=environ)


def test_load_reads_files_and_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "router.yaml"
    path.write_text(BASE)
    monkeypatch.setattr("sys.stdin", io.StringIO(BASE))
    assert load(path) == load("-") == parse(BASE)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8"):
        load(tmp_path / "latin.yaml")


def test_plain_data_is_validated_like_a_file():
    data = {
        "models": [
            {
                "name": "m",
                "pools": [{"name": "d", "role": "both", "workers": [{"url": "http://d"}]}],
            }
        ]
    }
    assert isinstance(validate(data), Config)
