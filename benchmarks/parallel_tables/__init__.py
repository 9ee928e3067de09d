"""The tables of parallel.py: one module each, and the processes and models that they share."""
