"""Train a GPT with experts over pipeline stages on different device meshes.

torchrun --standalone --nproc-per-node 5 examples/moe/train.py --model tiny --stages 2,3 --schedule 1F1B
"""

import sys
from pathlib import Path

# `gpt`, `moe` and `training` are packages of the examples folder, wherever torchrun was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.main import main

from moe.job import MoEJobType

if __name__ == "__main__":
    sys.exit(main(MoEJobType(), sys.argv[1:]))
