"""Write and read checkpoints of all ranks, locate them, and identify their fit."""
