"""Synthetic checkpoints in the released format: real widths can be tried without real weights."""
