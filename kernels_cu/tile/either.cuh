// One of two types, by a constant.
#pragma once

template <bool kFirst, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};
