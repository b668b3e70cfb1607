"""Clusters in the simulator: blocks run together, access each other's shared memory, and each mistake in that is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.shim.shim import Builder, Fault, Kernel
from tests.shim.warp_group import BYTES, LOADED, SEEDS, THREADS, finds_mistakes, finds_races
from tests.shim.warp_group import probe as probe_one
from tests.shim.warp_group import run as run_one

MEET = "ptx::cluster_sync()"
BOTH = "ptx::copy_tensor_5d<2>(s.a, &map, &s.full, 0, 0, 0, 0, 0);"
EXPECT = f"if (thread == 0) ptx::mbarrier_arrive_expect(&s.full, {BYTES});"


def probe(builder: Builder, body: str, *, sync: str = MEET) -> Kernel:
    rank = "const int rank = ptx::cluster_rank(); const bool first = thread == 0 && rank == 0;"
    return probe_one(builder, f"{rank} {body} (void)rank, (void)first;", sync=sync)


def run(kernel: Kernel, *, seed: int = 1, grid: int = 2, **knobs: Any) -> Any:
    return run_one(kernel, seed=seed, grid=grid, cluster=2, **knobs)


def test_blocks_of_their_own(builder: Builder) -> None:
    """Each block of a cluster has its own threads, shared memory and named barriers."""
    body = """
      const unsigned mine = 1 + target::block_index();
      if (thread == 0) s.number = mine;
      if (group == 0) ptx::barrier_sync(1, 128);
      ptx::cluster_sync();
      const unsigned address = target::shared_address(s.a);
      const bool own = s.number == mine && target::block_index() % 2 == rank;
      p.y[target::block_index() * 256 + thread] = own ? thread + address : -1;
      target::block_sync();
    """
    kernel = probe(builder, body)
    for seed in SEEDS:
        y = run(kernel, seed=seed, grid=6)
        expected = np.tile(np.arange(THREADS) + 1024, 6)
        np.testing.assert_array_equal(y[: 6 * THREADS], expected)


def test_blocks_overtake_each_other(builder: Builder) -> None:
    """Between cluster_syncs either block may run ahead of the other, also past a block_sync."""
    body = """
      target::block_sync();
      if (thread == 0) p.y[rank] = p.y[1 - rank] == 1.0f ? 2.0f : 1.0f;
    """
    kernel = probe(builder, body)
    assert {tuple(run(kernel, seed=seed)[:2]) for seed in SEEDS} == {(1.0, 2.0), (2.0, 1.0)}


def test_all_blocks_meet(builder: Builder) -> None:
    body = """
      for (int n = 0; n < 3; n++) {
        p.y[rank * 256 + thread] = n;
        ptx::cluster_sync();
        if (p.y[(1 - rank) * 256 + 255 - thread] != n) p.y[1000] = 1.0f;
        ptx::cluster_sync();
      }
    """
    kernel = probe(builder, body)
    for seed in SEEDS:
        assert np.isnan(run(kernel, seed=seed)[1000])


def test_a_copy_arrives_in_every_block(builder: Builder) -> None:
    """A multicast copy arrives in each block at a time of its own; until then the destination there is NaN."""
    body = f"""
      const float16* const half = reinterpret_cast<const float16*>(s.a);
      if (thread == 0 && rank == 1) {BOTH}
      {EXPECT}
      target::wave_sync();
      if (warp == 1) p.y[32 * rank + lane] = target::to_float(half[lane]);
      ptx::mbarrier_wait(&s.full, 0);
      if (warp == 1) p.y[64 + 32 * rank + lane] = target::to_float(half[lane]);
    """
    kernel = probe(builder, body)
    early = set()
    for seed in SEEDS:
        y = run(kernel, seed=seed)
        early.add((bool(np.isnan(y[0])), bool(np.isnan(y[32]))))
        np.testing.assert_array_equal(y[64:128], 1.0)
    assert early == {(True, True), (True, False), (False, True), (False, False)}


def test_a_copy_for_one_block_stays_there(builder: Builder) -> None:
    body = f"""
      const float16* const half = reinterpret_cast<const float16*>(s.a);
      if (rank == 1) {{
        if (thread == 0) load(s.a, {BYTES});
        ptx::mbarrier_wait(&s.full, 0);
      }}
      ptx::cluster_sync();
      p.y[256 * rank + thread] = target::to_float(half[thread]);
    """
    y = run(probe(builder, body)).reshape(-1, 256)
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], 1.0)


def test_what_is_sent_arrives(builder: Builder) -> None:
    """A sent number arrives before or after the receiver's wait begins; until then the destination is poison."""
    body = """
      if (thread == 0) s.number = 5;
      ptx::cluster_sync();
      if (first) for (int to = 0; to < 2; to++) ptx::send(&s.number, 40 + to, &s.full, to);
      if (thread == 128) p.y[rank] = s.number;
      if (thread == 0) ptx::mbarrier_arrive_expect(&s.full, 4);
      ptx::mbarrier_wait(&s.full, 0);
      p.y[256 + 256 * rank + thread] = s.number;
    """
    kernel = probe(builder, body)
    early = set()
    for seed in SEEDS:
        y = run(kernel, seed=seed)
        early |= set(y[:2])
        np.testing.assert_array_equal(y[256:768], np.repeat([40.0, 41.0], 256))
    assert early == {5.0, np.float32(2**32), 40.0, 41.0}


