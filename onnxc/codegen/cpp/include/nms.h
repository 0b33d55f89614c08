// Non-maximum suppression: the best boxes of a class, none of which overlaps a better one by much.
//
// Candidates come in the order of their scores from an incremental quicksort, which orders no more of them than are
// asked for. Boxes that were selected lie coordinate by coordinate, and a candidate is held against VL of them at once.
// Every float is computed as by onnxruntime: the same operations in the same order.
#pragma once
#include "routines.h"

namespace nms {

// ------------------------------------------------------------------------------------------- order

// Greater keys are better: higher scores, and of equal ones (-0 is 0) lower positions.
OX u64 key_of(f32 score, i64 at) {
  const u32 b = bits<u32>(score + 0.0f);
  return (u64)(b >> 31 ? ~b : b | 1u << 31) << 32 | (u32)~(u32)at;
}
OX i64 place_of(u64 key) { return (u32)~(u32)key; }

OX void swap(u64 &a, u64 &b) {
  const u64 t = a;
  a = b, b = t;
}

// Moves those above a pivot to the front of [first, last); where the pivot comes to lie.
static i64 split(u64 *keys, i64 first, i64 last) {
  u64 &a = keys[first], &b = keys[first + (last - first) / 2], &c = keys[last - 1];
  if (a < b) swap(a, b);
  if (b < c) swap(b, c);
  if (a < b) swap(a, b);
  const u64 pivot = b;
  swap(b, c);
  i64 to = first;
  for (i64 i = first; i < last - 1; i++) {
    const u64 x = keys[i];
    keys[i] = keys[to];
    keys[to] = x;
    to += x > pivot;
  }
  swap(keys[to], keys[last - 1]);
  return to;
}

static void sift(u64 *keys, i64 at, i64 n) {
  for (i64 child; (child = 2 * at + 1) < n; at = child) {
    child += child + 1 < n && keys[child + 1] < keys[child];
    if (keys[at] <= keys[child]) return;
    swap(keys[at], keys[child]);
  }
}
// Greatest first, in n log n steps whatever the keys are.
static void heap_sort(u64 *keys, i64 n) {
  for (i64 i = n / 2 - 1; i >= 0; i--) sift(keys, i, n);
  for (i64 end = n - 1; end > 0; end--) {
    swap(keys[0], keys[end]);
    sift(keys, 0, end);
  }
}
OX void insertion_sort(u64 *keys, i64 n) {
  for (i64 i = 1; i < n; i++) {
    const u64 x = keys[i];
    i64 j = i;
    for (; j > 0 && keys[j - 1] < x; j--) keys[j] = keys[j - 1];
    keys[j] = x;
  }
}

// Keys from the greatest down. [at, sorted) is in order; all before ends[k] are greater than those from there on.
struct Queue {
  static constexpr int DEPTH = 64;
  static constexpr i64 FEW = 24;
  u64 *keys;
  i64 n, at, sorted, work;
  int depth;
  i64 ends[DEPTH];

  void start(u64 *all, i64 count) {
    keys = all, n = count, at = sorted = 0, depth = 1, ends[0] = count;
    work = 64 * count;  // what unlucky pivots may cost
  }
  void order() {
    while (at == ends[depth - 1]) depth--;
    for (;;) {
      const i64 end = ends[depth - 1], size = end - at;
      if (size <= FEW || depth == DEPTH || work < 0) {
        if (size <= FEW) insertion_sort(keys + at, size);
        else heap_sort(keys + at, size);
        sorted = end;
        return;
      }
      work -= size;
      const i64 middle = split(keys, at, end);
      if (middle == at) {
        sorted = at + 1;
        return;
      }
      ends[depth++] = middle;
    }
  }
  // There must be one left.
  u64 next() {
    if (at == sorted) order();
    return keys[at++];
  }
};

// ------------------------------------------------------------------------------------------- boxes

struct Box {
  f32 x0, x1, y0, y1, area;
};

OX void in_order(f32 a, f32 b, f32 &low, f32 &high) {
  const bool turned = a >= b;
  low = turned ? b : a;
  high = turned ? a : b;
}
// Of [y, x, y, x] of two opposite corners, or of [x, y, width, height] around a center.
template <bool center> OX Box box_at(const f32 *p, i64 step) {
  const f32 a = p[0], b = p[step], c = p[2 * step], d = p[3 * step];
  Box z;
  if constexpr (center) {
    const f32 w = c / 2, h = d / 2;
    z.x0 = a - w, z.x1 = a + w, z.y0 = b - h, z.y1 = b + h;
  } else {
    in_order(b, d, z.x0, z.x1);
    in_order(a, c, z.y0, z.y1);
  }
  z.area = (z.x1 - z.x0) * (z.y1 - z.y0);
  return z;
}

OX bool any(VM<f32> m) {
  u64 words[sizeof m / 8], all = 0;
  __builtin_memcpy(words, &m, sizeof m);
  OX_UNROLL for (u64 i = 0; i < sizeof m / 8; i++) all |= words[i];
  return all != 0;
}

// Selected boxes: five rows of `room` floats. What is behind the last one is a box that overlaps none.
struct Kept {
  f32 *rows;
  i64 room, n;

