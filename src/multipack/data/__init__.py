"""Documents → tokens → `PackedBatch`: sources, tokenizers, the token store, views, samplers and collators."""
