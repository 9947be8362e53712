"""Colour jitter and lighting as fb.resnet.torch has them; Goyal does not mention either: options."""
import numpy as np

GREY = np.array([0.299, 0.587, 0.114], np.float32)
# of ImageNet's colours; the noise goes along these three axes (AlexNet's "PCA" augmentation)
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045], np.float32)
EIGENVECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140],
                         [-0.5836, -0.6948, 0.4203]], np.float32)


def recolour(pixels: np.ndarray, rng: np.random.Generator, jitter: float, lighting: float) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8: brightness, contrast and saturation by 1 +- jitter in random order,
    then one random shift of the colour. Clipped to 8 bits, which fb.resnet.torch's floats are not."""
    if not jitter and not lighting:
        return pixels
    x = pixels.astype(np.float32) / 255
    for which in rng.permutation(3) if jitter else ():
        alpha = np.float32(1 + rng.uniform(-jitter, jitter))
        grey = (x @ GREY)[..., None]
        base = (np.float32(0), grey.mean(), grey)[which]  # of brightness, contrast, saturation
        x = x * alpha + base * (1 - alpha)
    if lighting:
        x = x + EIGENVECTORS @ (rng.normal(0, lighting, 3).astype(np.float32) * EIGENVALUES)
    return np.rint(x.clip(0, 1) * 255).astype(np.uint8)
