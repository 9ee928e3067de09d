"""Stores of tokens: folders of shards, written, grown, staged and checked."""
