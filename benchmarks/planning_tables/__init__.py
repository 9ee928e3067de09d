"""The tables of benchmarks/planning.py, one module a family."""
