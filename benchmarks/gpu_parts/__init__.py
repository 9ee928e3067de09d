"""The benchmarks of gpu_check.py: each module is one part, run as `python -m gpu_parts.NAME` beside this folder."""
