// append_kv: writes new rows of keys and values into their pages. With a rotary embedding, rows of q and k are rotated
// by the angles of their positions first, and q goes to `out`. For pages of float8, the float32 results of the rotation
// are divided by the scale and then rounded.
//
// kLanes neighbouring threads take one head of one row: the heads of q come first, then those of k, then those of v.
// Row i of a sequence's n new rows is its key seqlen_k - n + i. Integers on the GPU are not trusted: a row is dropped
// if its position is not in the sequence's pages, or if the id of its page is not that of a page.
#include "attn/pages.cuh"
#include "attn/helper_params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/either.cuh"

namespace append {

using namespace config;

constexpr int kChunk = kCopyBytes / int(sizeof(Element));
constexpr int kWidest = (kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV) / kChunk;
constexpr int kLanes = power_of_two_from(kWidest) < target::kWave ? power_of_two_from(kWidest) : target::kWave;
constexpr int kHeadsOfBlock = kThreads / kLanes;
// Pairs of chunks that are rotated together. A plane of rotation has one element of either half of the kRotaryDim
// columns, or two neighbouring ones (kInterleaved).
constexpr int kPairs = kRotaryDim / 2 / kChunk;
static_assert(kRotaryDim % (2 * kChunk) == 0, "an access must not straddle the end of what turns");

using Angle = Either<kFloatAngles, float, Element>::Type;

template <class T>
struct alignas(kChunk* int(sizeof(T))) Vector {
  T x[kChunk];
};
struct alignas(kAngleBytes) Angles {
  Angle x[kChunk];
};
template <class T>
struct Pair {
  Vector<T> half[2];

  DEVICE T& at(int n) { return half[n / kChunk].x[n % kChunk]; }

  // Calls put(n, x) with the n-th element, rotated. Both elements of a plane are read before the first of them is put.
  template <class Put>
  DEVICE void rotate(const Angles& cosines, const Angles& sines, const Put& put) {
    UNROLL for (int plane = 0; plane < kChunk; plane++) {
      const int first = kInterleaved ? 2 * plane : plane;
      const int second = kInterleaved ? 2 * plane + 1 : kChunk + plane;
      const float x = target::to_float(at(first)), y = target::to_float(at(second));
      const float cosine = target::to_float(cosines.x[plane]), sine = target::to_float(sines.x[plane]);
      put(first, x * cosine - y * sine);
      put(second, y * cosine + x * sine);
    }
  }
};

// Where a head is written, and in which type.
struct AsElements {
  Element* to;

  DEVICE void copy(int chunk, const Vector<Element>* source) const {
    reinterpret_cast<Vector<Element>*>(to)[chunk] = source[chunk];
  }
  DEVICE void rotate(int first, int second, Pair<Element>& pair, const Angles& cosines, const Angles& sines) const {
    pair.rotate(cosines, sines, [&](int n, float x) { pair.at(n) = target::from_float<Element>(x); });
    reinterpret_cast<Vector<Element>*>(to)[first] = pair.half[0];
    reinterpret_cast<Vector<Element>*>(to)[second] = pair.half[1];
  }
};
struct AsFloat8 {
  float8* to;
  float scale;

