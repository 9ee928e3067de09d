"""Which documents go together, when, and where: numpy and numba only, no torch."""
