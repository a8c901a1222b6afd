"""Degrade a camera's images as a bad sensor would: outside the simulator, without any state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .perturbations import Draw

Image = NDArray[np.uint8]

KINDS = ("motion_blur", "gaussian_blur", "zoom_blur", "gaussian_noise", "jpeg")
PUBLISHED_SIZE = 256
"""Image size (pixels) in which blur is measured; it scales with the size of the image."""
NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
"""Standard deviation of Gaussian noise, as a share of 255: ImageNet-C (arXiv 1903.12261)."""
QUALITY = (25, 18, 15, 10, 7)
"""JPEG quality: ImageNet-C."""


class SensorNoise:
    """The degradation of one episode's images; a function of the image and the control step."""

    def __init__(self, drawn: Draw) -> None:
        random = drawn.random
        self.kind = KINDS[random.randint(len(KINDS))]
        self._severity, self._angle = drawn.severity, float(random.uniform(-45, 45))
        self._seed = random.randint(2**31)

    def __call__(self, image: Image, step: int) -> Image:
        """Return ``image`` ``[H, W, 3]``, degraded. ``step`` draws noise that differs in time."""
        degraded: Image = getattr(self, f"_{self.kind}")(image, step)
        return degraded

    def _pixels(self, image: Image, at_published_size: float) -> float:
        return at_published_size * image.shape[0] / PUBLISHED_SIZE

    def _motion_blur(self, image: Image, step: int) -> Image:
        """Average along a line, weighted as a Gaussian to one side, as ImageMagick does it."""
        import cv2

        length, sigma = (
            self._pixels(image, each) for each in ((8, 12, 18, 25, 35)[self._severity - 1], (3, 5, 8, 12, 20)[self._severity - 1])
        )
        reach = max(1, round(length))
        kernel = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
        for distance in range(reach + 1):
            row, column = distance * np.sin(np.deg2rad(self._angle)), distance * np.cos(np.deg2rad(self._angle))
            kernel[reach + round(row), reach + round(column)] += np.exp(-0.5 * (distance / sigma) ** 2)
        return _bytes(cv2.filter2D(image.astype(np.float32), -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE))

    def _gaussian_blur(self, image: Image, step: int) -> Image:
        import cv2

        blurred = cv2.GaussianBlur(
            image.astype(np.float32), (0, 0), self._pixels(image, 2 * self._severity), borderType=cv2.BORDER_REPLICATE
        )
        return _bytes(blurred)

    def _zoom_blur(self, image: Image, step: int) -> Image:
        """Average of the image and enlarged copies of it, up to 1.15 ... 1.55 times its size."""
        import cv2

        size = image.shape[0]
        factors = np.linspace(1, 1.05 + 0.1 * self._severity, 15)
        middle = (size - 1) / 2
        moved = [np.array([[factor, 0, middle * (1 - factor)], [0, factor, middle * (1 - factor)]]) for factor in factors]
        copies: list[Any] = [cv2.warpAffine(image.astype(np.float32), each, (size, size), flags=cv2.INTER_LINEAR) for each in moved]
        return _bytes(np.mean(copies, axis=0))

    def _gaussian_noise(self, image: Image, step: int) -> Image:
        random = np.random.RandomState([self._seed, step])
        return _bytes(image + random.normal(size=image.shape) * NOISE[self._severity - 1] * 255)

    def _jpeg(self, image: Image, step: int) -> Image:
        import cv2

        _, file = cv2.imencode(".jpg", np.ascontiguousarray(image[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, QUALITY[self._severity - 1]])
        decoded: Any = cv2.imdecode(file, cv2.IMREAD_COLOR)
        return np.ascontiguousarray(decoded[..., ::-1])


def _bytes(image: NDArray[Any]) -> Image:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)
