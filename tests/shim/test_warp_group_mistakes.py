"""The simulator finds each mistake in the use of Hopper's features."""

from __future__ import annotations

import numpy as np
import pytest

from tests.shim.shim import Builder, Fault
from tests.shim.warp_group import (
    ALONE,
    BYTES,
    LOADED,
    PIPELINE,
    WAIT,
    finds_mistakes,
    finds_races,
    probe,
    run,
)

# Mistakes that fail in every order of execution.
MISTAKES = {
    "arrival missing": (
        PIPELINE % (WAIT + "multiply(c); ptx::wgmma_wait<0>(); if (warp != 6) release();"),
        r"deadlock; thread 0 waits in mbarrier_wait\(\d+\) for parity 0: phase 0 lacks 1 of 4",
    ),
    "too many bytes expected": (
        f"if (thread == 0) load(s.a, {BYTES + 16}); ptx::mbarrier_wait(&s.full, 0);",
        "lacks 0 of 1 arrivals and 16 bytes",
    ),
    "too few bytes expected": (
        f"if (thread == 0) load(s.a, {BYTES - 16}); ptx::mbarrier_wait(&s.full, 0);",
        "16 bytes came that nobody announced",
    ),
    "one arrival too many": (
        f"if (thread == 0) {{ load(s.a, {BYTES}); ptx::mbarrier_arrive(&s.full); }}",
        "phase 0 of the mbarrier at byte 16384 has its 1 arrivals already|"
        "deadlock",
    ),
    "wrong parity": (
        f"if (thread == 0) load(s.a, {BYTES}); ptx::mbarrier_wait(&s.full, 0);"
        "if (thread == 9) ptx::mbarrier_wait(&s.full, 1);",
        "deadlock; .*thread 9 waits in mbarrier_wait",
    ),
    "barrier not initialised": (
        "ptx::mbarrier_wait(&s.none, 0);",
        "the mbarrier at byte 16400 is not initialised",
    ),
    "barrier overwritten": (
        "if (thread == 0) { s.full = 0; ptx::mbarrier_wait(&s.full, 0); }",
        "the mbarrier at byte 16384 was overwritten",
    ),
    "barrier initialised twice": (
        "if (thread == 0) ptx::mbarrier_init(&s.full, 1);",
        "is initialised already",
    ),
    "barrier without a fence": (
        "if (thread == 0) { ptx::mbarrier_init(&s.none, 1);"
        "ptx::copy_tensor_5d(s.a, &map, &s.none, 0, 0, 0, 0, 0); }",
        "no fence_mbarrier_init",
    ),
    "barrier without a block_sync": (
        "if (thread == 0) ptx::mbarrier_init(&s.none, 1); else ptx::mbarrier_wait(&s.none, 0);",
        "no block_sync since thread 0 initialised|is not initialised",
    ),
    "copy not aligned": (f"if (thread == 0) load(s.a + 128, {BYTES});", "multiples of 1024"),
    "copy past the end": (
        f"if (thread == 0) load(s.a + 2 * {BYTES}, {BYTES});",
        "at byte 16384 of 17408",
    ),
    "two copies to one address": (
        "if (thread == 0) { ptx::copy_tensor_5d(s.a, &map, &s.full, 0, 0, 0, 0, 0);"
        f"load(s.a, 2 * {BYTES}); ptx::mbarrier_wait(&s.full, 0); }}",
        "another copy to bytes 0 to 8192",
    ),
    "write under a copy": (
        f"if (thread == 0) {{ load(s.a, {BYTES}); s.a[77] = 1; }} ptx::mbarrier_wait(&s.full, 0);",
        "byte 77 of shared memory was written while a copy",
    ),
    "product never waited for": (LOADED + "multiply(c);", "products that were never waited for"),
    "product never committed": (
        LOADED + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, a, 0); }",
        "a product that was never committed",
    ),
    "product without a fence": (
        LOADED + "{ W::ss<K, K>(c, a, a, 0); ptx::wgmma_commit(); ptx::wgmma_wait<0>(); }",
        "no wgmma_fence",
    ),
    "accumulator written": (
        LOADED + "{ multiply(c); c[0].x[3] = 1.0f; ptx::wgmma_wait<0>(); }",
        "an accumulator was written",
    ),
    "registers of A written": (
        LOADED + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, a, 0); W::rs<MN>(c, registers, a);"
        "ptx::wgmma_commit(); registers.x[2].bits = 1; ptx::wgmma_wait<0>(); }",
        "A was written",
    ),
    "another operand in one warp": (
        LOADED + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, warp == 5 ? a + 2 : a, 0);"
        "ptx::wgmma_commit(); ptx::wgmma_wait<0>(); }",
        "warps of one warpgroup diverged: wgmma where another warp did wgmma, or with other operands",
    ),
    "another operand in one thread": (
        LOADED + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, thread == 133 ? a + 2 : a, 0);"
        "ptx::wgmma_commit(); ptx::wgmma_wait<0>(); }",
        "threads 128 and 133 asked for different products",
    ),
    "a warp stays away": (
        LOADED + "if (warp != 7) { multiply(c); ptx::wgmma_wait<0>(); }",
        "wave 7 did not come to wgmma",
    ),
    "a thread stays away": (
        LOADED + "if (thread != 200) { multiply(c); ptx::wgmma_wait<0>(); }",
        "threads of one wave diverged: .*wgmma_commit.*thread 200 has exited",
    ),
    "operand not aligned": (
        ALONE + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, a + 8, 0); ptx::wgmma_commit();"
        "ptx::wgmma_wait<0>(); }",
        "starts inside of 1024 bytes",
    ),
    "operand too wide": (
        ALONE + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, a + 7, 0); ptx::wgmma_commit();"
        "ptx::wgmma_wait<0>(); }",
        "reaches beyond its 128 bytes",
    ),
    "another transposition in one warp": (
        LOADED + "{ ptx::wgmma_fence(); if (warp == 5) W::ss<K, K>(c, a, a, 0);"
        "else W::ss<K, MN>(c, a, a, 0); ptx::wgmma_commit(); ptx::wgmma_wait<0>(); }",
        "warps of one warpgroup diverged: wgmma where another warp did wgmma, or with other operands",
    ),
    "transposed operand too wide": (
        ALONE + "{ ptx::wgmma_fence(); W::ss<MN, K>(c, a + 1, a, 0); ptx::wgmma_commit();"
        "ptx::wgmma_wait<0>(); }",
        "the width of an operand reaches beyond its 128 bytes",
    ),
    "operand past the end": (
        ALONE + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, a + 2048, 0); ptx::wgmma_commit();"
        "ptx::wgmma_wait<0>(); }",
        "wgmma: 1024 bytes at byte 32768 of 17408",
    ),
    "descriptor overflows": (
        ALONE + "{ ptx::wgmma_fence(); W::ss<K, K>(c, a, a + 0x4000, 0); ptx::wgmma_commit();"
        "ptx::wgmma_wait<0>(); }",
        "a field has grown into the next one",
    ),
    "barrier that too few come to": (
        "if (group == 1) ptx::barrier_sync(3, 256); else ptx::barrier_sync(2, 128);",
        r"deadlock.* waits in barrier_sync\(3\): 128 of 256 threads came",
    ),
    "barrier with two counts": (
        "if (group == 1) ptx::barrier_sync(3, warp == 5 ? 96 : 128);",
        "some count",
    ),
    "barrier arrived at twice": (
        "if (group == 1) { ptx::barrier_arrive(3, 256); ptx::barrier_arrive(3, 256); }",
        "wave [4-7] arrives again",
    ),
    "registers in one warp": (
        "if (warp == 5) ptx::setmaxnreg_inc<64>();",
        "wave 4 did not come to setmaxnreg_inc",
    ),
    "registers in one thread": (
        "if (thread == 129) ptx::setmaxnreg_inc<64>();",
        "threads of one wave diverged: .*thread 129 waits in setmaxnreg_inc",
    ),
    "too many registers": (
        "if (group == 0) ptx::setmaxnreg_inc<256>(); else ptx::setmaxnreg_inc<264 - 8>();"
        "if (group == 1) ptx::setmaxnreg_inc<256>(); else ptx::setmaxnreg_inc<264>();",
        r"setmaxnreg_inc\(264\)",
    ),
    "early without a wait": (
        "target::launch_dependents(); if (thread != 77) target::wait_for_prior_kernels();",
        "exits before it waited for prerequisites",
    ),
    "copy before the wait": (
        "target::launch_dependents();"
        f"if (thread == 0) load(s.a, {BYTES}); ptx::mbarrier_wait(&s.full, 0);"
        "target::wait_for_prior_kernels();",
        "copy_tensor before it waited for prerequisites",
    ),
    "group not uniform": ("target::wave_uniform(lane / 16);", "wave_uniform of 0 in lane 0"),
}  # fmt: skip

