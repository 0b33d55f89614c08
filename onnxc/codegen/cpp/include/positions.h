// Where the elements of a bool vector are true: counted chunk by chunk, then written from each chunk's place on.
#pragma once
#include "routines.h"

namespace positions {

static constexpr i64 CHUNK = 16384;

// The lowest bit of each of eight bytes: whether it is not 0.
OX u64 truths(const u8 *mask) {
  const u64 low = 0x7f7f7f7f7f7f7f7fULL;
  u64 w;
  __builtin_memcpy(&w, mask, 8);
  return (((w & low) + low) | w) >> 7 & 0x0101010101010101ULL;
}

static i64 count(const u8 *mask, i64 step, i64 first, i64 last) {
  i64 found = 0, i = first;
  if (step == 1)
    for (; i + 8 <= last; i += 8) found += (i64)(truths(mask + i) * 0x0101010101010101ULL >> 56);
  for (; i < last; i++) found += mask[i * step] != 0;
  return found;
}

static void write(const u8 *mask, i64 step, i64 first, i64 last, i64 *out) {
  i64 i = first;
  if (step == 1)
    for (; i + 8 <= last; i += 8)
      for (u64 w = truths(mask + i); w; w &= w - 1) *out++ = i + (__builtin_ctzll(w) >> 3);
  for (; i < last; i++)
    if (mask[i * step]) *out++ = i;
}

// Counts of chunks to the places where they begin; how many there are in all.
static i64 running(i64 *counts, i64 chunks) {
  i64 total = 0;
  for (i64 k = 0; k < chunks; k++) {
    const i64 own = counts[k];
    counts[k] = total;
    total += own;
  }
  return total;
}

}  // namespace positions
