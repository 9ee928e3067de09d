"""This planner inside other tools: one module per tool, which alone imports it, and what they share.

`transformers`, `trl` and `axolotl` train on planned packs, `collator` makes the inputs of their models,
`attention_interface` is attention for them, and `probe` checks whether a model keeps documents apart.

`multipack_v2` replaces the samplers of imoneoi's multipack_sampler, `axolotl` Axolotl's `MultipackBatchSampler`,
`verl`, `openrlhf` and `trl_batchers` the functions and classes that divide rollouts among ranks and micro-batches.
"""
