"""Calibration samples from a handful of photographs, for when there is no folder of the user's own images yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from edgeds.imagefile import ImageU8, read_image


class PhotoCrops:
    """Crops of photographs as an iterable of BGR uint8 images: each whole, mirrored, and cut to seeded regions.

    Iterating again gives the same images, each content once (a plain picture equals its mirror image). A few
    photographs stand in for a data set only in a demo: real ranges need images from the camera that will be used.
    """

    def __init__(self, photos: Sequence[Path], *, crops_per_photo: int = 4, seed: int = 0) -> None:
        self.photos = tuple(photos)
        self.crops_per_photo = crops_per_photo
        self.seed = seed

    def __iter__(self) -> Iterator[ImageU8]:
        seen: set[bytes] = set()
        for image in self._views():
            # Scaled views of one content would look alike to the network, so the shape is no part of the identity.
            key = hashlib.sha256(image.tobytes()).digest()
            if key not in seen:
                seen.add(key)
                yield image

    def _views(self) -> Iterator[ImageU8]:
        rng = np.random.default_rng(self.seed)
        for path in self.photos:
            image = read_image(path)
            yield image
            yield np.ascontiguousarray(image[:, ::-1])
            height, width = image.shape[:2]
            for _ in range(self.crops_per_photo):
                share = rng.uniform(0.45, 0.85)
                rows, columns = max(1, int(height * share)), max(1, int(width * share))
                top = int(rng.integers(0, height - rows + 1))
                left = int(rng.integers(0, width - columns + 1))
                yield np.ascontiguousarray(image[top : top + rows, left : left + columns])
