"""Reduce scalars over the ranks without waiting, and tensors without a barrier."""
