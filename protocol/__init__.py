"""Everything two Headrace processes must agree on: files, messages, shared memory, trace events.

Nothing here imports torch, so a reader process stays small.
"""

__version__ = "0.1.0"
