import httpx
import pytest

from bench import tokenisation
from bench.tokenisation import Tokenisation


def counter(per_word, message, reply):
    def count(body):
        texts = [m["content"] for m in body["messages"]]
        return reply + sum(message + int(len(t) // 4 * per_word) for t in texts)

    return count


@pytest.mark.parametrize(("per_word", "message", "reply"), [(1, 2, 2), (1, 5, 3), (2, 0, 1)])
def test_solves_for_the_template(per_word, message, reply):
    found = tokenisation.calibrate(counter(per_word, message, reply), "m")
    assert found == Tokenisation(message, reply, float(per_word))


def test_words_for_tokens():
    assert Tokenisation(tokens_per_word=2.0).words(9) == 4
    assert Tokenisation().words(9) == 9
    assert Tokenisation().words(0) == 1


def test_a_worker_that_counts_nothing_is_refused():
    with pytest.raises(ValueError, match="counts no tokens"):
        tokenisation.calibrate(lambda body: 7, "m")


def test_an_unreachable_worker_raises():
    with pytest.raises(httpx.HTTPError):
        tokenisation.ask("http://127.0.0.1:1", "m", timeout_s=1.0)
