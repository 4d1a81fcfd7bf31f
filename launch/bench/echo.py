"""The yardstick for talking: a process that sends back what it gets, over ZeroMQ and nothing else.

Run as `python -m launch.bench.echo ADDRESS` by `round_trips`; ends with its parent's pipe.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import zmq

from launch.child import ROOT
from protocol.errors import ProcessDied

# As long as a demand.
MESSAGE = bytes(41)
TIMEOUT_MS = 30_000


def round_trips(directory: Path, count: int, pause: float) -> float:
    """Median seconds of a message to another process and back, both asleep for `pause` seconds
    before: what waking sockets costs where nothing is done with the message."""
    address = f"ipc://{directory}/echo"
    with zmq.Context() as context, context.socket(zmq.PAIR) as here:
        here.setsockopt(zmq.LINGER, 0)
        here.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        here.bind(address)
        command = [sys.executable, "-m", "launch.bench.echo", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as echo:
            try:
                return statistics.median([_round_trip(here, pause) for _ in range(count + 1)][1:])
            except zmq.Again:
                raise ProcessDied("the process that echoes messages gave no answer") from None
            finally:
                echo.kill()


def _round_trip(here: zmq.Socket[bytes], pause: float) -> float:
    time.sleep(pause)
    begin = time.perf_counter()
    here.send(MESSAGE)
    here.recv()
    return time.perf_counter() - begin


def main() -> None:
    """The process's whole life."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as there:
        there.setsockopt(zmq.LINGER, 0)
        there.connect(sys.argv[1])
        poller = zmq.Poller()
        poller.register(there, zmq.POLLIN)
        poller.register(sys.stdin, zmq.POLLIN)
        while not any(source == sys.stdin.fileno() for source, _ in poller.poll()):
            there.send(there.recv())


if __name__ == "__main__":
    main()
