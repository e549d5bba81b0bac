"""Rotary positions (Su et al. 2021): each pair of a head's elements is turned by an angle that grows with position."""

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(tokens: torch.Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosine and sine (s, h/a) of every position's angles, computed in fp32 and kept in `dtype`."""
    s, device = tokens.size(1), tokens.device
    pairs = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(s, device=device, dtype=torch.float32), theta**-pairs)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The type of matrix products on `x`: autocast's where it is on. Rotating by fp32 would make q and k fp32 too."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Queries or keys (b, a, s, h/a) with each pair of elements turned by its position's angle."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
