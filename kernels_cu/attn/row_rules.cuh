// The score rules of a tile with rows of several heads, as in decoding: row r is query `first + r / kHeads` of head
// `head + r % kHeads`. Each of a lane's rows has a ScoreRule of its own. Tiles of a single head pass one ScoreRule,
// which has the same interface, for all rows.
#pragma once

#include "attn/params.cuh"
#include "attn/score_rule.cuh"
#include "target/target.cuh"

// C: the accumulator of Q K^T.
template <class C, int kRowBlocks, int kHeads>
struct RowRules {
  // first: the first query. rows: how many are real; the others use the rule of the first row. len_q, len_k: of the
  // sequence.
  DEVICE RowRules(const ForwardParams& p, int sequence, int head, int first, int rows, int len_q, int len_k, int offset,
                  int lane)
      : RowRules(
            [&](int n) {
              const int row = real(n / C::kSlots * C::kRows + C::row(lane, n % C::kSlots), rows);
              return ScoreRule(p, sequence, head + row % kHeads, len_q, len_k, offset);
            },
            first, rows, typename Upto<kCount>::Numbers{}) {}

  DEVICE const ScoreRule& of(int m, int slot) const { return rules[m * C::kSlots + slot]; }
  DEVICE int query(int row) const { return first + real(row, rows) / kHeads; }
  DEVICE float scale() const { return rules[0].scale(); }
  // Multiplies the scale of keys by `factor`, for all rows.
  DEVICE void scale_keys(float factor) { UNROLL for (int n = 0; n < kCount; n++) rules[n].key_factor *= factor; }

 private:
  static constexpr int kCount = kRowBlocks * C::kSlots;
  // Upto<count>::Numbers is Numbered<0, ..., count - 1>, from which the array of rules is initialised.
  template <int... n>
  struct Numbered {};
  template <int count, int... n>
  struct Upto : Upto<count - 1, count - 1, n...> {};
  template <int... n>
  struct Upto<0, n...> {
    using Numbers = Numbered<n...>;
  };

  ScoreRule rules[kCount];
  int first, rows;

  template <class Make, int... n>
  DEVICE RowRules(const Make& make, int first, int rows, Numbered<n...>)
      : rules{make(n)...}, first(first), rows(rows) {}

  DEVICE static int real(int row, int rows) { return row < rows ? row : 0; }
};
