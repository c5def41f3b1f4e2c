"""How the failure of one rank reaches the others: causes, last words, orphans, and work that rank 0 does for all."""
