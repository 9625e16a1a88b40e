"""Ray kills a rollout that has begun to write a version, while the others wait for it. Prints what
ray_weights.job.lose prints."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from ray_weights import job as driver
from ray_weights.actors import RolloutActor
from ray_weights.hosts import emulated_hosts

LIMIT = 60.0


class Stopping(RolloutActor):
    def stop_in_next_push(self, begun: str) -> None:
        def tear(_) -> None:
            Path(begun).touch()
            time.sleep(10 * LIMIT)

        self.rollout.sync._buffers.tear = tear


def main() -> int:
    driver.RolloutActor = Stopping
    with tempfile.TemporaryDirectory() as folder, emulated_hosts([2, 2]):
        job = driver.Job("nano", 2, 2, 24, LIMIT)
        (row,) = job.rounds([1], 1)
        assert row.equal
        begun = Path(folder, "begun")
        job.get(job.rollouts[-1].stop_in_next_push.remote(str(begun)))

        def wait() -> None:
            end = time.monotonic() + LIMIT
            while not begun.exists():
                assert time.monotonic() < end, "no push has begun"
                time.sleep(0.05)
            time.sleep(1.0)  # the others are in the middle of it

        return 0 if driver.lose(job, 2, 1, wait) else 1


if __name__ == "__main__":
    sys.exit(main())
