"""A disk on which everything can go wrong, for engines that keep blocks there."""

import random
import time

from pagedjax.engine import disk_tier


class FaultyDisk(disk_tier.FileIO):
    """A share of its operations fails, and as many writes are torn without a word.

    Args:
        seed: the same seed gives the same faults to the same operations.
        share: of either kind of fault.
        slowness: each operation takes up to so many seconds.
    """

    def __init__(self, seed, *, share, slowness=0.0):
        self.rng = random.Random(seed)
        self.share = share
        self.slowness = slowness

    def write(self, path, parts):
        self._suffer()
        if self.rng.random() < self.share:  # a disk that lies about what it has stored
            parts = [bytes(part)[: self.rng.randrange(200)] for part in parts]
        super().write(path, parts)

    def rename(self, source, target):
        self._suffer()
        super().rename(source, target)

    def read(self, path):
        self._suffer()
        return super().read(path)

    def delete(self, path):
        self._suffer()
        super().delete(path)

    def _suffer(self):
        time.sleep(self.rng.random() * self.slowness)
        if self.rng.random() < self.share:
            raise OSError(self.rng.choice([5, 28, 30]), "injected")
