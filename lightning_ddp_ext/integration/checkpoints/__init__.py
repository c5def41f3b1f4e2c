"""Checkpoints of all ranks: writing, reading, their paths, and which fit they belong to."""
