"""Adapters between Lightning's hooks and the other subpackages.

The other subpackages do not import Lightning. The adapters import one another by
relative names, because they are loaded once for each of the two Lightning trees; see
``trees``.
"""
