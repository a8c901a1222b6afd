"""Degrade a camera's images as a bad sensor would: outside the simulator, without any state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .perturbations import Draw

Image = NDArray[np.uint8]

KINDS = ("motion_blur", "gaussian_blur", "zoom_blur", "glass_blur", "fog", "gaussian_noise", "jpeg")
PUBLISHED_SIZE = 256
"""Image size (pixels) in which blur is measured; it scales with the size of the image."""
NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
"""Standard deviation of Gaussian noise, as a share of 255: ImageNet-C (arXiv 1903.12261)."""
QUALITY = (25, 18, 15, 10, 7)
"""JPEG quality: ImageNet-C."""
GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
"""Glass: standard deviation of two blurs and largest displacement between them (pixels), and how
often pixels are displaced: ImageNet-C."""
FOG = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))
"""Fog: its most against the image, and how much less each finer octave contributes: ImageNet-C."""


class SensorNoise:
    """The degradation of one episode's images; a function of the image and the control step."""

    def __init__(self, drawn: Draw) -> None:
        random = drawn.random
        self.kind = KINDS[random.randint(len(KINDS))]
        self._severity = drawn.severity
        self._angle = float(random.uniform(-45, 45))
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
            self._pixels(image, amount)
            for amount in (
                (8, 12, 18, 25, 35)[self._severity - 1],
                (3, 5, 8, 12, 20)[self._severity - 1],
            )
        )
        reach = max(1, round(length))
        kernel = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
        for distance in range(reach + 1):
            row = distance * np.sin(np.deg2rad(self._angle))
            column = distance * np.cos(np.deg2rad(self._angle))
            kernel[reach + round(row), reach + round(column)] += np.exp(
                -0.5 * (distance / sigma) ** 2
            )
        return _bytes(
            cv2.filter2D(
                image.astype(np.float32), -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE
            )
        )

    def _gaussian_blur(self, image: Image, step: int) -> Image:
        return _bytes(self._blurred(image, 2 * self._severity))

    def _blurred(self, image: NDArray[Any], sigma: float) -> NDArray[Any]:
        import cv2

        return cv2.GaussianBlur(
            image.astype(np.float32),
            (0, 0),
            self._pixels(image, sigma),
            borderType=cv2.BORDER_REPLICATE,
        )

    def _glass_blur(self, image: Image, step: int) -> Image:
        """Blur, take each pixel from a place nearby, and blur; the glass stays the same."""
        sigma, reach, times = GLASS[self._severity - 1]
        random = np.random.RandomState(self._seed)
        blurred = self._blurred(image, sigma)
        most = max(1, round(self._pixels(image, reach)))
        (height, width) = image.shape[:2]
        for _ in range(times):
            rows, columns = np.indices((height, width)) + random.randint(
                -most, most + 1, (2, height, width)
            )
            blurred = blurred[rows.clip(0, height - 1), columns.clip(0, width - 1)]
        return _bytes(self._blurred(blurred, sigma))

    def _fog(self, image: Image, step: int) -> Image:
        """Add a cloud of octaves of smooth noise, and darken the whole by as much; it stays."""
        import cv2

        amount, decay = FOG[self._severity - 1]
        random = np.random.RandomState(self._seed)
        (height, width) = image.shape[:2]
        octaves = int(np.log2(max(2, min(height, width))))
        cloud: Any = sum(
            cv2.resize(
                random.uniform(size=(2**octave + 1,) * 2) * decay**-octave,
                (width, height),
                interpolation=cv2.INTER_LINEAR,
            )
            for octave in range(1, octaves + 1)
        )
        cloud = (cloud - cloud.min()) / np.ptp(cloud)
        brightest = max(float(image.max()), 1.0)
        return _bytes(
            (image + 255 * amount * cloud[..., None]) * brightest / (brightest + 255 * amount)
        )

    def _zoom_blur(self, image: Image, step: int) -> Image:
        """Average of the image and enlarged copies of it, up to 1.15 ... 1.55 times its size."""
        import cv2

        size = image.shape[0]
        factors = np.linspace(1, 1.05 + 0.1 * self._severity, 15)
        middle = (size - 1) / 2
        moved = [
            np.array([[factor, 0, middle * (1 - factor)], [0, factor, middle * (1 - factor)]])
            for factor in factors
        ]
        copies: list[Any] = [
            cv2.warpAffine(image.astype(np.float32), matrix, (size, size), flags=cv2.INTER_LINEAR)
            for matrix in moved
        ]
        return _bytes(np.mean(copies, axis=0))

    def _gaussian_noise(self, image: Image, step: int) -> Image:
        random = np.random.RandomState([self._seed, step])
        return _bytes(image + random.normal(size=image.shape) * NOISE[self._severity - 1] * 255)

    def _jpeg(self, image: Image, step: int) -> Image:
        import cv2

        _, file = cv2.imencode(
            ".jpg",
            np.ascontiguousarray(image[..., ::-1]),
            [cv2.IMWRITE_JPEG_QUALITY, QUALITY[self._severity - 1]],
        )
        decoded: Any = cv2.imdecode(file, cv2.IMREAD_COLOR)
        return np.ascontiguousarray(decoded[..., ::-1])


def _bytes(image: NDArray[Any]) -> Image:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)
