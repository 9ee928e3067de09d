"""The attention function "multipack" of transformers, under the name that users import; see `foreign_attention`."""

from multipack.ops.attention.foreign_attention import register as register
