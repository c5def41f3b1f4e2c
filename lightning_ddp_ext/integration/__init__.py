"""The only rooms that import Lightning: thin adapters between its hooks and ours.

They import one another by relative names, because they are loaded once for each of the two Lightning trees; see
``trees``.
"""
