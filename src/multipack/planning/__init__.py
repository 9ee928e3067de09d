"""Which documents go together, when, and where: numpy and numba only, no torch."""

LARGEST_CAPACITY = 1 << 27
"""Most tokens of a pack: kernels index arrays of that size by tokens."""
