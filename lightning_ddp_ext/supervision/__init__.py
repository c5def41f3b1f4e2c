"""Report one rank's failure to the other ranks: exceptions, signals, hangs, and the
death of the launcher.
"""
