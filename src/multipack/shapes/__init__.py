"""Shapes of decoders as plain data: `ModelShape`, presets, families, and Hugging Face's config.json. No torch."""

from multipack.shapes.config_json import SIZES
from multipack.shapes.json_values import read_json
from multipack.shapes.shape import SHAPES, ModelShape

__all__ = ["SHAPES", "SIZES", "ModelShape", "read_json"]
