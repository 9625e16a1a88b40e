"""Text from a checkpoint, in one process, whatever layout wrote it.

python examples/gpt/sample.py out/checkpoint --prompt 'def '
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from training.checkpoint import ABOUT, complete
from training.command_line import Parser, config_errors_exit
from training.layout import ConfigError
from training.rng import generator_for

from gpt.config import ModelConfig
from gpt.model import build_stage


def load(root: Path) -> nn.Module:
    """The whole model of the newest checkpoint. Raises ConfigError where there is none of a GPT."""
    folders = complete(root)
    if not folders:
        raise ConfigError(f"no checkpoint in {root}; train.py --checkpoint {root} writes one")
    try:
        config = ModelConfig(**json.loads((folders[-1] / ABOUT).read_text())["model"])
    except TypeError:
        raise ConfigError(f"{folders[-1]} was not written by examples/gpt/train.py") from None
    model = build_stage(config, 0, 1, seed=0)
    names = dict(model.named_parameters())  # a tied head has no name of its own
    state = {"model": {name: parameter.data for name, parameter in names.items()}}
    dcp.load(state, checkpoint_id=folders[-1], no_dist=True)
    return model.eval()


@torch.no_grad()
def continue_text(model: nn.Module, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """`length` more bytes, each drawn from the model's distribution after the ones before. A model has a
    window: it sees the last bytes only. Temperature 0 takes the likeliest."""
    window = len(model.get_parameter("embedding.positions.weight"))
    generator = generator_for(seed, "sample")
    text = torch.tensor(list(prompt))
    for _ in range(length):
        logits = model(text[None, -window:])[0, -1]
        text = torch.cat([text, draw(logits, temperature, generator)])
    return bytes(text.tolist())


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)


def main(argv: list[str]) -> int:
    parser = Parser(description="Text from a checkpoint of examples/gpt/train.py.")
    parser.add_argument("checkpoint", type=Path, metavar="DIR", help="what train.py --checkpoint was given")
    parser.add_argument("--prompt", default="def ", metavar="TEXT", help="(%(default)r)")
    parser.add_argument("--length", type=int, default=200, metavar="N", help="bytes to add (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="X", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    with config_errors_exit():
        args = parser.parse_args(argv)
        if not args.prompt or args.length < 1 or args.temperature < 0:
            raise ConfigError("--prompt must not be empty, --length at least 1, --temperature at least 0")
        model = load(args.checkpoint)
    text = continue_text(model, args.prompt.encode(), args.length, args.temperature, args.seed)
    print(text.decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
