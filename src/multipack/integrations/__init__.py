"""This planner inside other tools: one module per tool, which alone imports it, and shared modules.

`transformers`, `trl`, `axolotl` and `torchtitan` train on planned packs, and `collator` makes the inputs of
transformers models. Attention for these is in ops/; the probe, which checks that they keep documents apart, is
in models/.

`multipack_v2` replaces the samplers of imoneoi's multipack_sampler, `axolotl` Axolotl's `MultipackBatchSampler`,
`verl`, `openrlhf` and `trl_batchers` the functions and classes that divide rollouts among ranks and micro-batches.
"""
