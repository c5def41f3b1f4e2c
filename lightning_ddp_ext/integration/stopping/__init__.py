"""Stop all ranks at a signal, and save what the surviving ranks have after a failure."""
