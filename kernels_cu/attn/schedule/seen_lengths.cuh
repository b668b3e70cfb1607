// Where the sequences of a ragged batch lay when a block read it while earlier kernels of the stream still ran. Such a
// kernel may write lengths, so the block reads them again once it is done.
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// The thread's sequence: the one with its number. A block has kThreads threads. kRagged: false where the launch tells
// where sequences lie. kPlain: lengths have their plain form (attn/sequence.cuh).
template <bool kRagged, bool kPaged, bool kPlain, int kThreads>
struct SeenLengths {
  DEVICE static bool has_room(const ForwardParams&) { return true; }
  DEVICE void put(const Span&, const Span&) {}
  DEVICE bool differ(const ForwardParams&, int) const { return false; }
};
template <bool kPaged, bool kPlain, int kThreads>
struct SeenLengths<true, kPaged, kPlain, kThreads> {
  Span q, k;

  // Whether threads see all that a block reads: a sequence each, and not where pages begin in the table.
  DEVICE static bool has_room(const ForwardParams& p) {
    return p.batch <= kThreads && (!kPaged || kPlain || p.pages.indptr.data == nullptr);
  }
  DEVICE void put(const Span& own_q, const Span& own_k) {
    q = own_q;
    k = own_k;
  }
  // Whether the thread's sequence lies elsewhere now.
  DEVICE bool differ(const ForwardParams& p, int thread) const {
    if (thread >= p.batch) return false;
    const Span now_q = span_of<kPlain>(p.q_side, thread);
    Span now_k = span_of<kPlain>(p.k_side, thread);
    if constexpr (kPaged) now_k.length = length_in_pages<kPlain>(p.pages, thread, now_k.length);
    return is_other(now_q, q) || is_other(now_k, k);
  }

 private:
  DEVICE static bool is_other(const Span& x, const Span& y) { return x.start != y.start || x.length != y.length; }
};
