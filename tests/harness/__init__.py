"""Provide what tests share: rank processes, scripts, hosts, and a small training."""
