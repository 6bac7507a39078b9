"""Checkpoints and models in files."""
