"""Reduce values over the ranks: many scalars in one collective, and single tensors without a barrier."""
