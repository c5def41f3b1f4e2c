"""BatchNorm whose statistics are those of all ranks' batches together."""
