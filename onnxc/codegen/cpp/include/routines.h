// Routines of the primitives that are no loop nests: running sums, the k best of a line, and scatters.
//
// A line is what lies along one axis: a pointer to its first element and the step between neighbours, in elements.
// Lines are independent, and the kernels run them in parallel; within a line, and among the updates that reach one
// element, the order is fixed, so results do not depend on the number of threads. Elements are plain C++ types, or
// classes (16-bit floats) that ox_get and ox_put convert to float and back.
#pragma once
#include "runtime.h"
#include "vec.h"

namespace routines {

OX i64 least(i64 a, i64 b) { return a < b ? a : b; }
OX i64 most(i64 a, i64 b) { return a > b ? a : b; }
OX i64 up(i64 a, i64 b) { return (a + b - 1) / b; }

// A parallel item is worth at least this many elements of work.
static constexpr i64 GRAIN = 16384;
// Units of `work` elements each that one item takes.
OX i64 units_per_item(i64 work) { return most(1, GRAIN / most(1, work)); }
// How many of `width` neighbouring elements one unit takes, so that all threads have some.
OX i64 columns_per_unit(i64 width, int threads) { return most(16, least(256, up(width, threads))); }

// ------------------------------------------------------------------------------------------- elements

template <class T> OX auto get(T v) {
  if constexpr (__is_class(T)) return ox_get(v);
  else return v;
}
template <class T, class W> OX void put(T &to, W v) {
  if constexpr (__is_class(T)) ox_put(to, v);
  else to = v;
}

// Integers wrap around. NaN wins over numbers in max and min.
struct Set {};
struct Add {
  template <class T> OX T of(T a, T b) {
    if constexpr ((T)0.5 != (T)0) return a + b;
    else return (T)((u64)a + (u64)b);
  }
  template <class A> OX A lanes(A a, A b) { return a + b; }
};
struct Mul {
  template <class T> OX T of(T a, T b) {
    if constexpr ((T)0.5 != (T)0) return a * b;
    else return (T)((u64)a * (u64)b);
  }
  template <class A> OX A lanes(A a, A b) { return a * b; }
};
struct Max {
  template <class T> OX T of(T a, T b) { return a > b || a != a ? a : b; }
  template <class A> OX A lanes(A a, A b) { return v_sel(v_gt(a, b) | v_ne(a, a), a, b); }
};
struct Min {
  template <class T> OX T of(T a, T b) { return a < b || a != a ? a : b; }
  template <class A> OX A lanes(A a, A b) { return v_sel(v_lt(a, b) | v_ne(a, a), a, b); }
};

template <class Op, class T> OX void combine(T &to, T v) { put(to, Op::of(get(to), get(v))); }

// to[i] = v[i] along a line.
template <class T> static void copy(T *to, i64 ts, const T *v, i64 vs, i64 n) {
  if (ts == 1 && vs == 1) {
    __builtin_memcpy(to, v, n * sizeof(T));
    return;
  }
  for (i64 i = 0; i < n; i++) to[i * ts] = v[i * vs];
}

// out[i] = Op(a[i], b[i]) over neighbouring elements.
template <class Op, class T> static void combine_rows(T *out, const T *a, const T *b, i64 n) {
  i64 i = 0;
  if constexpr (!__is_class(T)) {
    for (; i + VL <= n; i += VL) st(out + i, Op::lanes(ld(a + i), ld(b + i)));
  }
  for (; i < n; i++) put(out[i], Op::of(get(a[i]), get(b[i])));
}

// to[i] = Op(to[i], v[i]) along a line.
template <class Op, class T> static void apply(T *to, i64 ts, const T *v, i64 vs, i64 n) {
  if constexpr (__is_same(Op, Set)) {
    copy(to, ts, v, vs, n);
  } else if (ts == 1 && vs == 1) {
    combine_rows<Op>(to, to, v, n);
  } else {
    for (i64 i = 0; i < n; i++) combine<Op>(to[i * ts], v[i * vs]);
  }
}

// ------------------------------------------------------------------------------------------- running sums

// R lines at once. A sum is a chain of dependent additions, and several chains hide each other's latency.
template <class T, bool exclusive, int R, class At> OX void cumsum_some(i64 t, i64 n, i64 xs, i64 ys, At at) {
  const T *x[R];
  T *y[R], sum[R];
  OX_UNROLL for (int r = 0; r < R; r++) {
    at(t + r, x[r], y[r]);
    put(sum[r], get(T{}));
    if (!exclusive) put(sum[r], -0.0f);  // -0.0 + x is x, whatever the x
  }
  for (i64 i = 0; i < n; i++) {
    OX_UNROLL for (int r = 0; r < R; r++) {
      const T v = x[r][i * xs];
      if (exclusive) y[r][i * ys] = sum[r];
      combine<Add>(sum[r], v);
      if (!exclusive) y[r][i * ys] = sum[r];
    }
  }
}

// Lines first <= t < last; at(t, x, y) gives where they start.
template <class T, bool exclusive, class At> OX void cumsum_lines(i64 first, i64 last, i64 n, i64 xs, i64 ys, At at) {
  i64 t = first;
  for (; t + 8 <= last; t += 8) cumsum_some<T, exclusive, 8>(t, n, xs, ys, at);
  for (; t < last; t++) cumsum_some<T, exclusive, 1>(t, n, xs, ys, at);
}

// `width` neighbouring lines, a row of all of them at a time.
template <class T, bool exclusive> static void cumsum_columns(const T *x, T *y, i64 n, i64 xs, i64 ys, i64 width) {
  if (n <= 0) return;
  if (exclusive) __builtin_memset((void *)y, 0, width * sizeof(T));
  else __builtin_memcpy(y, x, width * sizeof(T));
  for (i64 i = 1; i < n; i++) combine_rows<Add>(y + i * ys, y + (i - 1) * ys, x + (exclusive ? i - 1 : i) * xs, width);
}

// ------------------------------------------------------------------------------------------- the k best

OX bool same(u64 a, u64 b) { return a == b; }
OX bool above(u64 a, u64 b) { return a > b; }
template <class U> OX U pick(bool c, U a, U b) { return c ? a : b; }
template <class A> OX mask_of<A> same(A a, A b) { return v_eq(a, b); }
template <class A> OX mask_of<A> above(A a, A b) { return v_gt(a, b); }
template <class A> OX A pick(mask_of<A> c, A a, A b) { return v_sel(c, a, b); }

enum Kind { UNSIGNED, SIGNED, FLOAT };

// Maps the bits of an element to an unsigned key, so that the best element has the least key. Both zeros have one key,
// and NaN is the greatest number. `infinity` is its bits in the float type.
template <class W, int kind, u64 infinity, bool largest> struct Order {
  typedef W word;
  static constexpr int BITS = sizeof(W) * 8;
  static constexpr W TOP = (W)((u64)1 << (BITS - 1));

  // A is W, or a vector of it; `fill` makes an A of one W everywhere.
  template <class A, class F> OX A key(A u, F fill) {
    A k = u;
    if constexpr (kind == SIGNED) k = u ^ fill(TOP);
    if constexpr (kind == FLOAT) {
      const A negative = (A)(fill(0) - (A)(u >> (BITS - 1)));
      k = pick(same((A)(u & fill((W)~TOP)), fill(0)), fill(TOP), (A)(u ^ (negative | fill(TOP))));
    }
    if constexpr (largest) k = (A)~k;
    if constexpr (kind == FLOAT) k = pick(above((A)(u & fill((W)~TOP)), fill((W)infinity)), fill(largest ? (W)0 : (W)~(W)0), k);
    return k;
  }
  OX W of(W u) { return key<W>(u, [](W x) OX_LAMBDA { return x; }); }
  OX V<W> lanes(V<W> u) { return key<V<W>>(u, [](W x) OX_LAMBDA { return bc<W>(x); }); }
};

// A key with its position below it: one comparison orders by key, then by position.
template <int BYTES> struct entry_of { typedef u64 type; static constexpr int shift = 32; };
template <> struct entry_of<8> { typedef unsigned __int128 type; static constexpr int shift = 64; };
template <class O> using Entry = typename entry_of<sizeof(typename O::word)>::type;
template <class O> OX Entry<O> entry(typename O::word key, i64 at) { return (Entry<O>)key << entry_of<sizeof key>::shift | (u64)at; }
template <class O> OX i64 place_in(Entry<O> e) { return (i64)(sizeof(e) == 8 ? (u32)e : (u64)e); }
template <class O> OX typename O::word key_in(Entry<O> e) { return (typename O::word)(e >> entry_of<sizeof(typename O::word)>::shift); }

template <class M> OX bool any(M mask) {
  u64 w[(sizeof(M) + 7) / 8] = {}, all = 0;
  __builtin_memcpy(w, &mask, sizeof mask);
  OX_UNROLL for (u64 i = 0; i < sizeof w / 8; i++) all |= w[i];
  return all != 0;
}

// Calls take(entry) for the elements i >= from with a key below the limit, which `take` returns anew.
template <class O, class F> OX void scan(const typename O::word *x, i64 xs, i64 from, i64 n, typename O::word limit, F take) {
  typedef typename O::word W;
  static constexpr int BLOCK = 4 * VL;
  if (xs != 1) {
    for (i64 i = from; i < n; i++) {
      const W key = O::of(x[i * xs]);
      if (key < limit) limit = take(entry<O>(key, i));
    }
    return;
  }
  W keys[BLOCK];
  const auto look = [&](i64 i, int count) OX_LAMBDA {
    for (int j = 0; j < count; j++) {
      if (__builtin_expect(keys[j] < limit, 0)) limit = take(entry<O>(keys[j], i + j));
    }
  };
  i64 i = from;
  for (; i + BLOCK <= n; i += BLOCK) {
    const V<W> bound = bc<W>(limit);
    mask_of<V<W>> found[4];
    OX_UNROLL for (int j = 0; j < 4; j++) {
      const V<W> k = O::lanes(ld(x + i + j * VL));
      found[j] = v_lt(k, bound);
      st(keys + j * VL, k);
    }
    if (any(found[0] | found[1] | found[2] | found[3])) look(i, BLOCK);
  }
  for (; i < n; i += VL) {
    const int count = (int)least(VL, n - i);
    st(keys, O::lanes(ldn(x + i, count)));
    look(i, count);
  }
}

static constexpr i64 FEW = 64;

// Puts all elements of a short line in their places: an element's place is the number of elements ahead of it.
// All pairs are compared, but without a branch that depends on the data.
template <class O> static void best_by_counting(const typename O::word *x, i64 xs, i64 n, Entry<O> *best) {
  typedef typename O::word W;
  W keys[FEW + VL];
  if (xs == 1) {
    for (i64 i = 0; i < n; i += VL) st(keys + i, O::lanes(ldn(x + i, (int)least(VL, n - i))));
  } else {
    for (i64 i = 0; i < n; i++) keys[i] = O::of(x[i * xs]);
  }
  typedef elem<mask_of<V<W>>> S;
  V<S> lane;
  OX_UNROLL for (int i = 0; i < VL; i++) lane[i] = (S)i;
  for (i64 v = 0; v < n; v += VL) {
    const V<W> own = ld(keys + v);
    const i64 end = least(v + VL, n);
    V<S> place = {};
    i64 j = 0;
    for (; j < v; j++) place -= v_le(bc(keys[j]), own);
    for (; j < end; j++) {
      const V<S> behind = v_gt(lane, bc((S)(j - v)));  // the lanes whose elements come after element j
      place -= v_lt(bc(keys[j]), own) | (v_eq(bc(keys[j]), own) & behind);
    }
    for (; j < n; j++) place -= v_lt(bc(keys[j]), own);
    S to[VL];
    __builtin_memcpy(to, &place, sizeof place);
    for (i64 i = v; i < end; i++) best[to[i - v]] = entry<O>(keys[i], i);
  }
}

template <class E> OX void insert(E *best, i64 count, E e) {
  for (; count > 0 && best[count - 1] > e; count--) best[count] = best[count - 1];
  best[count] = e;
}

// Keeps a sorted list: for a small k.
template <class O> static void best_by_insertion(const typename O::word *x, i64 xs, i64 n, i64 k, Entry<O> *best) {
  for (i64 i = 0; i < k; i++) insert(best, i, entry<O>(O::of(x[i * xs]), i));
  scan<O>(x, xs, k, n, key_in<O>(best[k - 1]), [=](Entry<O> e) OX_LAMBDA {
    insert(best, k - 1, e);
    return key_in<O>(best[k - 1]);
  });
}

// Moves the root of a heap, whose root is its greatest, down to its place.
template <class E> OX void sift(E *heap, i64 at, i64 n) {
  const E e = heap[at];
  for (i64 child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && heap[child + 1] > heap[child]) child++;
    if (heap[child] <= e) break;
    heap[at] = heap[child];
  }
  heap[at] = e;
}

