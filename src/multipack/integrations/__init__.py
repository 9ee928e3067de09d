"""This planner inside other tools: one module per tool, which alone imports it, and what they share.

`transformers`, `trl` and `axolotl` train on planned packs, and `collator` makes the inputs of their models. Attention
for these models is in ops/, the probe of whether they keep documents apart in models/.

`multipack_v2` replaces the samplers of imoneoi's multipack_sampler, `axolotl` Axolotl's `MultipackBatchSampler`,
`verl`, `openrlhf` and `trl_batchers` the functions and classes that divide rollouts among ranks and micro-batches.
"""
