"""Where `headrace` and `python launch.py` begin: the command line, imported under a handler.

Loading the libraries takes a good part of a second, in which Ctrl-C must not print a traceback.
"""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line; never returns."""
    try:
        from launch.cli import main as run
    except KeyboardInterrupt:
        os._exit(130)
    run()
