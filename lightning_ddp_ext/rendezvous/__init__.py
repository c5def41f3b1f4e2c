"""Connect the ranks, and exchange messages between them."""
