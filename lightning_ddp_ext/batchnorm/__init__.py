"""Synchronise BatchNorm: its statistics are those of all ranks' batches together."""
