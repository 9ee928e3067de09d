"""Drop-in replacements for other packages' samplers, one file per package, with this planner inside.

`multipack_v2` replaces the samplers of imoneoi's multipack_sampler, `axolotl` Axolotl's `MultipackBatchSampler`,
`verl`, `openrlhf` and `trl_batchers` the functions and classes that divide rollouts among ranks and micro-batches.
"""
