"""Starts the replicas of a job of torchft and its lighthouse, and a replica anew when it has died.

torchft_job.py REPLICAS RESTARTS [options of examples/elastic/train.py], in an environment that has torchft.
The lighthouse has the settings of torchft's README, but for two replicas at least: one that is started when
the others have ended must not begin from the start.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchft.coordination import LighthouseServer

_LAST = 10.0  # seconds that the others have to end when one has


def main() -> int:
    replicas, restarts = int(sys.argv[1]), int(sys.argv[2])
    settings = {"min_replicas": 2, "quorum_tick_ms": 100, "join_timeout_ms": 10000}
    lighthouse = LighthouseServer(bind="127.0.0.1:0", **settings)
    command = [sys.executable, str(Path(__file__).with_name("torchft_replica.py")), *sys.argv[3:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running: dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as ready:
        more = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "READY": ready, "REPLICAS": str(replicas)}

        def start(number: int) -> None:
            running[number] = subprocess.Popen(command, env={**os.environ, **more, "REPLICA": str(number)})

        try:
            for number in range(replicas):
                start(number)
            while all(process.poll() != 0 for process in running.values()):
                for number, process in running.items():
                    if process.poll() is not None:
                        print(f"replica {number} (pid {process.pid}) died: {process.poll()}", file=sys.stderr)
                        if restarts == 0:
                            return 1
                        restarts -= 1
                        start(number)
                        break
                time.sleep(0.1)
            until = time.monotonic() + _LAST
            while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
                time.sleep(0.1)
            # One that has just been started waits for others that are not there any more.
            return int(any(process.poll() not in (0, None) for process in running.values()))
        finally:
            for process in running.values():
                process.kill()
                process.wait()


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as error:
        status = int(error.code or 0)
    sys.stderr.flush()
    os._exit(status)  # the lighthouse has threads of its own, and nobody is left who asks it
