"""Tests of the room of sampling, without Lightning."""
