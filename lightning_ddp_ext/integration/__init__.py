"""The only rooms that import Lightning: thin adapters between its hooks and ours."""
