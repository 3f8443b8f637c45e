"""Endpoints that generate nothing."""

from __future__ import annotations

import orjson
import pytest

from simulator.tokenizer import encode_chat
from simulator.vllm.endpoints import detokenize, models, tokenize
from simulator.vllm.errors import ApiError
from simulator.vllm.requests import Served

SERVED = Served(("tiny", "small"), 1000)


def test_every_name_is_listed():
    listed = orjson.loads(models(SERVED, 7))["data"]
    assert [model["id"] for model in listed] == ["tiny", "small"]
    assert {model["root"] for model in listed} == {"tiny"}
    assert {model["max_model_len"] for model in listed} == {1000}


def test_tokens_of_a_prompt_and_back():
    told = orjson.loads(tokenize({"prompt": "Hello there", "return_token_strs": True}, SERVED))
    assert told["count"] == 3
    assert "".join(told["token_strs"]) == "Hello there"
    assert orjson.loads(detokenize({"tokens": told["tokens"]})) == {"prompt": "Hello there"}
    assert orjson.loads(detokenize({"tokens": []})) == {"prompt": ""}


def test_tokens_of_messages():
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert orjson.loads(tokenize(body, SERVED))["tokens"] == encode_chat(body).tolist()


@pytest.mark.parametrize("body", [{}, {"prompt": 3}, {"messages": "Hi"}])
def test_what_cannot_be_tokenised_is_refused(body):
    with pytest.raises(ApiError):
        tokenize(body, SERVED)
    with pytest.raises(ApiError):
        detokenize({"tokens": ["x"]})
