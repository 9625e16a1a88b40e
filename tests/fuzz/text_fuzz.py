"""Coverage-guided fuzzing of everything that reads text: layouts, topologies and plans. Run by `make fuzz`.

    python tests/fuzz/text_fuzz.py -max_total_time=60 [CORPUS_FOLDER]

Whatever the text, the readers either return a value that survives a round trip or raise LayoutError; anything
else, a crash or an allocation beyond libFuzzer's limit included, ends the run with the input that did it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris
import torch

with atheris.instrument_imports(include=["meshcast"]):
    import meshcast
    from meshcast import LayoutError, Plan, Topology
    from meshcast.layout import Layout

_PLAN = meshcast.plan((8, 6), torch.int32, Layout.parse("2x1:S0R"), Layout.parse("3@2:RS0")).to_json()
# The fuzzer finds neither format alone: it starts from texts that read well and changes them. The first byte
# chooses the reader.
SEEDS = [
    "\0" + "2x4:S0RR",
    "\0" + "1x4@8:S1RR",
    "\0" + "2x2@4:S01R",
    "\0" + "2x3@4:Shard(0),Partial(max)",
    "\0" + "2x2:_StridedShard(1, split_factor=2),Replicate()",
    "\1" + Topology.uniform(4, 10).to_json(),
    "\1" + Topology.from_hosts({0: "a", 1: "b", 2: "a"}).to_json(),
    "\2" + _PLAN,
    "\3" + "0123456789abcdef",
]


def parse_layout(text: str) -> None:
    layout = Layout.parse(text)
    assert layout.ranks, text


def read_topology(text: str) -> None:
    topology = Topology.from_json(text)
    assert Topology.from_json(topology.to_json()) == topology


def read_plan(text: str) -> None:
    plan = Plan.from_json(text)
    assert Plan.from_json(plan.to_json()).hash == plan.hash


def mutate_field(data: atheris.FuzzedDataProvider) -> None:
    """Replaces one value inside a well-formed plan, where byte changes would break the JSON long before."""
    document = json.loads(_PLAN)
    holder, key = document, None
    while isinstance(holder, dict | list) and holder:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = keys[data.ConsumeIntInRange(0, len(keys) - 1)]
        if not isinstance(holder[key], dict | list) or data.ConsumeBool():
            break
        holder = holder[key]
    if key is not None and isinstance(holder, dict | list) and holder:
        values = [data.ConsumeInt(8), data.ConsumeUnicode(8), None, [], {}, -1, 1 << 62, data.ConsumeFloat()]
        holder[key] = values[data.ConsumeIntInRange(0, len(values) - 1)]
    read_plan(json.dumps(document))


def one_input(raw: bytes) -> None:
    kind = raw[0] % 4 if raw else 0
    try:
        if kind == 3:
            mutate_field(atheris.FuzzedDataProvider(raw[1:]))
        else:
            # A path would be opened, which is not what is tested here.
            text = (
                raw[1:].decode("utf-8", "replace") if kind == 0 else "{" + raw[2:].decode("utf-8", "replace")
            )
            (parse_layout, read_topology, read_plan)[kind](text)
    except LayoutError:
        pass  # refused in words


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="meshcast-fuzz-") as corpus:
        for number, text in enumerate(SEEDS):
            Path(corpus, f"seed{number}").write_text(text, encoding="utf-8")
        atheris.Setup([*sys.argv, "-rss_limit_mb=4096", "-max_len=8192", corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
