"""Tests of the room of checkpoints, without Lightning."""
