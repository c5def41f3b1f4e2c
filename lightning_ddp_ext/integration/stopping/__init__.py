"""Stop all ranks at a signal, and save the state of survivors after a failure."""
