"""Thin adapters between Lightning's hooks and the other subpackages, which do not
import Lightning.

They import one another by relative names, because they are loaded once for each of the
two Lightning trees; see ``trees``.
"""
