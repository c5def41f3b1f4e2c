"""Report the failure of one rank to the others: exceptions, signals, hangs, and processes without a launcher."""
