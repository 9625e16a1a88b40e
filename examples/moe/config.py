"""Sizes of the model: those of a GPT, and its experts. Imports no torch."""

from dataclasses import asdict, dataclass

from gpt.config import ModelConfig
from training.layout import ConfigError


@dataclass(frozen=True)
class MoEConfig(ModelConfig):
    """A GPT whose layers have several MLPs, the experts, of which each token goes to `active`.

    balance: weight of the routers' loss in the loss that is trained.
    """

    experts: int = 4
    active: int = 2
    balance: float = 0.01

    def parameters(self) -> int:
        """In a layer `experts` MLPs of 8 w^2 without biases, and a router, replace one of 8 w^2 + 5 w."""
        w = self.width
        return super().parameters() + self.layers * (self.experts * (8 * w * w + w) - 8 * w * w - 5 * w)


def sparse(dense: ModelConfig, experts: int, active: int, balance: float) -> MoEConfig:
    """The dense model with experts. Raises ConfigError on numbers that cannot be."""
    if experts < 1:
        raise ConfigError(f"--experts {experts}: must be at least 1")
    if not 1 <= active <= experts:
        fit = min(max(active, 1), experts)
        raise ConfigError(f"--active {active} of --experts {experts}; use --active {fit}")
    if not 0 <= balance < float("inf"):
        raise ConfigError(f"--balance {balance}: must be at least 0, as in --balance {MoEConfig.balance}")
    return MoEConfig(**asdict(dense), experts=experts, active=active, balance=balance)
