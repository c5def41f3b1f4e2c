"""Tests of the subpackage `data`, without Lightning."""
