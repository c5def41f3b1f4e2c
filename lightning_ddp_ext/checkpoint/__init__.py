"""Checkpoints: written once, whole, and read once."""
