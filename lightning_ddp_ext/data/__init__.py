"""Determine which rank reads which sample, and when."""
