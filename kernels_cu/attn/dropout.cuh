// Dropout masks: which probabilities are dropped. docs/notes/dropout.md is the definition. The mask depends only on the
// seed and on the indices of sequence, query head, row and key. So every kernel recomputes the same mask, whatever its
// tiles are.
#pragma once

#include "attn/params.cuh"
#include "target/target.cuh"

struct Words {
  unsigned x[4];
};

// Philox4x32-10 (Salmon et al. 2011) of several counters at once, which share the keys of each round.
template <int kCount>
DEVICE void philox(Words (&counters)[kCount], unsigned key0, unsigned key1) {
  UNROLL for (int round = 0; round < 10; round++) {
    UNROLL for (int n = 0; n < kCount; n++) {
      unsigned (&c)[4] = counters[n].x;
      const unsigned long long product0 = 0xD2511F53ull * c[0];
      const unsigned long long product1 = 0xCD9E8D57ull * c[2];
      const unsigned c1 = c[1], c3 = c[3];
      c[0] = static_cast<unsigned>(product1 >> 32) ^ c1 ^ key0;
      c[1] = static_cast<unsigned>(product1);
      c[2] = static_cast<unsigned>(product0 >> 32) ^ c3 ^ key1;
      c[3] = static_cast<unsigned>(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The dropout mask of one query head of one sequence.
struct DropoutRule {
  unsigned key0, key1;  // the seed
  unsigned threshold;   // a probability whose 16 random bits are below it is dropped; in the upper half of the word
  int sequence, head;

  DEVICE DropoutRule(const ForwardParams& p, int sequence, int head) : sequence(sequence), head(head) {
    if constexpr (config::kDropout) {
      const Dropout& d = p.dropout;
      int64 seed = d.seed_value;
      if (d.seed != nullptr) {
        seed = d.seed_is_64bit ? *static_cast<const int64*>(d.seed) : *static_cast<const int*>(d.seed);
      }
      key0 = static_cast<unsigned>(seed);
      key1 = static_cast<unsigned>(static_cast<unsigned long long>(seed) >> 32);
      threshold = d.threshold << 16;
    }
  }

  // The random bits of rows i and i + 8 at keys j, j + 1, j + 8 and j + 9. Word 2 * (key / 8) + row / 8, row and key
  // counted from a multiple of 16, has those of two adjacent keys, the odd key's in its upper half.
  DEVICE Words words(int i, int j) const {
    Words drawn[1] = {counter(i, j)};
    philox(drawn, key0, key1);
    return drawn[0];
  }
  DEVICE Words counter(int i, int j) const {
    const unsigned row = static_cast<unsigned>(i), key = static_cast<unsigned>(j);  // so that divisions are shifts
    return {{key / 16 * 4 + key % 8 / 2, row / 16 * 8 + row % 8, static_cast<unsigned>(head),
             static_cast<unsigned>(sequence)}};
  }
  // Whether the even (or odd) key of a word is kept.
  DEVICE bool keeps(unsigned word, bool odd) const { return (odd ? word : word << 16) >= threshold; }
  DEVICE bool keeps_one(int i, int j) const { return keeps(words(i, j).x[2 * (j / 8 % 2) + i / 8 % 2], j % 2 != 0); }
};

// Calls visit(m, n, e, kept) for every element of a wave's tile whose rows are queries. first_row and first_key are
// multiples of 16, so one call of the generator serves the eight elements that a lane holds of a 16 x 16 block.
template <class C, int kRowBlocks, int kKeyBlocks, class Visit>
DEVICE void for_each_kept(const DropoutRule& rule, int first_row, int first_key, int lane, const Visit& visit) {
  UNROLL for (int n = 0; n < kKeyBlocks; n++) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      const int i = first_row + m * 16, j = first_key + n * 16;
      if constexpr (C::kElements == 8 && C::kSlots == 2) {
        const Words words = rule.words(i + C::row(lane, 0), j + C::column(lane, 0));
        UNROLL for (int e = 0; e < C::kElements; e++) {
          visit(m, n, e, rule.keeps(words.x[2 * (e / 4) + C::slot(e)], e % 2 != 0));
        }
      } else {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          visit(m, n, e, rule.keeps_one(i + C::row(lane, C::slot(e)), j + C::column(lane, e)));
        }
      }
    }
  }
}

// The same for a tile whose rows are keys; m then numbers blocks of keys, n blocks of queries.
//
// Here a lane's eight elements of a block belong to two counters, one of its even queries and one of its odd queries.
// Its two keys are both even or both odd, so it needs one half of each word. The lane of the adjacent keys, which is
// four lanes away, needs the other halves of the same two counters. So each of the two computes one counter and gives
// the halves that it does not need to the other.
template <class C, int kKeyBlocks, int kQueryBlocks, class Visit>
DEVICE void for_each_kept_of_keys(const DropoutRule& rule, int first_key, int first_row, int lane, const Visit& visit) {
  UNROLL for (int n = 0; n < kQueryBlocks; n++) {
    UNROLL for (int m = 0; m < kKeyBlocks; m++) {
      const int i = first_row + n * 16, j = first_key + m * 16;
      if constexpr (C::kElements == 8 && C::kSlots == 2) {
        const bool odd = C::row(lane, 0) % 2 != 0;
        const Words words = rule.words(i + C::column(lane, 0) + odd, j + C::row(lane, 0));
        // Of even and of odd queries; the lower half of a word is for columns 0 to 7 of the block, the upper for the
        // rest.
        unsigned bits[2][C::kSlots];
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const unsigned first = words.x[2 * slot], second = words.x[2 * slot + 1];
          const unsigned of_even = (first & 0xffffu) | second << 16;
          const unsigned of_odd = first >> 16 | (second & 0xffff0000u);
          const unsigned own = odd ? of_odd : of_even;
          const unsigned other = target::shuffle_xor(odd ? of_even : of_odd, 4);
          bits[0][slot] = odd ? other : own;
          bits[1][slot] = odd ? own : other;
        }
        UNROLL for (int e = 0; e < C::kElements; e++) {
          visit(m, n, e, rule.keeps(bits[e % 2][C::slot(e)], e / 4 != 0));
        }
      } else {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          visit(m, n, e, rule.keeps_one(i + C::column(lane, e), j + C::row(lane, C::slot(e))));
        }
      }
    }
  }
}