template <class O> static void best_by_heap(const typename O::word *x, i64 xs, i64 n, i64 k, Entry<O> *heap) {
  for (i64 i = 0; i < k; i++) heap[i] = entry<O>(O::of(x[i * xs]), i);
  for (i64 i = k / 2; i-- > 0;) sift(heap, i, k);
  scan<O>(x, xs, k, n, key_in<O>(heap[0]), [=](Entry<O> e) OX_LAMBDA {
    heap[0] = e;
    sift(heap, 0, k);
    return key_in<O>(heap[0]);
  });
  for (i64 i = k; i-- > 1;) {
    const Entry<O> last = heap[i];
    heap[i] = heap[0];
    heap[0] = last;
    sift(heap, 0, i);
  }
}

// Sorts all by the bytes of the keys, least first. Each pass keeps the order of equals, so positions stay ordered.
template <class O> static Entry<O> *sort_all(const typename O::word *x, i64 xs, i64 n, Entry<O> *a) {
  typedef typename O::word W;
  Entry<O> *b = a + n;
  i64 counts[sizeof(W)][256] = {};
  for (i64 i = 0; i < n; i++) {
    const W key = O::of(x[i * xs]);
    a[i] = entry<O>(key, i);
    OX_UNROLL for (u64 byte = 0; byte < sizeof(W); byte++) counts[byte][(u64)key >> (8 * byte) & 255]++;
  }
  for (u64 byte = 0; byte < sizeof(W); byte++) {
    i64 *const to = counts[byte];
    i64 total = 0, largest = 0;
    for (int d = 0; d < 256; d++) {
      const i64 count = to[d];
      largest = most(largest, count);
      to[d] = total;
      total += count;
    }
    if (largest == n) continue;  // one digit everywhere
    for (i64 i = 0; i < n; i++) b[to[(u64)key_in<O>(a[i]) >> (8 * byte) & 255]++] = a[i];
    Entry<O> *const swap = a;
    a = b;
    b = swap;
  }
  return a;
}

