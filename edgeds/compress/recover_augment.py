"""Variations of unlabelled images for training: the teacher sees the same picture, so anything is a fair question.

A few hundred images are soon learned by heart; mirrored, zoomed and pasted over one another they last much longer
(Beyer et al. 2022, arXiv:2106.05237: teacher and student get the same crop).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edgeds.compress.torch_lib import import_torch

ZOOM = (0.6, 1.5)
CONTRAST = (0.8, 1.25)


def vary(images: Any, *, random: np.random.Generator) -> Any:
    """Images [N, C, H, W], floating point in any scaling, varied; same shape, and no values outside theirs.

    Each is mirrored half of the time and its contrast changed; all are zoomed by one factor: a larger one is cut to
    size at a random place, a smaller one is pasted over the next image of the batch.
    """
    torch = import_torch()
    lowest, highest = images.amin(), images.amax()
    flips = torch.from_numpy(random.random(len(images)) < 0.5).to(images.device)
    images = torch.where(flips[:, None, None, None], images.flip(-1), images)
    images = _zoomed(images, factor=_between(random, ZOOM), at=random.random(2))
    gains = np.array([_between(random, CONTRAST) for _ in range(len(images))], np.float32)
    middle = images.mean(dim=(1, 2, 3), keepdim=True)
    gain = torch.from_numpy(gains).to(images.device, images.dtype)[:, None, None, None]
    return (middle + (images - middle) * gain).clamp(lowest, highest)


def _between(random: np.random.Generator, limits: tuple[float, float]) -> float:
    return math.exp(random.uniform(math.log(limits[0]), math.log(limits[1])))


def _zoomed(images: Any, *, factor: float, at: np.ndarray) -> Any:
    height, width = images.shape[2:]
    size = max(1, round(height * factor)), max(1, round(width * factor))
    scaled = import_torch().nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
    top, left = (int(share * (abs(new - old) + 1)) for share, new, old in zip(at, size, (height, width), strict=True))
    if factor >= 1.0:
        return scaled[:, :, top : top + height, left : left + width]
    canvas = images.roll(1, dims=0).clone()
    canvas[:, :, top : top + size[0], left : left + size[1]] = scaled
    return canvas
