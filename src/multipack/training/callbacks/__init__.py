"""Callbacks of the training loop, one a file. A new one is a subclass of `Callback` and a row in `build_callbacks`."""
