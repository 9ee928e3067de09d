import pytest

from multipack.parallel.hostnames import expand_hostlist


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("node[001-003,007],gpu2", ["node001", "node002", "node003", "node007", "gpu2"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("b, a ,a", ["b", "a", "a"]),
        ("x3101c0s13b0n0.hsn.cm", ["x3101c0s13b0n0.hsn.cm"]),
        ("", []),
    ],
)
def test_host_lists_expand(expression, names):
    assert expand_hostlist(expression) == names


def test_invalid_and_oversized_host_lists_are_refused():
    for expression in ("n[1-3", "n1]", "n[[1]]", "n[3-1]", "n[a]", "n[]", "n[1-]", "a b", "n[0-6:2]"):
        with pytest.raises(ValueError, match="host list"):
            expand_hostlist(expression)
    for expression in ("n[0-999999999]", "n[0-999][0-999]", "n[0-60000],n[0-60000]"):
        with pytest.raises(ValueError, match="more than 100,000 hosts"):
            expand_hostlist(expression)
