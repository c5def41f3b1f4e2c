"""Callbacks: what they offer works with stock strategies, too."""
