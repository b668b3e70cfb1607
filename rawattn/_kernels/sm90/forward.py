"""Host twin of kernels_cu/sm90/forward.cu: which calls it takes, and the configuration of each."""

from __future__ import annotations

import math
from dataclasses import replace

from rawattn._call.problem import Problem
from rawattn._kernels import features
from rawattn._kernels.operands import Operands, access_bytes
from rawattn._kernels.sm90 import forward_fit as fit
from rawattn._kernels.sm90 import query_tiles, stream_k, tile_choice, tma
from rawattn._kernels.sm90.forward_config import MOST_MASKED_KEYS, Config
from rawattn._kernels.sm90.tma import MAX_PAGES, MAX_ROWS
from rawattn._kernels.target import Target

ARCH = "sm_90a"
FEATURES = features.names()

# Few query rows on cached keys, in pairs of blocks: the most tiles of the heads that share one, the head dim from which on
# there may be more of them, and the least number of all tiles for each SM (docs/notes/hopper-forward.md).
_MOST_TILES_IN_PAIRS, _WIDE_PAIRS, _PAIRS_FILL = 6, 192, 0.9

# The least seqlen_k for which it pays to copy those of q, k and v that TMA cannot read as they lie
# (docs/notes/hopper-forward.md).
ALIGN_SEQLEN = 1024

# The largest head dim at which there are registers for a mask of keys beside a left window.
_KEY_MASK_WINDOW_MAX_HEADDIM = 192

# The most registers of a consumer's thread where a block has two consumers and keys are in pages. The producer needs the rest:
# to look up pages, and more where its lanes also copy rows of up to 128 columns. Beyond 128 columns consumers cannot spare
# as many, and a key tile has fewer rows to copy.
_CONSUMER_REGISTERS_PAGED, _CONSUMER_REGISTERS_PAGED_ROWS = 224, 208


def supports(problem: Problem, target: Target, operands: Operands) -> str | None:
    """Why a call is not for this kernel, else None."""
    if target.arch != ARCH:
        return f"it is for {ARCH}, not {target.arch}"
    if problem.dtype == "float32":
        return "its products take 16-bit elements"
    copied = tma.unaligned(problem, operands)
    if copied and not _aligning_pays(problem, operands):
        return f"{', '.join(copied)} would be copied for TMA, and that does not pay"
    if min(problem.batch, problem.rows_q, problem.rows_k) == 0:
        return "an array is empty"
    if problem.num_splits is not None and problem.num_splits > 1:
        return "it splits no keys on request"
    if problem.rows_q > MAX_ROWS or (problem.pages is None and problem.rows_k > MAX_ROWS):
        return f"an array has more than {MAX_ROWS} rows"
    if (reason := _pages_refused(problem, operands)) is not None:
        return reason
    for name in tma.loaded(problem):
        if not tma.mappable(problem, name, operands):
            return f"a tensor map cannot have the strides of {name}"
    return None


def _pages_refused(problem: Problem, operands: Operands) -> str | None:
    """Why keys in pages are not for this kernel, else None."""
    form = problem.pages
    if form is None:
        return None
    if not 0 < form.num_pages < MAX_PAGES:
        return f"a tensor map has from 1 to {MAX_PAGES} pages"
    if tma.copies_rows(problem) and not tma.page_offsets_fit_32_bits(problem, operands):
        return f"pages of {form.page_size} keys lie further apart than rows are found"
    return None


