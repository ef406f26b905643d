"""Images a second that the ImageNet task delivers, from files like ImageNet's in a temporary folder.

Run: python benchmarks/loader.py --workers 1 2 --seconds 20
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy
import torch
from PIL import Image

from avagrad.lab.tasks.imagenet import ImageNet


def write_images(root: Path, count: int, width: int, height: int) -> float:
    """Write images of smooth noise, eight again and again at several qualities, and return their mean size in kB."""
    noise = numpy.random.default_rng(0)
    layers = []
    for _ in range(8):
        total = numpy.zeros((height, width, 3))
        for scale, weight in ((64, 40), (16, 25), (4, 16), (1, 20)):
            coarse = noise.normal(128, 60, (height // scale + 1, width // scale + 1, 3)).clip(0, 255)
            layer = Image.fromarray(coarse.astype(numpy.uint8)).resize((width, height), Image.Resampling.BICUBIC)
            total += weight * (numpy.asarray(layer) / 60.0 - 128 / 60)
        layers.append(Image.fromarray((total + 128).clip(0, 255).astype(numpy.uint8)))
    total_size = 0
    for i in range(count):
        path = root / ("val" if i < 2 else "train") / str(i % 2) / f"{i}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        layers[i % len(layers)].save(path, quality=88 + i // len(layers) % 5)
        total_size += path.stat().st_size
    return total_size / count / 1000


def main() -> None:
    """Write the images, and read them with each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of workers")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--height", type=int, default=375)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kilobytes = write_images(Path(folder), given.images, given.width, given.height)
        print(f"{given.images} images of {given.width} x {given.height}, {kilobytes:.0f} kB each, on {given.device}")
        for workers in given.workers:
            task = ImageNet(data=folder, batch_size=given.batch_size, workers=workers, device=given.device)
            # A worker has read two batches ahead by the time that the first few are here: count after those.
            warm, steps, began, now = 2 * workers + 1, 0, 0.0, 0.0
            while steps <= warm or now - began < given.seconds:
                epoch, index = divmod(steps, task.steps_per_epoch)
                if index == 0:
                    order = task.order(epoch)
                images, _ = task.batch(order, index)
                images[0, 0, 0, 0].item()  # wait for the device
                steps, now = steps + 1, time.perf_counter()
                if steps == warm:
                    began = now
            print(f"workers {workers}: {(steps - warm) * given.batch_size / (now - began):.0f} images/s")


if __name__ == "__main__":
    main()
