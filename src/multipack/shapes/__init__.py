"""Shapes of decoders as plain data: `ModelShape`, presets, families, and Hugging Face's config.json. No torch."""

from multipack.shapes.families import SIZES
from multipack.shapes.json_values import read_json
from multipack.shapes.rotation import RotationLimit, rotation_limit
from multipack.shapes.shape import SHAPES, ModelShape

__all__ = ["SHAPES", "SIZES", "ModelShape", "RotationLimit", "read_json", "rotation_limit"]
