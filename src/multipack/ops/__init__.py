"""Functions of tensors and `PackedBatch`: attention, partial attention, cross-entropy. No nn.Module, no ranks."""