def test_arrivals_from_another_block(builder: Builder) -> None:
    body = """
      if (group == 1 && lane < 2) ptx::mbarrier_arrive_at(rank == 0 ? &s.empty : &s.none, lane);
      ptx::mbarrier_wait(rank == 0 ? &s.empty : &s.none, 0);
      ptx::mbarrier_wait(rank == 1 ? &s.empty : &s.none, 0);
      p.y[256 * rank + thread] = 1.0f;
      ptx::cluster_sync();
    """
    sync = f"if (thread == 0) ptx::mbarrier_init(&s.none, 4); {MEET}"
    kernel = probe(builder, body, sync=sync)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(kernel, seed=seed)[:512], 1.0)


# Mistakes that fail in every order of execution.
MISTAKES = {
    "one block waits for another": (
        "if (rank == 0) ptx::mbarrier_wait(&s.full, 0); ptx::cluster_sync();",
        r"blocks 0 to 1, deadlock; block 0, thread 0 waits in mbarrier_wait\(16384\) for parity 0: "
        "phase 0 lacks 1 of 1.*block 1, thread 0 waits in cluster_sync",
    ),
    "one block does not come": (
        "if (rank == 0) ptx::cluster_sync();",
        "threads of one cluster diverged: block 0, thread 0 waits in cluster_sync.*"
        "block 1, thread 0 has exited",
    ),
    "some of a block do not come": (
        "if (rank == 0 || group == 0) ptx::cluster_sync();",
        "threads of one block diverged: block 1, thread 0 waits in cluster_sync.*"
        "block 1, thread 128 has exited",
    ),
    "two ways to wait": (
        "if (rank == 0) ptx::cluster_sync(); else { target::block_sync(); ptx::mbarrier_wait(&s.full, 0); }",
        "deadlock; block 0, thread 0 waits in cluster_sync.*block 1, thread 0 waits in mbarrier_wait",
    ),
    "no such block": (
        "if (first) ptx::mbarrier_arrive_at(&s.full, 2);",
        "mbarrier_arrive_at: block 2 of a cluster of 2",
    ),
    "copy to too many blocks": (
        "if (first) ptx::copy_tensor_5d<3>(s.a, &map, &s.full, 0, 0, 0, 0, 0);",
        "copy_tensor: block 2 of a cluster of 2",
    ),
    "one arrival too many": (
        "if (lane == 0 && warp < 3) ptx::mbarrier_arrive_at(&s.empty, 0);"
        "ptx::cluster_sync(); if (first) ptx::mbarrier_wait(&s.empty, 0); ptx::mbarrier_wait(&s.empty, 1);",
        "deadlock",
    ),
    "copy to the operand of another block": (
        f"{LOADED} {{ if (rank == 1) multiply(c); }} ptx::cluster_sync(); if (first) {BOTH}"
        "ptx::cluster_sync(); if (rank == 1 && group == 1) ptx::wgmma_wait<0>();",
        "bytes 0 to 8192 of shared memory are the operand of a product under way",
    ),
    "two copies to one address": (
        "if (thread == 0 && rank == 1) { " + BOTH + f" load(s.a, 2 * {BYTES}); }}"
        "else if (thread == 0) ptx::mbarrier_wait(&s.full, 0);",
        "another copy to bytes 0 to 8192",
    ),
    "sent twice": (
        "if (first) for (int n = 0; n < 2; n++) ptx::send(&s.number, n, &s.full, 1);"
        "if (rank == 1) ptx::mbarrier_wait(&s.full, 0);",
        "send: another copy to bytes 16408 to 16412",
    ),
    "sent too much": (
        "if (thread == 0) { ptx::send(&s.number, 1, &s.full, 1 - rank);"
        "ptx::mbarrier_arrive_expect(&s.full, 8); } ptx::mbarrier_wait(&s.full, 0);",
        "lacks 0 of 1 arrivals and 4 bytes",
    ),
    "sent to no word": (
        "if (first) ptx::send(reinterpret_cast<unsigned*>(s.a + 2), 1, &s.full, 1);",
        "send: 4 bytes at byte 2 of 17408 of shared memory; multiples of 4 are right",
    ),
    "sent without a fence": (
        "if (thread == 0) ptx::mbarrier_init(&s.none, 1); ptx::cluster_sync();"
        "if (first) ptx::send(&s.number, 1, &s.none, 1);",
        "send: no fence_mbarrier_init for the mbarrier at byte 16400",
    ),
    "not initialised everywhere": (
        "if (first) { ptx::mbarrier_init(&s.none, 1); ptx::fence_mbarrier_init(); } ptx::cluster_sync();"
        "if (first) ptx::send(&s.number, 1, &s.none, 1);",
        "send: the mbarrier at byte 16400 is not initialised",
    ),
}  # fmt: skip

