// Decision trees: which leaf of each tree a row of features reaches (onnxc/primitives/trees.py says what a table is).
//
// A walk is a chain of loads, each of which waits for the one before it. Eight walks go side by side: of eight rows
// through one tree, which stays in the first cache for a block of rows, or of one row through eight trees. A step has
// no branch, as which way a row goes cannot be foretold.
#pragma once
#include "routines.h"

namespace trees {

static constexpr int WALKS = 8;
static constexpr u32 MISSING = 1u << 31, EQUAL = 1u << 30;

template <class T> struct Node {
  T split;
  u32 feature;
  i32 child, leaf;
};

// The node after `at`. `step` is the distance between features of a row.
template <class T, u32 flags> OX i32 next(const Node<T> *nodes, i32 at, const T *row, i64 step) {
  const Node<T> &n = nodes[at];
  const T x = row[(i64)(n.feature & (EQUAL - 1)) * step];
  bool first = x <= n.split;
  if constexpr ((flags & EQUAL) != 0) first &= (x >= n.split) | !(n.feature & EQUAL);
  if constexpr ((flags & MISSING) != 0) first |= (x != x) & ((n.feature & MISSING) != 0);
  return n.child + !first;
}

template <class T> OX bool arrived(const Node<T> *nodes, const i32 *at) {
  i32 least = 0;
  OX_UNROLL for (int k = 0; k < WALKS; k++) least |= nodes[at[k]].leaf;
  return least >= 0;
}

// WALKS walks from the nodes `at` to their leaves. Walk k takes the row rows + k * apart.
template <class T, u32 flags>
OX void walk(const Node<T> *nodes, i32 *at, const T *rows, i64 apart, i64 step, i64 steps) {
  i64 s = 0;
  for (; s + 4 <= steps; s += 4) {
    if (s >= 8 && arrived(nodes, at)) return;
    for (int j = 0; j < 4; j++) {
      OX_UNROLL for (int k = 0; k < WALKS; k++) at[k] = next<T, flags>(nodes, at[k], rows + k * apart, step);
    }
  }
  for (; s < steps; s++) {
    OX_UNROLL for (int k = 0; k < WALKS; k++) at[k] = next<T, flags>(nodes, at[k], rows + k * apart, step);
  }
}

template <class T, u32 flags>
OX i32 walk_alone(const Node<T> *nodes, i32 at, const T *row, i64 step) {
  while (nodes[at].leaf < 0) at = next<T, flags>(nodes, at, row, step);
  return nodes[at].leaf;
}

// Leaves of the rows first <= r < last: out[r * out_row + t * out_tree].
template <class T, u32 flags>
static void leaves(const void *table, const i32 *roots, i64 roots_step, i64 trees, i64 steps, const T *x, i64 row,
                   i64 step, i32 *out, i64 out_row, i64 out_tree, i64 first, i64 last) {
  const Node<T> *const nodes = (const Node<T> *)table;
  i32 at[WALKS];
  i64 r = first;
  const i64 whole = first + (last - first) / WALKS * WALKS;
  if (whole > first) {
    for (i64 t = 0; t < trees; t++) {
      const i32 root = roots[t * roots_step];
      for (r = first; r < whole; r += WALKS) {
        OX_UNROLL for (int k = 0; k < WALKS; k++) at[k] = root;
        walk<T, flags>(nodes, at, x + r * row, row, step, steps);
        OX_UNROLL for (int k = 0; k < WALKS; k++) out[(r + k) * out_row + t * out_tree] = nodes[at[k]].leaf;
      }
    }
  }
  for (r = whole; r < last; r++) {
    i64 t = 0;
    for (; t + WALKS <= trees; t += WALKS) {
      OX_UNROLL for (int k = 0; k < WALKS; k++) at[k] = roots[(t + k) * roots_step];
      walk<T, flags>(nodes, at, x + r * row, 0, step, steps);
      OX_UNROLL for (int k = 0; k < WALKS; k++) out[r * out_row + (t + k) * out_tree] = nodes[at[k]].leaf;
    }
    for (; t < trees; t++)
      out[r * out_row + t * out_tree] = walk_alone<T, flags>(nodes, roots[t * roots_step], x + r * row, step);
  }
}

}  // namespace trees
