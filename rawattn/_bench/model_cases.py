"""Shapes of attention in models: encoders of text and images, diffusion, prefill of language models."""

from __future__ import annotations

from typing import NamedTuple

from rawattn._bench import counters


class Model(NamedTuple):
    """One attention call of a batch whose sequences have equal lengths."""

    kind: str
    batch: int
    rows: int
    keys: int
    nheads_q: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    causal: bool = False

    @property
    def name(self) -> str:
        length = f"{self.rows}" if self.rows == self.keys else f"{self.rows} rows on {self.keys}"
        of_v = "" if self.headdim == self.headdim_v else f" Dv{self.headdim_v}"
        heads = f"{self.nheads_q}/{self.nheads_kv} D{self.headdim}{of_v}"
        mask = "causal" if self.causal else "full"
        return f"{self.kind} {self.batch} x {length} {heads} {mask}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v."""
        return (
            (self.batch, self.rows, self.nheads_q, self.headdim),
            (self.batch, self.keys, self.nheads_kv, self.headdim),
            (self.batch, self.keys, self.nheads_kv, self.headdim_v),
        )

    @property
    def nbytes(self) -> int:
        """The least bytes to read and write, with elements of 16 bits."""
        seen = counters.visible(self.rows, self.keys, causal=self.causal)
        heads = self.nheads_q, self.nheads_kv, self.headdim, self.headdim_v
        return self.batch * counters.forward_bytes(seen, self.rows, *heads, itemsize=2)


CASES = (
    Model("encoder", 64, 128, 128, 12, 12, 64, 64),
    Model("encoder", 128, 128, 128, 16, 16, 64, 64),
    Model("encoder", 32, 384, 384, 12, 12, 64, 64),
    Model("encoder", 16, 512, 512, 16, 16, 64, 64),
    Model("encoder", 64, 128, 128, 16, 16, 128, 128),
    # Vision transformers: 14 x 14, 16 x 16 or 24 x 24 patches and a class token. The last is SigLIP so400m: 27 x 27 patches.
    Model("vision", 64, 197, 197, 12, 12, 64, 64),
    Model("vision", 32, 257, 257, 16, 16, 64, 64),
    Model("vision", 32, 577, 577, 16, 16, 64, 64),
    Model("vision", 32, 729, 729, 16, 16, 72, 72),
    # Two of SDXL, then FLUX, then SD3.5.
    Model("diffusion", 2, 4096, 4096, 10, 10, 64, 64),
    Model("diffusion", 2, 1024, 1024, 20, 20, 64, 64),
    Model("diffusion", 1, 4608, 4608, 24, 24, 128, 128),
    Model("diffusion", 2, 4250, 4250, 24, 24, 64, 64),
    # Cross-attention of images to the tokens of their text.
    Model("cross", 2, 4096, 77, 10, 10, 64, 64),
    Model("cross", 4, 1024, 80, 16, 16, 128, 128),
    Model("cross", 2, 4096, 333, 24, 24, 64, 64),
    # MLA with decompressed heads.
    Model("MLA", 2, 2048, 2048, 16, 16, 192, 128, causal=True),
    Model("MLA", 1, 8192, 8192, 16, 16, 192, 128, causal=True),
    # Lengths that no tile divides, and head dim 96.
    Model("odd", 3, 1777, 1777, 32, 8, 128, 128, causal=True),
    Model("odd", 7, 509, 509, 32, 8, 128, 128, causal=True),
    Model("odd", 1, 3001, 3001, 16, 2, 128, 128, causal=True),
    Model("odd", 4, 1000, 1000, 32, 32, 96, 96, causal=True),
    # Drafts of speculative decoding, and the latent queries of a resampler.
    Model("few rows", 1, 40, 4771, 16, 2, 128, 128),
    Model("few rows", 2, 76, 6813, 8, 8, 256, 256),
    Model("few rows", 1, 200, 4000, 32, 8, 64, 64, causal=True),
    # The heads of one GPU under tensor parallelism over many GPUs.
    Model("few heads", 1, 16384, 16384, 2, 2, 128, 128),
    Model("LLM", 1, 1024, 1024, 32, 8, 128, 128, causal=True),
    Model("LLM", 1, 2048, 2048, 32, 8, 128, 128, causal=True),
    Model("LLM", 4, 1024, 1024, 32, 8, 64, 64, causal=True),
)
