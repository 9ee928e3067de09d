"""Packs of documents: samplers, collators, loaders and the batch of a pack."""
