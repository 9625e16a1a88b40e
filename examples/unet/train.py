"""Train a U-Transformer over pipeline stages on different device meshes.

torchrun --standalone --nproc-per-node 5 examples/unet/train.py --model tiny --stages 2,3 --schedule Eager1F1B
"""

import sys
from pathlib import Path

# `unet` and `training` are packages of the examples folder, wherever torchrun was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.main import main

from unet.job import UNetJobType

if __name__ == "__main__":
    sys.exit(main(UNetJobType(), sys.argv[1:]))
