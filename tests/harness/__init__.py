"""Provide what tests share: rank processes, scripts, hosts, leak checks, and one small
training.
"""
