import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.parallel.hostnames import compress_hostlist, expand_hostlist, parse_hostfile

NAMES = st.from_regex(r"[a-z]{0,2}(\d{0,3}-)?[a-z]\d{0,4}(\.[a-z]{1,3})?", fullmatch=True)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("node[001-003,007],gpu2", ["node001", "node002", "node003", "node007", "gpu2"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("b, a ,a", ["b", "a", "a"]),
        ("x3101c0s13b0n0.hsn.cm", ["x3101c0s13b0n0.hsn.cm"]),
        ("", []),
    ],
)
def test_host_lists_expand(expression, names):
    assert expand_hostlist(expression) == names


@pytest.mark.parametrize(
    "expression", ["n[1-3", "n1]", "n[[1]]", "n[3-1]", "n[a]", "n[]", "n[1-]", "a b", "n[0-6:2]"]
)
def test_what_is_no_host_list_is_refused(expression):
    with pytest.raises(ValueError, match="host list"):
        expand_hostlist(expression)


def test_a_short_text_cannot_ask_for_all_memory():
    for expression in ("n[0-999999999]", "n[0-999][0-999]", ",".join(["n[0-60000]"] * 2)):
        with pytest.raises(ValueError, match="more than 100,000 hosts"):
            expand_hostlist(expression)


@settings(deadline=None, max_examples=150)
@given(st.lists(NAMES, max_size=12))
def test_any_names_come_back_in_their_order(names):
    assert expand_hostlist(compress_hostlist(names)) == names


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 3))
def test_numbered_names_are_one_expression(numbers, width):
    names = [f"node{number:0{width}d}" for number in numbers]
    short = compress_hostlist(names)
    assert expand_hostlist(short) == names
    assert short.count("node") == 1


def test_runs_are_ranges():
    assert compress_hostlist(["node001", "node002", "node003", "node007", "gpu2"]) == "node[001-003,007],gpu2"
    assert compress_hostlist(["n9", "n10", "n010"]) == "n[9-10,010]"


def test_hostfiles_of_pbs_and_mpi_are_read():
    assert parse_hostfile("a.site\na.site\nb.site\n", "f") == {"a.site": 2, "b.site": 1}
    text = "# all\n\nfast slots=4 max_slots=8  # new\n  slow:2\nother\n"
    assert parse_hostfile(text, "f") == {"fast": 4, "slow": 2, "other": 1}


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(NAMES, st.integers(1, 64), min_size=1, max_size=8),
    st.sampled_from(["{} slots={}", "{}:{}"]),
)
def test_hostfiles_come_back(slots, form):
    text = "\n".join(form.format(name, count) for name, count in slots.items())
    assert parse_hostfile(text, "f") == slots
    lines = "\n".join(name for name, count in slots.items() for _ in range(count))
    assert parse_hostfile(lines, "f") == slots


@pytest.mark.parametrize("line", ["a slots=x", "a slots=0", "a:b", "a cores=4", "a,b", ":4"])
def test_a_line_that_is_no_host_is_named(line):
    with pytest.raises(ValueError, match="hosts, line 2"):
        parse_hostfile(f"good\n{line}\n", "hosts")


def test_a_file_without_hosts_is_refused():
    with pytest.raises(ValueError, match="hosts names no host"):
        parse_hostfile("# nothing\n", "hosts")
