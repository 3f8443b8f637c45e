import json

from bench import answers


def events(*items, done=True):
    parts = [b"data: " + json.dumps(item).encode() + b"\n\n" for item in items]
    return b"".join(parts) + (b"data: [DONE]\n\n" if done else b"")


def chunk(text, index=0, finish=None):
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


def document(*texts, **more):
    choices = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for i, text in enumerate(texts)
    ]
    return json.dumps({"choices": choices, **more}).encode()


def test_streamed_and_whole_are_the_same_answer():
    streamed = answers.streamed(200, events(chunk("a"), chunk("b"), chunk("", finish="stop")))
    whole = answers.whole(200, document("ab"))
    assert streamed.differences(whole) == []


def test_interleaved_choices_are_told_apart():
    body = events(chunk("a"), chunk("x", 1), chunk("b"), chunk("y", 1))
    assert answers.streamed(200, body).texts == {0: "ab", 1: "xy"}


def test_reuse_does_not_count_as_a_difference():
    left = answers.whole(200, document("a", usage={"prompt_tokens": 3}))
    details = {"cached_tokens": 2}
    right = answers.whole(
        200, document("a", usage={"prompt_tokens": 3, "prompt_tokens_details": details})
    )
    assert left.differences(right) == []
    other = answers.whole(200, document("a", usage={"prompt_tokens": 4}))
    assert left.differences(other) == ["usage"]


def test_a_different_text_and_status_show():
    assert answers.whole(200, document("a")).differences(answers.whole(200, document("b"))) == [
        "texts"
    ]
    error = json.dumps({"error": {"message": "", "type": "", "param": None, "code": 1}}).encode()
    assert "status" in answers.whole(400, error).differences(answers.whole(404, error))


def test_faults_of_form_show():
    assert "no [DONE] at the end" in answers.streamed(200, events(chunk("a"), done=False)).faults
    leaked = {"choices": [], "kv_transfer_params": {"x": 1}}
    assert answers.streamed(200, events(leaked)).faults == ["kv_transfer_params reached the client"]
    assert answers.streamed(200, events({"error": {"type": "E"}})).faults == ["error event: E"]
    assert answers.whole(200, b"<html>").faults == ["body is not JSON"]
    assert answers.whole(500, b'{"detail":"x"}').faults
    twice = events(chunk("a", finish="stop"), chunk("", finish="length"))
    assert answers.streamed(200, twice).faults == ["two finish reasons"]
    assert answers.streamed(200, b"oops\n\n" + events()).faults == ["a line that is no event"]


def test_tool_calls_are_compared_without_their_ids():
    def with_id(name):
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
        return answers.streamed(200, events({"choices": [choice]}))

    assert with_id("a").differences(with_id("b")) == []
