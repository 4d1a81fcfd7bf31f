"""Where every child begins: `python -m protocol MODULE PIPE PARENT_PID` runs MODULE's process.

The libraries that a module loads are where memory and threads first run out, which has to be one
line as well.
"""

from __future__ import annotations

import runpy
import sys

from protocol.lifecycle import end_child

if __name__ == "__main__":
    try:
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    except BaseException as error:
        end_child(error)
