// Tables of 256 bytes, looked up by the bits of a byte.
#pragma once
#include "vec.h"

// The first n bytes of a word, one after the other. (Gathers read no bytes, and take as long.)
OX u64 ox_look_up(u64 x, const u8 *table, int n) {
  u64 r = 0;
  OX_UNROLL for (int i = 0; i < n; i++) r |= (u64)table[x >> 8 * i & 255] << 8 * i;
  return r;
}
// table[x] for each lane of bytes, signed ones by their bits; the table has 256 numbers of type R.
template <class R, class T> OX V<R> v_byte_table(V<T> x, const char *table) {
  static_assert(sizeof(T) == 1 && sizeof(R) == 1);
#if ONNXC_VL == 16 && defined(__AVX512VBMI__) && defined(__AVX512VL__)
  // Two registers are a table of 128 bytes, which the lower seven bits choose from.
  typedef char bytes_of_64 __attribute__((vector_size(64)));
  typedef int four_ints __attribute__((vector_size(16)));
  typedef char loose_64 __attribute__((vector_size(64), aligned(1), may_alias));
  const loose_64 *const t = (const loose_64 *)table;
  const bytes_of_64 at = (bytes_of_64)__builtin_ia32_si512_si((four_ints)x);
  const bytes_of_64 low = __builtin_shuffle((bytes_of_64)t[0], (bytes_of_64)t[1], at);
  const bytes_of_64 high = __builtin_shuffle((bytes_of_64)t[2], (bytes_of_64)t[3], at);
  V<i8> a, b;
  __builtin_memcpy(&a, &low, sizeof a), __builtin_memcpy(&b, &high, sizeof b);
  return (V<R>)((V<i8>)x < 0 ? b : a);
#elif ONNXC_VL == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
  // The same by words: half of the number tells which, and its last bit which of the two bytes.
  typedef u16 words_32 __attribute__((vector_size(64)));
  typedef u16 loose_32 __attribute__((vector_size(64), aligned(1), may_alias));
  typedef int eight_ints __attribute__((vector_size(32)));
  const loose_32 *const t = (const loose_32 *)table;
  const V<u16> at = conv<u16, u8>((V<u8>)x);
  const words_32 half = (words_32)__builtin_ia32_si512_256si((eight_ints)(at >> 1));
  const words_32 low = __builtin_shuffle((words_32)t[0], (words_32)t[1], half);
  const words_32 high = __builtin_shuffle((words_32)t[2], (words_32)t[3], half);
  V<u16> a, b;
  __builtin_memcpy(&a, &low, sizeof a), __builtin_memcpy(&b, &high, sizeof b);
  return (V<R>)conv<u8, u16>((at < 128 ? a : b) >> ((at & 1) << 3));
#else
  struct { u64 of[VL < 8 ? 1 : VL / 8]; } w = {};
  __builtin_memcpy(&w, &x, sizeof x);
  for (u64 &each : w.of) each = ox_look_up(each, (const u8 *)table, VL < 8 ? VL : 8);
  V<R> r;
  __builtin_memcpy(&r, &w, sizeof r);
  return r;
#endif
}
