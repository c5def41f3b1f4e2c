"""Report a rank's exception, signal or hang to the others; exit with the launcher."""
