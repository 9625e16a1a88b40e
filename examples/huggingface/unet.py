"""UNet2DConditionModel of diffusers in two stages: down and up, with every skip connection an edge."""

import torch
from diffusers import UNet2DConditionModel
from meshcast.pipelining import PipelineStage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

SIZE = 8
CONDITION = (3, 16)  # length and width of what it is told about an image


def make_model() -> UNet2DConditionModel:
    """Random weights, the same on every rank."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=SIZE, in_channels=1, out_channels=1, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=CONDITION[1],
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip


def attends(block: nn.Module) -> bool:
    return getattr(block, "has_cross_attention", False)


class Down(nn.Module):
    """Everything to the lowest level."""

    def __init__(self, model: UNet2DConditionModel) -> None:
        super().__init__()
        self.time_proj, self.time_embedding = model.time_proj, model.time_embedding
        self.conv_in, self.down_blocks = model.conv_in, model.down_blocks

    def forward(self, sample: Tensor, timestep: Tensor, condition: Tensor) -> tuple[Tensor, ...]:
        time = self.time_embedding(self.time_proj(timestep).to(sample.dtype))
        sample = self.conv_in(sample)
        skips = [sample]
        for block in self.down_blocks:
            told = (
                {"encoder_hidden_states": condition} if getattr(block, "has_cross_attention", False) else {}
            )
            sample, made = block(hidden_states=sample, temb=time, **told)
            skips += made
        return sample, time, condition, *skips


class Up(nn.Module):
    """The lowest level and everything after it."""

    def __init__(self, model: UNet2DConditionModel) -> None:
        super().__init__()
        self.mid_block, self.up_blocks = model.mid_block, model.up_blocks
        self.conv_norm_out, self.conv_act, self.conv_out = model.conv_norm_out, model.conv_act, model.conv_out

    def forward(self, sample: Tensor, time: Tensor, condition: Tensor, *skips: Tensor) -> Tensor:
        sample = self.mid_block(sample, time, encoder_hidden_states=condition)
        for block in self.up_blocks:
            n = len(block.resnets)
            skips, taken = skips[:-n], skips[-n:]
            told = (
                {"encoder_hidden_states": condition} if getattr(block, "has_cross_attention", False) else {}
            )
            sample = block(hidden_states=sample, temb=time, res_hidden_states_tuple=taken, **told)
        return self.conv_out(self.conv_act(self.conv_norm_out(sample)))


def make_stage(stage: int, n_stages: int, mesh: DeviceMesh) -> PipelineStage:
    if n_stages != 2:
        raise SystemExit(f"the U-Net is cut into two stages here, not {n_stages}; use --stages N,N")
    module = [Down, Up][stage](make_model())
    return PipelineStage(module, stage, n_stages, torch.device("cpu"), mesh=mesh)


def whole(model: UNet2DConditionModel, sample: Tensor, timestep: Tensor, condition: Tensor) -> Tensor:
    return model(sample, timestep, condition).sample


def batch(step: int, samples: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Noise to find in stripes; the condition says nothing."""
    generator = torch.Generator().manual_seed(step)
    stripes = (
        torch.randint(0, 2, (samples, 1, 1, SIZE), generator=generator).float().expand(-1, 1, SIZE, SIZE)
    )
    noise = torch.randn(samples, 1, SIZE, SIZE, generator=generator)
    condition = torch.zeros(samples, *CONDITION)
    return (stripes + noise, torch.full((samples,), 500), condition), noise


def loss_fn(found: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(found, noise)
