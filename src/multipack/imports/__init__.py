"""Configurations of other tools → configurations of this package."""
