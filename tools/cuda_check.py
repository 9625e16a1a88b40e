"""The step "import" of on_gpu.py, before pytest can run; no tool checks the list that cuobjdump prints.

It imports the package, reshards between CPU ranks and lists the kernels.

The package to check is on PYTHONPATH. Exit status 1 where something is not as it must be.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

WORLD = 3
LIMIT_S = 120


def rank_main(rank: int, port: int, with_cuda: bool) -> None:
    """One rank of the reshard: a tensor sharded over ranks 0 and 1 ends up sharded over 2, 1, 0."""
    import meshcast
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 1, 0])
    full = torch.arange(7.0 * 5).reshape(7, 5)
    x = distribute_tensor(full, source, [Shard(0)], src_data_rank=None)
    y = meshcast.reshard(x, target, [Shard(1)])
    place = [2, 1, 0].index(rank)
    expected = full.chunk(3, dim=1)[place]
    if not torch.equal(y.to_local(), expected):
        sys.exit(f"rank {rank} got {y.to_local().tolist()}, not {expected.tolist()}")
    if with_cuda and not torch.cuda.is_available():
        refusals(rank)
    dist.destroy_process_group()


def refusals(rank: int) -> None:
    """What is asked of a GPU where there is none ends in typed errors, and the group goes down cleanly."""
    import meshcast
    import torch
    from meshcast import _C
    from meshcast.groups.parent import parent_group
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    mesh = DeviceMesh("cuda", list(range(WORLD)), _init_backend=False)
    spec = meshcast.TensorSpec((7, 5), torch.float32, mesh, [Shard(0)])
    host = DeviceMesh("cpu", list(range(WORLD)), _init_backend=False)
    there = meshcast.TensorSpec((7, 5), torch.float32, host, [Shard(0)])
    group = parent_group(None, "check").private(range(WORLD))
    core = group.core
    assert core is not None
    gpu = _C.GpuGroupCore(core, group.control, list(range(WORLD)), rank, group.name, 0)
    if rank == 0:
        print(f"cuda-check: CUDA IPC is not offered: {_C.cuda_ipc_obstacle(0).splitlines()[0]}")
    for call in (
        lambda: meshcast.Resharder(spec, spec),
        lambda: meshcast.Resharder(there, spec),
        lambda: gpu.connect(0, bytes(128), 16, 1 << 26, 0, 0, 5.0),
        lambda: _C.IpcProof(0),
        lambda: gpu.connect_ipc(0, _C.IpcMeeting(), ["", "", ""], 1 << 26, 0, 0, 5.0),
    ):
        try:
            call()
        except meshcast.MeshcastError as error:
            if rank == 0:
                print(f"cuda-check: refused with {type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            sys.exit(f"rank {rank}: a call for a GPU was not refused")
    gpu.shutdown()


def reshard_on_cpu(with_cuda: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(rank), str(port), str(int(with_cuda))]
        )
        for rank in range(WORLD)
    ]
    try:
        codes = [rank.wait(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        sys.exit(f"cuda-check: the reshard between {WORLD} CPU ranks ended with statuses {codes}")


def cuobjdump() -> str | None:
    """Of the toolkit, or of Triton, which CUDA builds of torch bring."""
    found = shutil.which("cuobjdump")
    if found is None and (nvcc := shutil.which("nvcc")):
        found = shutil.which("cuobjdump", path=str(Path(nvcc).resolve().parent))
    if found is None:
        bundled = Path(sys.prefix).glob("lib/python*/site-packages/triton/backends/nvidia/bin/cuobjdump")
        found = next((str(path) for path in bundled), None)
    return found


def kernels(module: Path, program: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Registers and stack bytes of each kernel, by architecture."""
    command = [program, "--dump-resource-usage", str(module)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    out: dict[str, dict[str, tuple[int, int]]] = {}
    architecture = name = ""
    for line in said.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif name and (match := re.search(r"REG:(\d+) STACK:(\d+)", line)):
            out.setdefault(architecture, {})[name] = (int(match[1]), int(match[2]))
            name = ""
    return out


def main() -> None:
    import meshcast
    import torch
    from meshcast import _C

    info = importlib.import_module("meshcast._build_info")  # written by the build

    with_cuda = torch.version.cuda is not None
    if with_cuda != info.with_cuda or with_cuda != hasattr(_C, "cuda"):
        sys.exit(f"cuda-check: torch {torch.__version__}, and with CUDA code: {info.with_cuda}")
    print(f"cuda-check: import of meshcast {meshcast.__version__} under torch {torch.__version__}: ok")
    if with_cuda:
        print(f"cuda-check: NCCL {_C.nccl_version()} loads: ok")
    reshard_on_cpu(with_cuda)
    print(f"cuda-check: reshard between {WORLD} CPU ranks: ok")
    program = cuobjdump()
    checked = ["compiled", "linked", "imported", "a reshard between CPU ranks"]
    if not with_cuda:
        print("cuda-check: kernels not listed: this torch has no CUDA, so there are none")
    elif program is None:
        print("cuda-check: kernels not listed: no cuobjdump in the toolkit or in Triton")
    else:
        found = kernels(Path(str(_C.__file__)), program)
        if not found:
            sys.exit(f"cuda-check: {program} finds no kernel in {_C.__file__}")
        for architecture, usage in sorted(found.items()):
            kinds = sorted(
                {
                    match[1] or match[2]
                    for name in usage
                    if (match := re.search(r"\d+(?:(Copy|Cast|Reduce|Divide)Op|(amax|values)_kernel)", name))
                }
            )
            registers = max(used for used, _ in usage.values())
            on_stack = sorted(name for name, (_, stack) in usage.items() if stack > 0)
            stacks = f"{len(on_stack)} with a stack{': ' + ', '.join(on_stack) if on_stack else ''}"
            print(
                f"cuda-check: {architecture}: {len(usage)} kernels ({', '.join(kinds)}), "
                f"up to {registers} registers, {stacks}"
            )
            if kinds != ["Cast", "Copy", "Divide", "Reduce", "amax", "values"]:
                sys.exit(f"cuda-check: kernels are missing for {architecture}")
        checked.append("kernels listed")
    print(f"cuda-check: checked: {', '.join(checked)}")
    if torch.cuda.is_available():
        print("cuda-check: not checked here: kernels on this machine's GPU; run pytest tests/cuda with this")
    else:
        print("cuda-check: NOT checked: everything that runs on a GPU, since there is none (docs/cuda.md)")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
    else:
        main()
