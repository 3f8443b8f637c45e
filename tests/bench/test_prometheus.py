from bench import prometheus

TEXT = """# HELP a_total x
# TYPE a_total counter
a_total{model="m",kind="predicted"} 10
a_total{model="m",kind="delivered"} 12.0
a_total{model="n",kind="delivered"} 1
h_seconds_sum{model="m"} 3
h_seconds_count{model="m"} 2
plain 5
odd{path="a\\"b,c"} 7
"""


def test_sums_and_groups():
    page = prometheus.parse(TEXT)
    assert page.total("a_total") == 23
    assert page.total("a_total", model="m", kind="delivered") == 12
    assert page.by("a_total", "kind") == {"predicted": 10, "delivered": 13}
    assert page.total("plain") == 5
    assert page.total("odd") == 7
    assert page.total("absent") == 0


def test_growth_between_two_pages():
    before = prometheus.parse('h_seconds_sum{model="m"} 1\nh_seconds_count{model="m"} 1\n')
    grown = prometheus.parse(TEXT).since(before)
    assert grown.mean("h_seconds") == 2
    assert grown.total("plain") == 5
    assert before.mean("absent") is None
