"""Thin adapters between Lightning's hooks and the subpackages below, which do not import it.

They import one another by relative names, because they are loaded once for each of the two Lightning trees; see
``trees``.
"""
