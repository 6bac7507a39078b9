"""A model cut into stages."""
