"""Callbacks of the training loop, one a file. To add one, subclass `Callback` and append it in `build_callbacks`."""
