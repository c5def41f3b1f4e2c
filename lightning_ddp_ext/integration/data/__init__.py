"""What each rank reads in training and evaluation, and where a resume continues."""