OX bool by_counting(i64 n) { return n <= FEW; }
OX bool by_insertion(i64 k) { return k <= FEW / 2; }
OX bool by_sorting(i64 n, i64 k) { return k > n / 8; }
// Entries of scratch that top_k needs for a line.
OX i64 top_k_entries(i64 n, i64 k) { return by_counting(n) || by_insertion(k) ? 0 : by_sorting(n, k) ? 2 * n : k; }

// The k best of a line, in order, ties by position. `scratch` has top_k_entries(n, k) entries.
template <class O> static void top_k(const typename O::word *x, i64 xs, i64 n, i64 k, typename O::word *values, i64 vs, i64 *at, i64 as, char *scratch) {
  Entry<O> few[FEW], *best = (Entry<O> *)scratch;
  if (k <= 0) return;
  if (by_counting(n)) best_by_counting<O>(x, xs, n, best = few);
  else if (by_insertion(k)) best_by_insertion<O>(x, xs, n, k, best = few);
  else if (by_sorting(n, k)) best = sort_all<O>(x, xs, n, best);
  else best_by_heap<O>(x, xs, n, k, best);
  for (i64 i = 0; i < k; i++) {
    const i64 from = place_in<O>(best[i]);
    values[i * vs] = x[from * xs];
    at[i * as] = from;
  }
}

