"""Start the ranks and connect them."""
