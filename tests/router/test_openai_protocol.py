"""Bodies read leniently and changed byte by byte."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import openai_protocol as openai
from router.errors import BadRequest

quick = settings(deadline=None, max_examples=60)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=10,
)
objects = st.dictionaries(st.text(max_size=8), values, min_size=1, max_size=5)
spellings = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"indent": 2},
        {"ensure_ascii": False},
        {"separators": (" , ", " : "), "ensure_ascii": False},
    ]
)
spaces = st.text(" \t\r\n", max_size=3).map(str.encode)


@st.composite
def bodies(draw):
    """An object in one of its many spellings."""
    text = json.dumps(draw(objects), **draw(spellings))
    return draw(spaces) + text.encode("utf-8") + draw(spaces)


# Reading


@quick
@given(bodies())
def test_every_spelling_reads_as_pythons_json_does(raw):
    assert openai.parse(raw) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a": NaN}', None),
        (b'{"a": Infinity}', float("inf")),
        (b'{"a": "\\ud800"}', "\ud800"),
        (b'\xef\xbb\xbf{"a": 1}', 1),
        (b'{"a": 1, "a": 2}', 2),
        (b'{"a": "tab\\there"}', "tab\there"),
    ],
    ids=["nan", "infinity", "surrogate", "byte order mark", "twice", "escape"],
)
def test_what_engines_take_is_taken(raw, value):
    found = openai.parse(raw)["a"]
    assert found == value or (value is None and found != found)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"not json",
        b'{"a": 1} trailing',
        b"{'a': 1}",
        b"[1]",
        b'"text"',
        b"null",
        b"7",
        b'{"a": "\xff\xfe"}',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        '{"a": 1}'.encode("utf-32"),
        b"\x00" * 20,
        b'{"a": 1,}',
    ],
)
def test_what_is_no_object_is_refused(raw):
    with pytest.raises(BadRequest) as caught:
        openai.parse(raw)
    assert caught.value.status == 400


def test_a_refusal_says_where_and_repeats_no_text():
    with pytest.raises(BadRequest) as caught:
        openai.parse(b'{"prompt": "a secret", oops}')
    assert "23" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("depth", [2000, 100_000])
def test_bottomless_nesting_is_refused(depth):
    with pytest.raises(BadRequest):
        openai.parse(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


# Writing


@quick
@given(objects)
def test_dump_writes_what_parse_reads(body):
    assert openai.parse(openai.dump(body)) == body


@pytest.mark.parametrize("value", [10**30, "\ud800", {"deep": ["\udfff", -(10**25)]}])
def test_dump_writes_what_orjson_refuses(value):
    assert json.loads(openai.dump({"a": value})) == {"a": value}


@pytest.mark.parametrize("depth", [100, 250, 500])
def test_deep_nesting_is_written(depth):
    raw = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    assert openai.dump(openai.parse(raw)) == raw


def test_nesting_too_deep_to_be_written_is_refused():
    raw = b'{"a":' + b"[" * 1020 + b"]" * 1020 + b"}"
    with pytest.raises(BadRequest, match="nested"):
        openai.dump(openai.parse(raw))


# Splicing


@quick
@given(bodies(), objects)
def test_a_spliced_member_is_the_last_one_and_all_other_bytes_stay(raw, value):
    spliced = openai.splice_member(raw, b"kv_transfer_params", orjson.dumps(value))
    kept = raw[: raw.rindex(b"}")]
    assert spliced == kept + b',"kv_transfer_params":' + orjson.dumps(value) + b"}"
    expected = json.loads(raw) | {"kv_transfer_params": value}
    assert json.loads(spliced) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":"}"}',
        b'{"a":"\\"}"}\n',
        b'{"a":{"b":{"c":{}}}}',
        b'{"a":[{}]}\r\n\t ',
        '{"a":"東京 🚀 }"}'.encode(),
        b'{"a":"\\u007d\\ud83d"}',
        b'{"kv_transfer_param":1}',
    ],
)
def test_braces_elsewhere_do_not_mislead(raw):
    spliced = openai.splice_member(raw, b"x", b"1")
    assert json.loads(spliced) == json.loads(raw) | {"x": 1}


# What clients may not send


def test_a_body_without_forbidden_members_is_untouched():
    raw = b'{ "model" : "m", "n": 1.0 , "n2": 1e2 }'
    body = openai.parse(raw)
    same_raw, same_body = openai.without_forbidden(raw, body)
    assert same_raw is raw
    assert same_body is body


@pytest.mark.parametrize("member", sorted(openai.FORBIDDEN_MEMBERS))
def test_forbidden_members_are_removed(member):
    raw = json.dumps({"model": "m", member: {"remote_host": "evil"}, "unknown": [1]}).encode()
    clean_raw, clean = openai.without_forbidden(raw, openai.parse(raw))
    assert clean == {"model": "m", "unknown": [1]}
    assert json.loads(clean_raw) == clean


@pytest.mark.parametrize(
    "name",
    [
        b"kv_transfer_params",
        b"\\u006bv_transfer_params",
        b"kv\\u005ftransfer\\u005fparams",
        b"bootstrap\\u005Fhost",
        b"disaggregated_param\\u0073",
    ],
)
def test_however_they_are_spelt(name):
    raw = b'{"model":"m","%b":{"remote_host":"evil"},"%b":1}' % (name, name)
    clean_raw, clean = openai.without_forbidden(raw, openai.parse(raw))
    assert clean == {"model": "m"}
    assert b"evil" not in clean_raw


def test_members_of_that_name_further_in_are_the_clients():
    raw = b'{"model":"m","metadata":{"kv_transfer_params":1}}'
    assert openai.without_forbidden(raw, openai.parse(raw))[0] is raw


def test_the_clients_own_object_is_not_changed():
    body: dict[str, Any] = {"model": "m", "bootstrap_room": 1}
    openai.without_forbidden(openai.dump(body), body)
    assert body == {"model": "m", "bootstrap_room": 1}


# Names of models


def renamed(raw: bytes, name: str = "full-name") -> bytes:
    body = openai.parse(raw)
    written, read = openai.with_model(raw, body, name)
    expected = json.loads(raw) | {"model": name}
    assert read == expected
    assert json.loads(written) == expected
    return written


def test_the_full_name_is_left_as_it_is():
    raw = b'{"model": "full-name"}'
    body = openai.parse(raw)
    assert openai.with_model(raw, body, "full-name") == (raw, body)


@pytest.mark.parametrize("between", [b"", b" "])
def test_an_alias_is_rewritten_in_place(between):
    raw = b'{ "stream":true,"model":%b"short" , "n": 1.0}' % between
    assert renamed(raw) == raw.replace(b"short", b"full-name")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model"  :  "short"}',
        b'{"model":\n"short"}',
        b'{"mod\\u0065l":"short"}',
        b'{"model":"sh\\u006frt"}',
        b'{"model":"short","model":"short"}',
        b'{"model":"other","model":"short"}',
        b'{"model":"short","metadata":{"model":"short"}}',
        b'{"prompt":"\\"model\\":\\"short\\"","model":"short"}',
        '{"prompt":"東京","model":"short"}'.encode(),
    ],
)
def test_an_alias_is_rewritten_in_every_spelling(raw):
    renamed(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":{"model":"short"},"model" : "short"}',
        b'{"model"  :"short","tools":[{"model":"short"}]}',
        b'{"mod\\u0065l":"short","metadata":{"model": "short"}}',
    ],
)
def test_an_alias_further_in_is_the_clients(raw):
    renamed(raw)


def test_an_alias_with_quotes_and_unicode():
    raw = json.dumps({"model": 'a "b" 東'}).encode()
    renamed(raw, 'c "d" 京')


# What routing asks of a body


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 0}, 1),
        ({"max_tokens": -3}, 1),
        ({"max_tokens": "9"}, None),
        ({"max_tokens": 2.5}, None),
        ({"max_tokens": True}, None),
    ],
)
def test_output_limit(body, limit):
    assert openai.output_limit(body) == limit


@pytest.mark.parametrize(
    ("body", "one"),
    [
        ({}, False),
        ({"messages": []}, False),
        ({"n": 1}, False),
        ({"n": None}, False),
        ({"n": 0}, False),
        ({"n": 2}, True),
        ({"n": "x"}, True),
        ({"best_of": 1}, False),
        ({"best_of": 3}, True),
        ({"use_beam_search": True}, True),
        ({"use_beam_search": False}, False),
        ({"echo": True}, True),
        ({"echo": False}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
        ({"logprobs": True}, False),
        ({"prompt": "text"}, False),
        ({"prompt": ["text"]}, False),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": [[1, 2, 3]]}, False),
        ({"prompt": ["one", "two"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": []}, False),
        ({"prompt": None}, False),
    ],
)
def test_needs_one_worker(body, one):
    assert openai.needs_one_worker(body) is one


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {}}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": "3"}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 48}}, 48),
    ],
)
def test_cached_tokens(usage, cached):
    assert openai.cached_tokens(usage) == cached
