"""python -m benchmarks.check: measures again and compares with committed results, ratio by ratio.

Ratios to the lower bound are compared, not times, so that the machines need not be equal. Fails where a
median is more than 10 % above the committed one, or where a committed figure could not be measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from meshcast.bench.report import ratio

_COMMITTED = Path(__file__).with_name("results") / "paper_cases.json"
_ALLOWED = 1.10
_METHODS = ["auto", "multicast", "broadcast"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument("--committed", type=Path, default=_COMMITTED)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    committed = json.loads(args.committed.read_text())
    before = {case["name"]: case for case in committed["cases"]}
    rates = ",".join(str(rate) for rate in committed["header"]["link_mbit"])
    with tempfile.TemporaryDirectory(prefix="meshcast-bench-") as folder:
        out = Path(folder, "now.json")
        command = [
            sys.executable, "-m", "benchmarks", "--cases", ",".join(before), "--methods", ",".join(_METHODS),
            "--mbit", rates, "--repeats", str(args.repeats), "--out", str(out),
        ]  # fmt: skip
        status = subprocess.run(command, check=False).returncode
        if not out.exists():
            return status or 1
        now = {case["name"]: case for case in json.loads(out.read_text())["cases"]}
    worse = []
    for name, case in before.items():
        for method in _METHODS:
            old, new = ratio(case, method), ratio(now[name], method) if name in now else None
            if old is not None and (new is None or new > old * _ALLOWED):
                worse.append(f"{name}, {method}: {new if new is None else f'{new:.3f}'}, committed {old:.3f}")
    print("\n".join(worse) or f"no ratio is more than {_ALLOWED - 1:.0%} above the committed one")
    return 1 if worse or status else 0


if __name__ == "__main__":
    sys.exit(main())