test_mistakes_are_found = finds_mistakes(MISTAKES, probe, run)


@pytest.mark.parametrize("corner", [(0, 64), (0, -64), (64, 0)])
def test_a_box_wholly_outside(corner: tuple[int, int], builder: Builder) -> None:
    """A box wholly outside the tensor gives zeros, but a fault if the map begins before its array: a GPU touches its origin."""
    body = f"""
      if (thread == 0) {{
        ptx::mbarrier_arrive_expect(&s.full, {BYTES});
        ptx::copy_tensor_5d(s.a, &map, &s.full, {corner[0]}, {corner[1]}, 0, 0, 0);
      }}
      ptx::mbarrier_wait(&s.full, 0);
    """
    kernel = probe(builder, body)
    run(kernel)
    with pytest.raises(Fault, match="the map's origin, -128 bytes from the array"):
        run(kernel, origin=-128)


# Races that show in some orders of execution, with the only messages that they may have.
RACES = {
    "released before the wait": (
        PIPELINE % (WAIT + "multiply(c); release(); ptx::wgmma_wait<0>();"),
        "are the operand of a product under way",
    ),
    "not waited for": (
        PIPELINE % ("multiply(c); ptx::wgmma_wait<0>(); release();"),
        "wgmma: a copy to bytes .* is under way|operand of a product|deadlock|arrivals already",
    ),
    "waited for once": (
        PIPELINE % ("ptx::mbarrier_wait(&s.full, 0); multiply(c); ptx::wgmma_wait<0>(); release();"),
        "wgmma: a copy to bytes .* is under way|operand of a product under way|deadlock",
    ),
    "copy under way at the end": (
        f"if (thread == 0) load(s.a, {BYTES}); for (int i = thread; i < 1024; i += 256) p.y[i] = 0;",
        "ends while 1 copies are under way",
    ),
}  # fmt: skip

test_races_are_found = finds_races(
    RACES, probe, run, wrong=lambda y: bool(np.isnan(y[:1024]).any())
)
