// Addresses of a sequence's rows in the arrays of a call.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/rows.cuh"

// T is const where the kernel only reads. batch: index into the batch axis; row: index into the row axis.
template <class T, class Array>
DEVICE T* row_at(Array* array, const Strides& strides, int64 batch, int64 row, int64 head = 0) {
  return static_cast<T*>(array) + batch * strides.batch + row * strides.row + head * strides.head;
}

// The rows of kHeads neighbouring heads from a sequence's row `first` on.
template <int kHeads, class T, class Array>
DEVICE HeadsRows<T, kHeads> rows_of_heads(Array* array, const Strides& strides, int sequence, const Span& span,
                                          int head, int first) {
  return {row_at<T>(array, strides, sequence, span.start + first, head), strides.row, strides.head, 0};
}

// A head's rows from a sequence's row `first` on.
template <class T, class Array>
DEVICE StridedRows<T> rows_of(Array* array, const Strides& strides, int sequence, const Span& span, int head,
                              int first = 0) {
  return {row_at<T>(array, strides, sequence, span.start + first, head), strides.row};
}