  void add(const Box &z) {
    if (n % VL == 0) {
      const f32 far = __builtin_inff();
      const f32 none[] = {far, -far, far, -far, 0.0f};
      for (int k = 0; k < 5; k++) st(rows + k * room + n, bc<f32>(none[k]));
    }
    const f32 own[] = {z.x0, z.x1, z.y0, z.y1, z.area};
    for (int k = 0; k < 5; k++) rows[k * room + n] = own[k];
    n++;
  }
  // Whether a box overlaps one of them: the area in common is more than `limit` of the area of both.
  bool overlap(const Box &z, f32 limit) const {
    if (z.area <= 0.0f) return false;
    const vf x0 = bc(z.x0), x1 = bc(z.x1), y0 = bc(z.y0), y1 = bc(z.y1), area = bc(z.area), zero = bc(0.0f);
    for (i64 i = 0; i < n; i += VL) {
      const f32 *const p = rows + i;
      const vf p0 = ld(p), p1 = ld(p + room), q0 = ld(p + 2 * room), q1 = ld(p + 3 * room), other = ld(p + 4 * room);
      const vf left = v_sel(v_lt(x0, p0), p0, x0), right = v_sel(v_lt(p1, x1), p1, x1);
      const vf low = v_sel(v_lt(y0, q0), q0, y0), high = v_sel(v_lt(q1, y1), q1, y1);
      const vf common = (right - left) * (high - low), both = area + other - common;
      const auto apart = v_le(right, left) | v_le(high, low) | v_le(common, zero) | v_le(other, zero) | v_le(both, zero);
      if (any(v_gt(common / both, bc(limit)) & ~apart)) return true;
    }
    return false;
  }
};

// ------------------------------------------------------------------------------------------- selection

// Floats of a row of selected boxes, and bytes that a thread needs.
OX i64 row(i64 room) { return (routines::most(room, 1) + VL - 1) / VL * VL; }
OX i64 scratch(i64 boxes, i64 room) { return routines::up(boxes * 8 + row(room) * 20, 64) * 64; }

// The boxes of one class: at most `most` rows (batch, class, box). Returns how many.
template <bool center, bool scored>
static i64 select(const f32 *boxes, i64 box, i64 step, const f32 *scores, i64 score, i64 n, i64 most, i64 room,
                  f32 limit, f32 least, i64 batch, i64 of, i64 *out, char *scratch) {
  u64 *const keys = (u64 *)scratch;
  i64 count = 0;
  for (i64 i = 0; i < n; i++) {
    const f32 s = scores[i * score];
    keys[count] = key_of(s, i);
    count += !scored || s > least;
  }
  Kept kept{(f32 *)(keys + n), row(room), 0};
  Queue queue;
  queue.start(keys, count);
  while (queue.at < count && kept.n < most) {
    const i64 at = place_of(queue.next());
    const Box z = box_at<center>(boxes + at * box, step);
    if (kept.overlap(z, limit)) continue;
    i64 *const to = out + kept.n * 3;
    to[0] = batch, to[1] = of, to[2] = at;
    kept.add(z);
  }
  return kept.n;
}

// Moves what each of `units` found in its own part of `each` rows to where the one before it ends; how many there are.
static i64 close_up(i64 *rows, i64 each, const i64 *counts, i64 units) {
  i64 to = 0;
  for (i64 u = 0; u < units; to += counts[u++])
    if (to != u * each) __builtin_memmove(rows + to * 3, rows + u * each * 3, (u64)counts[u] * 24);
  return to;
}

}  // namespace nms
