"""benchmarks/gpu_check.py: its runner, its parts in their reduced form on a CPU, and when tests see GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check(script):
    return script("gpu_check")


def test_results_are_kept_when_a_part_fails_or_hangs(check, tmp_path, capsys):
    asked = [{"figure": "speed", "reached": 0.5, "asked": 1.0}]
    write = f"import sys; open(sys.argv[1], 'w').write('''{json.dumps({'asked': asked})}''')"
    sleep = "import subprocess; subprocess.run(['sleep', '60'])"
    parts = [
        check.Part("hangs", 0.5, ("-c", sleep)),
        check.Part("fails", 10, ("-c", "import sys; print(2); sys.exit('no such kernel')")),
        check.Part("works", 10, ("-c", write, "{out}")),
    ]
    began = time.monotonic()
    rows = check.run_parts(parts, "cpu", True, tmp_path)
    assert time.monotonic() - began < 10
    assert [row["state"] for row in rows] == ["out of time", "failed", "passed"]
    assert rows[1]["last_line"] == "no such kernel"
    assert rows[2]["asked"] == asked
    assert "NOT REACHED speed: 0.50, asked 1.00" in " ".join(capsys.readouterr().out.split())
    again = [check.Part("fails", 10, ("-c", "print('mended')"))]
    check.run_parts(again, "cpu", True, tmp_path)
    saved = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert {row["part"]: row["state"] for row in saved} == {
        "hangs": "out of time",
        "fails": "passed",
        "works": "passed",
    }


def test_every_file_with_cuda_tests_is_a_part(check):
    named = {part.command[-1] for part in check.cuda_tests(ROOT / "tests")}
    assert str(ROOT / "tests" / "ops" / "test_attention_kernels.py") in named
    names = [part.name for part in check.all_parts()]
    assert len(set(names)) == len(names)
    for part in check.all_parts():
        script = part.command[0]
        if script == "-m":
            assert importlib.util.find_spec(part.command[1]), part.name
        else:
            assert (ROOT / "benchmarks" / script).is_file()


@pytest.mark.parametrize("name", ["environment", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_part_runs_in_its_reduced_form(name, tmp_path, monkeypatch, known_peak, script):
    out = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [name, "--device", "cpu", "--small", "--out", str(out)])
    script(f"gpu_parts.{name}").main()
    assert json.loads(out.read_text())["small"] is True


def test_a_trace_is_summed_up(script):
    trace = script("gpu_parts.trace")
    events = [
        {"cat": "kernel", "name": "sm90_gemm_bf16", "ts": 0, "dur": 50},
        {"cat": "kernel", "name": "flash_fwd_kernel", "ts": 40, "dur": 20},
        {"cat": "kernel", "name": "vectorized_elementwise_kernel", "ts": 90, "dur": 10},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
    ]
    found = trace.summary(events, "kernel")
    assert found["busy_share"] == pytest.approx(0.7)
    assert found["share_by_kind"] == {"matrix products": 0.5, "attention": 0.2, "elementwise": 0.1}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_part_runs_in_its_reduced_form(check, tmp_path):
    parts = [
        replace(part, limit=1800) for part in check.all_parts()
    ]  # their limits are for an idle GPU machine
    rows = check.run_parts(parts, "cpu", True, tmp_path)
    assert {row["part"]: row["state"] for row in rows} == {row["part"]: "passed" for row in rows}
    for part in check.BENCHES:
        assert (tmp_path / f"{part.name}.json").is_file()


# GPUs and the test suite


@pytest.fixture
def configure(monkeypatch):
    """An expression of markers and arguments → whether the tests see GPUs."""
    spec = importlib.util.spec_from_file_location("tests_conftest", ROOT / "tests" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)

    def visible(markexpr, *args):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=markexpr), args=args))
        return "CUDA_VISIBLE_DEVICES" not in os.environ

    visible.conftest = conftest
    return visible


@pytest.mark.parametrize(
    ("markexpr", "sees"),
    [
        ("cuda", True),
        ("cuda and not slow", True),
        ("not slow and cuda", True),
        ("", False),
        ("not slow and not cuda and not drill", False),
        ("not cuda", False),
        ("cuda or slow", False),
        ("drill", False),
    ],
)
def test_only_cuda_tests_see_gpus(configure, markexpr, sees):
    assert configure(markexpr) is sees


def test_processes_of_tests_see_no_gpus():
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "''"


def test_missing_packages_are_named_before_collection(configure, monkeypatch):
    monkeypatch.setattr(configure.conftest, "NEEDED", ("numpy", "no_such_package"))
    with pytest.raises(pytest.UsageError, match=r"^no_such_package not installed: .*name the test files"):
        configure("cuda", "tests")
    assert configure("cuda", f"{__file__}::test_something")
