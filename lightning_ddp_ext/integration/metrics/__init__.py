"""Values that are logged and monitored on all ranks."""
