// The position of a score: the arguments that a user's score function gets beside the score (attn/score_rule.cuh).
#pragma once

struct ScorePosition {
  int batch, head, kv_head;
  int q_idx, kv_idx;  // positions in the sequence
  int seqlen_q, seqlen_k;
  // The parts of q_idx and kv_idx that are compile-time constants of an element. The rest is the same for many elements
  // of a lane (see score_maths::float_of).
  int q_static = 0, kv_static = 0;
};
