"""Callbacks, which also work with stock strategies."""
