// Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw, 2011): 64 random bits for a counter under a key.
// Of each, the low 32 bits are the first word. onnxc/primitives/random.py has the same in numpy.
#pragma once
#include "vec.h"

template <int R> OX V<u32> ox_rotate(V<u32> x) { return (x << R) | (x >> (32 - R)); }

template <int A, int B, int C, int D> OX void ox_rounds(V<u32> &x, V<u32> &y) {
  x += y, y = ox_rotate<A>(y) ^ x;
  x += y, y = ox_rotate<B>(y) ^ x;
  x += y, y = ox_rotate<C>(y) ^ x;
  x += y, y = ox_rotate<D>(y) ^ x;
}

OX V<u64> v_threefry(V<u64> key, vl counter) {
  const V<u32> a = conv<u32, u64>(key), b = conv<u32, u64>(key >> 32), c = a ^ b ^ 0x1BD11BDAu;
  V<u32> x = conv<u32, i64>(counter) + a, y = conv<u32, i64>(counter >> 32) + b;
  ox_rounds<13, 15, 26, 6>(x, y), x += b, y += c + 1;
  ox_rounds<17, 29, 16, 24>(x, y), x += c, y += a + 2;
  ox_rounds<13, 15, 26, 6>(x, y), x += a, y += b + 3;
  ox_rounds<17, 29, 16, 24>(x, y), x += b, y += c + 4;
  ox_rounds<13, 15, 26, 6>(x, y), x += c, y += a + 5;
  return conv<u64, u32>(x) | (conv<u64, u32>(y) << 32);
}
