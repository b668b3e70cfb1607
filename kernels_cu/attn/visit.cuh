// What is told of elements on the way, where nobody asks.
#pragma once

#include "target/target.cuh"

struct NoVisit {
  template <class... T>
  DEVICE void operator()(const T&...) const {}
};
