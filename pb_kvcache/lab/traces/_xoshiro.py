"""The random numbers of the synthetic traces: the same bits everywhere."""

from __future__ import annotations


class Xoshiro128:
    """xoshiro128** filled by splitmix32: the generator of `decode-4096`, and of the funnels."""

    def __init__(self, seed: int) -> None:
        self._state = []
        for _ in range(4):
            seed = (seed + 0x9E3779B9) & 0xFFFFFFFF
            z = seed
            z = ((z ^ (z >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
            z = ((z ^ (z >> 15)) * 0x735A2D97) & 0xFFFFFFFF
            self._state.append(z ^ (z >> 15))

    def next(self) -> int:
        """Return 32 bits."""
        s = self._state
        x = (s[1] * 5) & 0xFFFFFFFF
        result = (((x << 7) | (x >> 25)) * 9) & 0xFFFFFFFF
        shifted = (s[1] << 9) & 0xFFFFFFFF
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = ((s[3] << 11) | (s[3] >> 21)) & 0xFFFFFFFF
        return result

    def below(self, bound: int) -> int:
        """Return an integer below `bound`, all equally likely. Draws below 2**32 modulo `bound` are thrown away."""
        threshold = (2**32 - bound) % bound
        while True:
            value = self.next()
            if value >= threshold:
                return value % bound
