"""The tables of benchmarks/support_matrix.py: one module per kind of host."""