// The dropout mask of a wave's tile, a bit for each of the lane's elements. It does not depend on scores, so it can be
// computed while the matrix product runs.
template <class C, int kRowBlocks, int kKeyBlocks>
struct DropoutMask {
  static constexpr int kBits = config::kDropout ? kRowBlocks * kKeyBlocks * C::kElements : 1;
  unsigned bits[(kBits + 31) / 32];

  DEVICE static constexpr int index(int m, int n, int e) { return (m * kKeyBlocks + n) * C::kElements + e; }

  DEVICE void generate(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (config::kDropout) {
      UNROLL for (int i = 0; i < (kBits + 31) / 32; i++) bits[i] = 0;
      for_each_kept<C, kRowBlocks, kKeyBlocks>(rule, first_row, first_key, lane, [&](int m, int n, int e, bool kept) {
        const int at = index(m, n, e);
        if (kept) bits[at / 32] |= 1u << at % 32;
      });
    }
  }
  // The same for a tile whose rows are keys: kRowBlocks then counts blocks of keys, and kKeyBlocks blocks of queries.
  DEVICE void generate_of_keys(const DropoutRule& rule, int first_key, int first_row, int lane) {
    if constexpr (config::kDropout) {
      UNROLL for (int i = 0; i < (kBits + 31) / 32; i++) bits[i] = 0;
      for_each_kept_of_keys<C, kRowBlocks, kKeyBlocks>(rule, first_key, first_row, lane,
                                                       [&](int m, int n, int e, bool kept) {
                                                         const int at = index(m, n, e);
                                                         if (kept) bits[at / 32] |= 1u << at % 32;
                                                       });
    }
  }
  DEVICE bool at(int m, int n, int e) const { return bits[index(m, n, e) / 32] >> index(m, n, e) % 32 & 1; }

