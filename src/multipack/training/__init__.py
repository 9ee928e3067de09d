"""The trainer: optimizer, metrics, checkpoints, evaluation and the loop."""
