"""The one number that memory and scheduling agree on. Alone in a file that imports nothing."""

PAGE = 32
"""Positions of one request in a page of KV memory."""
