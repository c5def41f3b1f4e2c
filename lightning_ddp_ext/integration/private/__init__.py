"""Private names of Lightning's, and its methods that a run replaces."""
