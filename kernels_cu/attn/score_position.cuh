// Where a score stands: what a user's function of scores knows beside the score itself.
#pragma once

struct ScorePosition {
  int batch, head, kv_head;
  int q_idx, kv_idx;  // positions in the sequence
  int seqlen_q, seqlen_k;
  // Of the positions what compilers know of a lane's elements: the rest is the same for many of them.
  int q_more = 0, kv_more = 0;
};
