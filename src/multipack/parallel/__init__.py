"""torch.distributed: strategies applied to a model that knows nothing of them."""