  // Sets dropped probabilities to 0. The division at the end of the kernel also divides by 1 - dropout_p.
  DEVICE void drop(C (&p)[kRowBlocks][kKeyBlocks]) const {
    if constexpr (config::kDropout) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            if (!at(m, n, e)) p[m][n].x[e] = 0.0f;
          }
        }
      }
    }
  }
};

// The random bits of a wave's tile whose rows are queries. They do not depend on scores, so they can be computed while
// the matrix product runs. first_row and first_key are multiples of 16, so one counter serves the eight elements that a
// lane holds of a 16 x 16 block.
template <class C, int kRowBlocks, int kKeyBlocks>
struct RandomTile {
  // Whether a lane's elements of a block are those of one counter. Else nothing is kept, and drop() computes each anew.
  static constexpr bool kByBlock = C::kElements == 8 && C::kSlots == 2;
  static constexpr int kBlocks = config::kDropout && kByBlock ? kRowBlocks * kKeyBlocks : 1;
  // Counters of one call of philox().
  static constexpr int kAtOnce = kBlocks % 4 == 0 ? 4 : kBlocks % 3 == 0 ? 3 : kBlocks % 2 == 0 ? 2 : 1;
  static constexpr int kParts = kBlocks / kAtOnce;

  Words words[kParts][kAtOnce];
  int first_row, first_key;

  DEVICE void generate(const DropoutRule& rule, int first_row, int first_key, int lane) {
    generate_parts<0, kParts>(rule, first_row, first_key, lane);
  }
  template <int kBegin, int kEnd>
  DEVICE void generate_parts(const DropoutRule& rule, int first_row, int first_key, int lane) {
    if constexpr (config::kDropout && kByBlock) {
      const Words first = rule.counter(first_row + C::row(lane, 0), first_key + C::column(lane, 0));
      UNROLL for (int part = kBegin; part < kEnd; part++) {
        UNROLL for (int n = 0; n < kAtOnce; n++) {
          const unsigned block = part * kAtOnce + n;
          words[part][n] = first;
          words[part][n].x[0] += block % kKeyBlocks * 4;
          words[part][n].x[1] += block / kKeyBlocks * 8;
        }
        philox(words[part], rule.key0, rule.key1);
      }
    }
    this->first_row = first_row;
    this->first_key = first_key;
  }
  // The exclusive or of all words of these parts. Its bits are uniform, as theirs are. Hopper's forward uses it to have
  // the words computed at one place of the program (sm90/forward_random.cuh).
  template <int kBegin, int kEnd>
  DEVICE unsigned xor_of_words() const {
    unsigned x = 0;
    UNROLL for (int part = kBegin; part < kEnd; part++) {
      UNROLL for (int n = 0; n < kAtOnce; n++) { UNROLL for (int i = 0; i < 4; i++) x ^= words[part][n].x[i]; }
    }
    return x;
  }
  DEVICE bool keeps(const DropoutRule& rule, int m, int n, int e, int lane) const {
    if constexpr (kByBlock) {
      const int block = m * kKeyBlocks + n;
      return rule.keeps(words[block / kAtOnce][block % kAtOnce].x[2 * (e / 4) + C::slot(e)], e % 2 != 0);
    }
    return rule.keeps_one(first_row + m * 16 + C::row(lane, C::slot(e)), first_key + n * 16 + C::column(lane, e));
  }
  // Sets dropped probabilities to 0. The division at the end of the kernel also divides by 1 - dropout_p.
  DEVICE void drop(C (&p)[kRowBlocks][kKeyBlocks], const DropoutRule& rule, int lane) const {
    if constexpr (config::kDropout) {
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int m = 0; m < kRowBlocks; m++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            if (!keeps(rule, m, n, e, lane)) p[m][n].x[e] = 0.0f;
          }
        }
      }
    }
  }
};