test_mistakes_are_found = finds_mistakes(MISTAKES, probe, run)


REMOTE = {
    "arrival": "ptx::mbarrier_arrive_at(&s.full, 0);",
    "number": "ptx::send(&s.number, 7, &s.full, 0);",
    "copy": BOTH,
}


@pytest.mark.parametrize("what", REMOTE)
def test_another_block_is_not_used_before_all_meet(what: str, builder: Builder) -> None:
    """A block_sync does not make the barriers of another block visible: using them without a cluster_sync is found."""
    body = f"if (rank == 1 && thread == 0) {REMOTE[what]} ptx::cluster_sync();"
    kernel = probe(builder, body, sync="target::block_sync()")
    found = set()
    for seed in SEEDS:
        with pytest.raises(Fault, match=r"no cluster_sync since thread 0|is not init") as fault:
            run(kernel, seed=seed)
        found.add("no cluster_sync" in str(fault.value))
    assert True in found


def test_a_grid_is_made_of_whole_clusters(builder: Builder) -> None:
    kernel = probe(builder, "")
    with pytest.raises(Fault, match="3 blocks in clusters of 2"):
        run(kernel, grid=3)


# Races that show in some orders of execution, with the only messages that they may have.
GONE = "block 0 of the cluster has exited|ends while 1 copies are under way"
RACES = {
    **{
        f"{what} to a block that has exited": (f"if (rank == 1 && thread == 0) {does}", GONE)
        for what, does in REMOTE.items()
    },
    "write under a copy": (
        f"if (first) {BOTH} {EXPECT} if (rank == 1 && thread == 0) s.a[77] = 1;"
        "ptx::mbarrier_wait(&s.full, 0); if (thread == 0) p.y[rank] = s.a[77];",
        "byte 77 of shared memory was written while a copy",
    ),
    "a slot given back to one block alone": (
        f"if (group == 0 && thread != 0) return; {EXPECT} if (first) {BOTH}"
        "ptx::mbarrier_wait(&s.full, 0);"
        "if (group == 1) { multiply(c); ptx::wgmma_wait<0>(); release(); }"
        f"ptx::mbarrier_wait(&s.empty, 0); {EXPECT} if (first) {BOTH}"
        "ptx::mbarrier_wait(&s.full, 1); if (thread == 0) p.y[rank] = 1;",
        "bytes 0 to 8192 of shared memory are the operand|copy to bytes .* is under way|that nobody announced",
    ),
}

test_races_are_found = finds_races(RACES, probe, run)
