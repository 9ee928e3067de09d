import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {end}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        pytest.param("sys.exit('error: one line')", 1, "error: one line", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
    ids=["exit", "killed"],
)
def test_a_failure_is_one_line_and_its_exit_code(tmp_path, end, code, message):
    (tmp_path / "program.py").write_text(PROGRAM.format(end=end))
    start = [sys.executable, "-m", "multipack.launch.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*start, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in done.stderr
    assert "closing signal" not in done.stderr