def choose(problem: Problem, target: Target, operands: Operands) -> Config:
    """The configuration for a problem that it supports."""
    if masks_keys(problem):
        plain = choose(replace(problem, mask=None), target, operands)
        return replace(plain, key_mask=True, cluster=1)
    fields, split_keys = tile_choice.choose(problem, target)
    between = operands.strides.get("out", ())[:-1]
    store_bytes = access_bytes(problem.headdim_v * 2, operands.pointers, *between)
    if (
        problem.max_seqlen_q < tile_choice.LONG_SEQLEN
        or problem.mask is not None
        or problem.pages is not None
    ):
        # With few queries the last block of a cluster has no rows and occupies an SM all the same. Under a mask the
        # blocks of a cluster would visit each other's key tiles. Boxes of pages are too small to be divided among blocks.
        fields["cluster"] = 1
    if problem.pages is not None and fields["consumers"] == 2:
        copies = tma.copies_rows(problem) and max(problem.headdim, problem.headdim_v) <= 128
        most = _CONSUMER_REGISTERS_PAGED_ROWS if copies else _CONSUMER_REGISTERS_PAGED
        fields["consumer_registers"] = min(fields["consumer_registers"], most)
    # Stores by TMA pay where tiles are stored often: in ragged batches and under masks. Other calls gain nothing by them.
    # Where a bias stands beside the mask, its slots need the shared memory more.
    often = problem.ragged or (problem.mask is not None and problem.bias is None)
    storable = store_bytes == 16 and tma.mappable(problem, "out", operands)
    fields["tensor_stores"] &= often and storable
    known = features.features(problem, operands).known_to(Config)
    fields["late_scaling"] &= not known["bias"]
    config = Config(
        element=problem.dtype,
        headdim=problem.headdim,
        headdim_v=problem.headdim_v,
        **fields,
        **known,
        store_bytes=store_bytes,
        stream_k=split_keys,
    )
    config = fit.with_heads(fit.with_room(config, target), problem)
    config = fit.with_bias(config, problem, target, operands)
    if problem.pages is not None:
        copied = tma.copies_rows(problem)
        config = replace(
            config,
            page_rows=1 if copied else math.gcd(problem.pages.page_size, config.tile_k),
            whole_rows=not copied and tma.page_strides_in_heads(problem, operands) is not None,
        )
    if _works_in_pairs(problem, config, target):
        config = replace(config, cluster=2)
    return fit.with_ramp(fit.with_query_slots(config, problem, target), problem, target)


def _works_in_pairs(problem: Problem, config: Config, target: Target) -> bool:
    """Whether pairs of blocks load keys for each other, for few query rows that meet many cached keys.

    Two tiles of the same heads make a pair. The last tile often has few rows, for which alone its keys would come. No tile may
    be left over, and pairs must fill the GPU.
    """
    plain = problem.plain_scores and problem.mask is None and problem.window_left is None
    if problem.ragged or problem.pages is not None or not plain:
        return False
    if config.stream_k or config.interleaved or config.blocks_per_sm > 1:
        return False
    if problem.max_seqlen_k < tile_choice.LONG_SEQLEN or not query_tiles.alike(problem):
        return False
    tiles = -(-problem.rows_q // config.tile_q)
    wide = max(problem.headdim, problem.headdim_v)
    if tiles % 2 or wide <= 64 or (tiles > _MOST_TILES_IN_PAIRS and wide < _WIDE_PAIRS):
        return False
    if config.consumers == 2 and wide <= 128:  # registers are spilled
        return False
    count = query_tiles.count(problem, config.tile_rows, config.heads_per_tile)
    return count >= _PAIRS_FILL * target.multiprocessors


def masks_keys(problem: Problem) -> bool:
    """Whether the kernel reads a mask's bools itself, so that no earlier launch makes bits and lists of tiles.

    It does for bools that differ by sequence and key alone and lie side by side, in a dense call of few keys where nothing
    else changes scores or drops probabilities. Learned sinks may be there. With more keys query tiles may be split by keys,
    for which the number of key tiles must be known beforehand. Beside lengths, and beside a left window at large head dims,
    there are no registers left.
    """
    form = problem.mask
    if form is None or form.dtype != "bool" or form.shape[1:3] != (1, 1) or form.shape[3] == 1:
        return False
    if not form.dense:
        return False
    wide = max(problem.headdim, problem.headdim_v) > _KEY_MASK_WINDOW_MAX_HEADDIM
    if problem.ragged or (problem.window_left is not None and wide):
        return False
    most = min(MOST_MASKED_KEYS, stream_k.LEAST_KEYS)
    return problem.plain_scores and problem.max_seqlen_k < most


def _aligning_pays(problem: Problem, operands: Operands) -> bool:
    if problem.pages is not None:
        return False  # all pages of the cache would be copied, though a call reads some of them
    # Otherwise the portable kernel takes the call. Copies of 2 bytes each cost that kernel most of its speed.
    return problem.max_seqlen_k >= ALIGN_SEQLEN or operands.copy_bytes(problem) == 2
