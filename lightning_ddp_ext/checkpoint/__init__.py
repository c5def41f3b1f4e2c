"""Write each checkpoint once and atomically, and read it once for all ranks."""
