"""Tests of the subpackage `checkpoint`, without Lightning."""