// ------------------------------------------------------------------------------------------- scatters

// An index as a position in 0..n, or -1 after a failure. Negative ones count from the end.
OX i64 place(ox_ctx *ctx, i64 node, i64 index, i64 n) {
  const i64 at = index < 0 ? index + n : index;
  if (__builtin_expect(at < 0 || at >= n, 0)) {
    ctx->api->fail(ctx, OX_ERR_INDEX, node, index);
    return -1;
  }
  return at;
}

// A pointer, its step along the scattered axis, and its step to the neighbouring line.
template <class T> struct Lines { T *p; i64 step, next; };

// out[index[j]] = Op(out[index[j]], updates[j]) for `count` updates, in order, on `width` lines of n elements.
template <class Op, class T, class I>
static bool scatter(ox_ctx *ctx, i64 node, Lines<T> out, i64 n, Lines<const I> index, Lines<const T> updates, i64 count, i64 width) {
  for (i64 j = 0; j < count; j++) {
    for (i64 w = 0; w < width; w++) {
      const i64 at = place(ctx, node, (i64)index.p[j * index.step + w * index.next], n);
      if (at < 0) return false;
      T &to = out.p[at * out.step + w * out.next];
      const T v = updates.p[j * updates.step + w * updates.next];
      if constexpr (__is_same(Op, Set)) to = v;
      else combine<Op>(to, v);
    }
  }
  return true;
}

}  // namespace routines
