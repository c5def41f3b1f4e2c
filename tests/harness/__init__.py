"""What tests share: rank processes, scripts, hosts, leaks, and one small training."""
