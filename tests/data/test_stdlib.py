import ast
import sysconfig
import textwrap

import pytest

from multipack.data.data_config import DataConfig
from multipack.data.sources import open_source
from multipack.data.stdlib import library_files, parse_pairs

SOURCE = '''
import os

class Box:
    """A box."""

    def open(self, force=False):
        """Open it.

        Gently.
        """
        if force:
            return 1
        return 2  # ünicode

    @property
    def size(self): "How big."; return 3

    def only_docstring(self):
        """Nothing follows."""

    def no_docstring(self):
        return 4

async def outer(
    a,
    b,
):
    "Outer."
    def inner():
        """Inner."""
        return a
    return inner
'''


def test_pairs_are_signature_and_docstring_then_the_rest():
    pairs = parse_pairs(SOURCE.encode())
    assert [pair.name for pair in pairs] == ["Box.open", "outer", "outer.inner"]
    assert pairs[0].prompt == 'def open(self, force=False):\n    """Open it.\n\n    Gently.\n    """\n'
    assert pairs[0].completion == "    if force:\n        return 1\n    return 2  # ünicode\n"
    assert pairs[1].prompt == 'async def outer(\n    a,\n    b,\n):\n    "Outer."\n'
    assert pairs[2].completion == "    return a\n"


def test_a_pair_is_a_function_again():
    for pair in parse_pairs(SOURCE.encode()):
        (node,) = ast.parse(pair.prompt + pair.completion).body
        assert node.name == pair.name.rsplit(".", 1)[-1]


def test_a_declared_encoding_is_honored():
    source = '# -*- coding: latin-1 -*-\ndef f():\n    "é"\n    return 1\n'.encode("latin-1")
    assert parse_pairs(source)[0].prompt == 'def f():\n    "é"\n'


def test_the_real_library_gives_thousands_of_pairs():
    source = open_source(DataConfig())
    documents = list(source)
    assert len(documents) > 4000
    assert all([target for _, target, *_ in document.parts] == [False, True] for document in documents)
    assert all(text.strip() for document in documents for text, *_ in document.parts)
    names = [document.name for document in documents]
    assert "functools.py:wraps" in names
    assert not [name for name in names if name.startswith(("test/", "site-packages/", "idlelib/idle_test"))]
    assert source.done == source.total > 300
    assert [document.name for document in source] == names  # a second pass is the same


def test_the_hash_is_that_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "a.py").write_text(SOURCE)
    first = open_source(DataConfig()).hash
    assert open_source(DataConfig()).hash == first
    (tmp_path / "a.py").write_text(SOURCE + "\n")
    assert open_source(DataConfig()).hash != first


def test_what_is_no_library_is_left_out_and_what_does_not_parse_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for name in ("a.py", "site-packages/b.py", "test/c.py", "tests/d.py", "config-3/e.py", "pkg/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(SOURCE))
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "encoding.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    assert library_files()[1] == ["a.py", "broken.py", "encoding.py", "pkg/f.py"]
    source = open_source(DataConfig())
    for _ in range(2):
        assert len(list(source)) == 6
        assert source.skipped == {"files that do not parse": 2}


def test_an_interpreter_without_sources_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "functools.pyc").write_bytes(b"")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no standard library sources in .*data\.source=text"):
        open_source(DataConfig())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(ValueError, match="no standard library sources"):
        open_source(DataConfig())
