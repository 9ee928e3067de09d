"""Stores of tokens: folders of shards, written, grown and checked."""
