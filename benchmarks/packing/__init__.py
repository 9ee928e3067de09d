"""The public packing benchmark: tools × sets of lengths → what each tool makes of an epoch. See `__main__.py`."""
