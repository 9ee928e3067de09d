"""Decoders and attention on one device: torch.nn, no ranks, no configuration files."""
