"""Compilation: nothing at import, and a cache folder that cannot be written to is no reason to fail."""

import subprocess
import sys

import numba

from multipack.planning.jit import compiled


def double(x):
    return 2 * x


def test_without_a_cache_folder(monkeypatch):
    real, asked = numba.njit, []

    def njit(*arguments, **options):
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'double': no locator available for file")  # numba's own
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    kernel = compiled(double)
    assert kernel(4) == 8
    assert asked == [True, False]


def test_nothing_compiles_at_import():
    code = (
        "import sys, multipack.planning.plan, multipack.planning.kernels as k;"
        "kernels = [v for v in vars(k).values() if hasattr(v, 'signatures')];"
        "assert len(kernels) > 8 and not any(v.signatures for v in kernels);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
