from bench.progress import Progress


def test_nothing_is_drawn_where_nobody_watches(capsys):
    with Progress("x", 3) as bar:
        bar.at(1)
        bar.at(3)
    assert capsys.readouterr() == ("", "")
