"""Who reads which sample, and when."""
