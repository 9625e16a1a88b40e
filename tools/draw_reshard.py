"""Draws the README's picture from a plan, with matplotlib; tools that draw graphs know no shards.

It shows who holds what before and after a reshard, and the chains in between.

python tools/draw_reshard.py docs/images/reshard.svg
"""

from __future__ import annotations

import sys
from collections import defaultdict

import matplotlib

matplotlib.use("svg" if sys.argv[-1].endswith(".svg") else "agg")
matplotlib.rcParams["svg.hashsalt"] = "meshcast"  # the same picture gives the same file
import matplotlib.pyplot as plt  # noqa: E402
import meshcast  # noqa: E402
import torch  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402
from meshcast.topology import Host, Nic  # noqa: E402

SHAPE = (48, 48, 8192)  # drawn by its first two dimensions
SRC, DST = meshcast.Layout.parse("1x2:S1RR"), meshcast.Layout.parse("2x3@2:RRR")
HOSTS = {0: (0, 1), 1: (2, 3, 4), 2: (5, 6, 7)}
RIGHT = 3.9  # left edge of the destination hosts, in axis units
COLORS = ["#4477aa", "#ee8866", "#44aa88", "#ddcc77"]
SIZE = 0.72  # of one shard picture, in axis units


def topology() -> meshcast.Topology:
    rate = int(10e9 / 8)
    nic = Nic(out_rate=rate, in_rate=rate)
    return meshcast.Topology([Host(ranks, (nic,), local_rate=8 * rate) for ranks in HOSTS.values()])


def positions() -> dict[int, tuple[float, float]]:
    place = {0: (0.0, 0.9), 1: (1.15, 0.9)}
    for row, host in enumerate((1, 2)):
        for i, rank in enumerate(HOSTS[host]):
            place[rank] = (RIGHT + i * 1.15, (1 - row) * 1.75)
    return place


def draw_shard(
    ax: plt.Axes,
    rank: int,
    x: float,
    y: float,
    layout: meshcast.Layout,
    tiles: list[tuple[tuple[int, int], ...]],
) -> None:
    ax.add_patch(Rectangle((x, y), SIZE, SIZE, facecolor="#f4f4f4", edgecolor="#bbbbbb", linewidth=0.8))
    (held,) = layout.shards(SHAPE)[rank]
    for color, tile in zip(COLORS, tiles, strict=False):
        rows, cols = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held[:2], tile[:2], strict=True)]
        if rows[0] >= rows[1] or cols[0] >= cols[1]:
            continue
        corner = (x + cols[0] / SHAPE[1] * SIZE, y + SIZE - rows[1] / SHAPE[0] * SIZE)
        width, height = (cols[1] - cols[0]) / SHAPE[1] * SIZE, (rows[1] - rows[0]) / SHAPE[0] * SIZE
        ax.add_patch(Rectangle(corner, width, height, facecolor=color, edgecolor="white", linewidth=0.8))
    ax.text(x + SIZE / 2, y - 0.13, f"rank {rank}", ha="center", va="center", fontsize=8)


def main(path: str) -> None:
    plan = meshcast.plan(SHAPE, torch.float32, SRC, DST, topology=topology())
    place = positions()
    fig, ax = plt.subplots(figsize=(10, 4.3))
    tiles = [SRC.shards(SHAPE)[rank][0] for rank in SRC.ranks]
    flows: dict[tuple[int, int], int] = defaultdict(int)
    for hop in plan.transfers:
        flows[hop.src, hop.dst] += hop.nbytes
    for host, ranks in HOSTS.items():
        x, y = place[ranks[0]]
        width = 1.15 * (len(ranks) - 1) + SIZE + 0.3
        ax.add_patch(
            Rectangle((x - 0.15, y - 0.3), width, SIZE + 0.75, fill=False, edgecolor="#888888", linestyle=":")
        )
        ax.text(x - 0.08, y + SIZE + 0.28, f"host {host}", fontsize=8, color="#555555")
    host_of = {rank: host for host, ranks in HOSTS.items() for rank in ranks}
    for (src, dst), nbytes in flows.items():
        local = host_of[src] == host_of[dst]
        (xa, ya), (xb, yb) = place[src], place[dst]
        if local:  # from picture to picture, through the top of the row
            start, end = (xa + SIZE / 2, ya + SIZE), (xb + SIZE / 2, yb + SIZE)
        elif xa < RIGHT:
            start, end = (xa + SIZE, ya + SIZE / 2), (xb, yb + SIZE / 2)
        else:
            start, end = (xa + SIZE / 2, ya + SIZE / 2), (xb + SIZE / 2, yb + SIZE / 2)
        curve = (-0.35 if xb > xa else 0.35) if local else (0.0 if xa < RIGHT else 0.25)
        arrow = FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={curve}",
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=1,
            shrinkB=1,
            zorder=3,
            color="#aaaaaa" if local else "#222222",
            linewidth=0.6 + 1.6 * nbytes / max(flows.values()),
        )
        ax.add_patch(arrow)
    for rank in SRC.ranks:
        draw_shard(ax, rank, *place[rank], SRC, tiles)
    for rank in DST.ranks:
        draw_shard(ax, rank, *place[rank], DST, tiles)
    mib = 4 * torch.Size(SHAPE).numel() / 2**20
    crossing = sum(hop.nbytes for hop in plan.transfers if host_of[hop.src] != host_of[hop.dst]) / 2**20
    titles = {
        (0.93, 2.35): "source mesh 1 x 2\nShard(0) over 2 ranks",
        (RIGHT + 1.5, 3.05): "destination mesh 2 x 3: Replicate, Replicate",
    }
    for (x, y), title in titles.items():
        ax.text(x, y, title, ha="center", fontsize=10, weight="bold")
    caption = (
        f"{plan.strategy}: {mib:.0f} MiB to 6 ranks, of which {crossing:.0f} MiB cross the network (black) "
        "and the rest stays inside hosts (grey).\n"
        f"Predicted {1e3 * plan.makespan:.1f} ms at 10 Gbit/s per host, "
        f"{plan.makespan / plan.lower_bound:.3f} x the time that no plan can beat."
    )
    ax.text(3.3, -0.62, caption, ha="center", va="center", fontsize=8.5, color="#333333")
    ax.set_xlim(-0.4, 7.4)
    ax.set_ylim(-0.85, 3.25)
    ax.set_aspect("equal")
    ax.axis("off")
    fig.tight_layout(pad=0.3)
    fig.savefig(path, dpi=130, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/images/reshard.svg")
