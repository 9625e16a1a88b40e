"""torch.distributed.send and recv under gloo and under backend meshcast, by turns: two ranks of this machine
or, as root, of two emulated hosts. Prints a table; the sizes are in KiB.

With PYTHONPATH=python:. :
torchrun --nproc-per-node 2 benchmarks/message_sizes.py 4 64 1024 65536
python -m benchmarks.cluster run --hosts 2 --mbit 1000 -- python -m benchmarks.message_sizes 4 1024
"""

from __future__ import annotations

import resource
import statistics
import sys
import time

import meshcast  # noqa: F401  registers the backend
import torch
import torch.distributed as dist

from benchmarks.steps import steps

_SIZES = [4, 64, 1024, 16384, 65536]  # KiB
_ROUNDS = 11  # of each backend; the first, which meets, does not count
_BYTES, _MOST = 64 << 20, 200  # messages of a round: so many bytes, but no more than so many


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "meshcast")}
    if dist.get_rank() == 0:
        print("| KiB | gloo, us | meshcast, us | ratio | CPU: gloo, us | meshcast, us |")
        print("|---|---|---|---|---|---|")
    for kib in steps([int(text) for text in sys.argv[1:]] or _SIZES, "sizes"):
        data = torch.zeros(1024 * kib, dtype=torch.uint8)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(_ROUNDS):
            for name, group in groups.items():
                found[name].append(_round(data, group))
        if dist.get_rank() == 0:
            (gloo, gloo_cpu), (ours, ours_cpu) = (
                [statistics.median(each[at] for each in found[name][1:]) for at in (0, 1)] for name in groups
            )
            pairs = zip(found["meshcast"][1:], found["gloo"][1:], strict=True)
            ratio = statistics.median(one[0] / other[0] for one, other in pairs)
            print(
                f"| {kib} | {gloo:.0f} | {ours:.0f} | {ratio:.2f} | {gloo_cpu:.0f} | {ours_cpu:.0f} |",
                flush=True,
            )
    dist.destroy_process_group()


def _round(data: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Microseconds for one message one way, and of CPU time of both ranks."""
    count = max(1, min(_MOST, _BYTES // data.numel()))
    peer = 1 - dist.get_rank()
    dist.barrier()
    begin, cpu = time.perf_counter(), _cpu()
    for _ in range(count):
        if peer == 1:
            dist.send(data, peer, group)
            dist.recv(data, peer, group)
        else:
            dist.recv(data, peer, group)
            dist.send(data, peer, group)
    elapsed = time.perf_counter() - begin
    spent = torch.tensor(_cpu() - cpu, dtype=torch.float64)
    dist.all_reduce(spent)
    return 1e6 * elapsed / count / 2, 1e6 * float(spent) / count / 2


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
