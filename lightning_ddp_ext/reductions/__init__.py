"""Values of every rank made one: many small ones at a time, and without waiting first."""
