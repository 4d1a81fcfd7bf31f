"""Engram rows: which ones a token needs, where they lie, and the process that reads them."""
