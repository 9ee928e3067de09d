"""Memory that a decoder of 29 million parameters adds to one process, with its state in memory and in files.

    python benchmarks/offload.py

MiB after two steps, of /proc/self/smaps_rollup (Linux): the process's own, and all that is resident, with pages of
files, which the kernel may drop.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

from parallel_tables.observed import offloaded

if __name__ == "__main__":
    print(f"{'parallel.…':22}{'own MiB':>10}{'resident MiB':>14}")
    for name, (own, resident) in offloaded().items():
        print(f"{name:22}{own:10,.0f}{resident:14,.0f}", flush=True)
