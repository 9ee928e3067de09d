"""One thin file for each host: the names that people import today, with this planner inside.

`multipack_v2` stands in for imoneoi's multipack_sampler, `axolotl` for Axolotl's `MultipackBatchSampler`.
"""
