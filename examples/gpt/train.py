"""Train a GPT over pipeline stages on different device meshes.

torchrun --standalone --nproc-per-node 5 examples/gpt/train.py --model tiny --stages 2,3 --schedule 1F1B
"""

import sys
from pathlib import Path

# `gpt` and `training` are packages of the examples folder, wherever torchrun was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.main import main

from gpt.job import GptJobType

if __name__ == "__main__":
    sys.exit(main(GptJobType(), sys.argv[1:]))
