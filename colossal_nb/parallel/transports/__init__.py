"""Rank to rank: what carries the bytes of a group."""