  DEVICE float8 quantized(float x) const { return target::from_float<float8>(x / scale); }
  DEVICE void copy(int chunk, const Vector<Element>* source) const {
    const Vector<Element> vector = source[chunk];
    Vector<float8> found;
    UNROLL for (int n = 0; n < kChunk; n++) found.x[n] = quantized(target::to_float(vector.x[n]));
    reinterpret_cast<Vector<float8>*>(to)[chunk] = found;
  }
  DEVICE void rotate(int first, int second, Pair<Element>& pair, const Angles& cosines, const Angles& sines) const {
    Pair<float8> found;
    pair.rotate(cosines, sines, [&](int n, float x) { found.at(n) = quantized(x); });
    reinterpret_cast<Vector<float8>*>(to)[first] = found.half[0];
    reinterpret_cast<Vector<float8>*>(to)[second] = found.half[1];
  }
};

// Columns [begin, columns) of a head, as they are.
template <class Head>
DEVICE void copy(const Element* from, const Head& head, int begin, int columns, int lane) {
  for (int chunk = begin / kChunk + lane; chunk < columns / kChunk; chunk += kLanes) {
    head.copy(chunk, reinterpret_cast<const Vector<Element>*>(from));
  }
}

// One head of q or k: rotates its first kRotaryDim columns and copies the others. cosines, sines: those of its
// position.
template <class Head>
DEVICE void rotate(const Element* from, const Head& head, const Angle* cosines, const Angle* sines, int lane) {
  const Vector<Element>* const source = reinterpret_cast<const Vector<Element>*>(from);
  for (int n = lane; n < kPairs; n += kLanes) {
    const int first = kInterleaved ? 2 * n : n;
    const int second = kInterleaved ? 2 * n + 1 : kPairs + n;
    Pair<Element> pair{source[first], source[second]};
    head.rotate(first, second, pair, reinterpret_cast<const Angles*>(cosines)[n],
                reinterpret_cast<const Angles*>(sines)[n]);
  }
  copy(from, head, kRotaryDim, kHeadDim, lane);
}

// How a head is written into pages: as elements, or as float8 (kConverts).
template <bool kConverts>
struct PageStoreOf {
  using Stored = Element;
  DEVICE static AsElements head(Element* to, const KvScale&, int) { return {to}; }
};
template <>
struct PageStoreOf<true> {
  using Stored = float8;
  DEVICE static AsFloat8 head(float8* to, const KvScale& scale, int head) {
    return {to, scale.data == nullptr ? scale.number : scale.data[head * scale.head]};
  }
};
using PageStore = PageStoreOf<kFloat8>;
using Stored = PageStore::Stored;

// The address of key `position` of a sequence in an array of pages; null where it has no slot there.
template <class Array>
DEVICE Stored* slot_of(Array* array, const Strides& strides, const Pages& pages, int sequence, int64 position,
                       int head) {
  const PageSpan span = pages_of(pages, sequence);
  if (position < 0 || position >= kLongest || position >= span.count * pages.page_size) return nullptr;
  const int page = quotient(static_cast<int>(position), pages.inverse, pages.shift);
  const int64 id = integer_at(pages.ids, sequence * pages.row + (span.first + page) * pages.entry);
  if (id < 0 || id >= pages.count) return nullptr;
  return row_at<Stored>(array, strides, id, position - int64(page) * pages.page_size, head);
}

}  // namespace append

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_append(PARAMETER AppendParams p) {
  using namespace append;
  const int lane = target::thread_index() % kLanes;
  const int64 index = int64(target::block_index()) * kHeadsOfBlock + target::thread_index() / kLanes;
  const int heads = p.nheads_q + 2 * p.nheads_kv;
  const int64 row = index / heads;
  if (row >= p.rows) return;
  int head = static_cast<int>(index - row * heads);
  const PhysicalRow own = physical_row(p.side, p.batch, row);
  if (!own.logical) {
    if (p.fill && head < p.nheads_q) {
      auto* const out =
          reinterpret_cast<Vector<Element>*>(row_at<Element>(p.out, p.out_strides, own.batch, own.row, head));
      for (int chunk = lane; chunk < kHeadDim / kChunk; chunk += kLanes) out[chunk] = Vector<Element>{};
    }
    return;
  }

  const int64 position = integer_at(p.seqlen_k, own.sequence) - own.length + own.at;
  const Angle* cosines = nullptr;
  const Angle* sines = nullptr;
  if constexpr (kRotaryDim > 0) {
    const int64 known = clamp(position, 0, p.positions - 1);
    cosines = static_cast<const Angle*>(p.cos) + known * p.cos_row;
    sines = static_cast<const Angle*>(p.sin) + known * p.sin_row;
  }
  if (head < p.nheads_q) {
    rotate(row_at<const Element>(p.q, p.q_strides, own.batch, own.row, head),
           AsElements{row_at<Element>(p.out, p.out_strides, own.batch, own.row, head)}, cosines, sines, lane);
    return;
  }
  head -= p.nheads_q;
  if (head < p.nheads_kv) {
    Stored* const to = slot_of(p.k_pages, p.k_pages_strides, p.pages, own.sequence, position, head);
    if (to == nullptr) return;
    rotate(row_at<const Element>(p.k, p.k_strides, own.batch, own.row, head), PageStore::head(to, p.k_scale, head),
           cosines, sines, lane);
    return;
  }
  head -= p.nheads_kv;
  Stored* const to = slot_of(p.v_pages, p.v_pages_strides, p.pages, own.sequence, position, head);
  if (to == nullptr) return;
  copy(row_at<const Element>(p.v, p.v_strides, own.batch, own.row, head), PageStore::head(to, p.v_scale, head), 0,
       kHeadDimV, lane);
}
