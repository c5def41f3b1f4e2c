"""Write each checkpoint once, as a whole, and read it once for all ranks."""
