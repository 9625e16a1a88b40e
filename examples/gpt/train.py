"""Train a GPT over pipeline stages on unlike device meshes.

torchrun --standalone --nproc-per-node 5 examples/gpt/train.py --model tiny --stages 2,3 --schedule 1F1B
"""

import os
import sys
from pathlib import Path

# `gpt` is a package of the examples folder, wherever torchrun was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt.options import config_errors_exit, parse


def main(argv: list[str]) -> int:
    with config_errors_exit():
        options = parse(argv, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    # Only now, so that a wrong command line is answered at once.
    from gpt.loop import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
