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
// How many of `width` neighbouring elements one unit takes, so that all threads have some: at most `limit`.
OX i64 columns_per_unit(i64 width, int threads, i64 limit) { return most(16, least(limit, up(width, threads))); }

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

static constexpr i64 FEW = 128;

// The keys of a line, filled up to whole vectors with the worst there is.
template <class O> static void line_keys(const typename O::word *x, i64 xs, i64 n, typename O::word *keys) {
  typedef typename O::word W;
  if (xs == 1) {
    for (i64 i = 0; i < n; i += VL) st(keys + i, O::lanes(ldn(x + i, (int)least(VL, n - i))));
  } else {
    for (i64 i = 0; i < n; i++) keys[i] = O::of(x[i * xs]);
  }
  for (i64 i = n; i % VL; i++) keys[i] = (W)~(W)0;
}

// Puts few elements in their places: an element's place is the number of elements ahead of it. All pairs are compared,
// but without a branch that depends on the data.
template <class O, class At> OX void sort_by_counting(const typename O::word *keys, At at, i64 n, Entry<O> *best) {
  typedef typename O::word W;
  typedef typename int_of<sizeof(W)>::s S;
  static constexpr int N = VRL<W>;
  VR<S> lane;
  OX_UNROLL for (int i = 0; i < N; i++) lane[i] = (S)i;
  for (i64 v = 0; v < n; v += N) {
    const VR<W> own = ldr(keys + v);
    const i64 end = least(v + N, n);
    VR<S> place = {};
    i64 j = 0;
    for (; j < v; j++) place -= keys[j] - VR<W>{} <= own;
    for (; j < end; j++) {
      const VR<W> other = keys[j] - VR<W>{};
      const VR<S> behind = lane > (S)(j - v) - VR<S>{};  // the lanes whose elements come after element j
      place -= (other < own) | ((other == own) & behind);
    }
    for (; j < n; j++) place -= keys[j] - VR<W>{} < own;
    S to[N];
    __builtin_memcpy(to, &place, sizeof place);
    for (i64 i = v; i < end; i++) best[to[i - v]] = entry<O>(keys[i], at(i));
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

// Sorts entries by the bytes of their keys, least first, from a to b and back; returns where they are then. Each pass
// keeps the order of equals, so positions stay ordered; bytes that are the same everywhere take none.
template <class O> static Entry<O> *sort_by_bytes(Entry<O> *a, Entry<O> *b, i64 n) {
  typedef typename O::word W;
  W differ = 0;
  for (i64 i = 1; i < n; i++) differ |= (W)(key_in<O>(a[i]) ^ key_in<O>(a[0]));
  for (u64 byte = 0; byte < sizeof(W); byte++) {
    if (((u64)differ >> (8 * byte) & 255) == 0) continue;
    u32 to[256] = {}, total = 0;
    for (i64 i = 0; i < n; i++) to[(u64)key_in<O>(a[i]) >> (8 * byte) & 255]++;
    for (int d = 0; d < 256; d++) {
      const u32 count = to[d];
      to[d] = total;
      total += count;
    }
    for (i64 i = 0; i < n; i++) b[to[(u64)key_in<O>(a[i]) >> (8 * byte) & 255]++] = a[i];
    Entry<O> *const swap = a;
    a = b;
    b = swap;
  }
  return a;
}

// How many keys are below a limit, of a line that is filled up to whole vectors.
template <class W> static i64 count_below(const W *keys, i64 n, W limit) {
  i64 total = 0;
  if constexpr (sizeof(W) < 4) {
    vi found = {};
    for (i64 i = 0; i < n; i += VL) found -= conv<i32, elem<mask_of<V<W>>>>(v_lt(ld(keys + i), bc(limit)));
    OX_UNROLL for (int i = 0; i < VL; i++) total += found[i];
  } else {
    VR<typename int_of<sizeof(W)>::s> found = {};
    const VR<W> bound = limit - VR<W>{};
    for (i64 i = 0; i < n; i += VRL<W>) found -= ldr(keys + i) < bound;
    OX_UNROLL for (int i = 0; i < VRL<W>; i++) total += found[i];
  }
  return total;
}

// Elements that are sorted to find the k best of n: the search for a limit ends when no more are below it.
OX i64 candidates(i64 n, i64 k) { return least(n, k + k / 4 + 16); }

// A limit below which there are the k best and few more, found by halving; then these are sorted. Where too many keys
// are equal for that, the first of those at the limit complete the k that are below.
template <class O> static Entry<O> *best_by_halving(const typename O::word *x, i64 xs, i64 n, i64 k, char *scratch) {
  typedef typename O::word W;
  const i64 room = candidates(n, k) + VL;
  Entry<O> *const a = (Entry<O> *)scratch, *const b = a + room;
  W *const keys = (W *)(b + room);
  line_keys<O>(x, xs, n, keys);
  V<W> least_of = ld(keys), most_of = least_of;  // n is a vector at least
  for (i64 i = VL; i + VL <= n; i += VL) {
    const V<W> own = ld(keys + i);
    least_of = v_sel(v_lt(own, least_of), own, least_of), most_of = v_sel(v_gt(own, most_of), own, most_of);
  }
  W lo = least_of[0], hi = most_of[0];
  for (int i = 1; i < VL; i++) lo = least_of[i] < lo ? least_of[i] : lo, hi = most_of[i] > hi ? most_of[i] : hi;
  for (i64 i = n / VL * VL; i < n; i++) lo = keys[i] < lo ? keys[i] : lo, hi = keys[i] > hi ? keys[i] : hi;
  i64 below = 0, equal = 0;  // keys below lo, and how many of those at lo are taken
  i64 above = count_below(keys, n, hi);
  if (above < k) lo = hi, below = above;
  while (lo != hi && above > room - VL) {  // below lo there are fewer than k, below hi k and more
    const W middle = (W)(lo + (W)(hi - lo) / 2);
    if (middle == lo) break;
    const i64 count = count_below(keys, n, middle);
    if (count < k) lo = middle, below = count;
    else hi = middle, above = count;
  }
  const bool exact = lo == hi || above > room - VL;
  if (exact) hi = lo, equal = k - below;
  W *const found = (W *)b;
  const bool sparse = k * VL < n;
  i64 m = 0;
  for (i64 i = 0; i < n; i += 4 * VL) {
    const i64 end = least(i + 4 * VL, n);
    if (exact) {
      for (i64 j = i; j < end; j++) {
        const bool tie = (keys[j] == hi) & (equal > 0);
        a[m] = entry<O>(keys[j], j);
        m += (keys[j] < hi) | tie;
        equal -= tie;
      }
    } else if (!sparse || count_below(keys + i, end - i, hi) > 0) {
      for (i64 j = i; j < end; j++) {
        a[m] = entry<O>(keys[j], j);
        m += keys[j] < hi;
      }
    }
  }
  if (m > FEW) return sort_by_bytes<O>(a, b, m);
  for (i64 i = 0; i < (m + VL - 1) / VL * VL; i++) found[i] = i < m ? key_in<O>(a[i]) : (W)~(W)0;
  Entry<O> few[FEW];
  sort_by_counting<O>(found, [=](i64 i) OX_LAMBDA { return place_in<O>(a[i]); }, m, few);
  __builtin_memcpy(a, few, least(k, m) * sizeof(few[0]));
  return a;
}

OX bool by_insertion(i64 n, i64 k) { return k <= 2 || (k <= 32 && 8 * k * k <= n); }
OX bool by_counting(i64 n, i64 k) { return n <= FEW / 4 || (n <= FEW && 4 * k > n); }
OX bool by_sorting(i64 n, i64 k) { return candidates(n, k) > n / 4 * 3; }
// Entries of scratch that top_k needs for a line.
OX i64 top_k_entries(i64 n, i64 k) {
  if (by_counting(n, k) || by_insertion(n, k)) return 0;
  return by_sorting(n, k) ? 2 * n : 2 * (candidates(n, k) + VL) + (n + VL) / 2;
}

// The k best of a line, in order, ties by position. `scratch` has top_k_entries(n, k) entries.
template <class O> static void top_k(const typename O::word *x, i64 xs, i64 n, i64 k, typename O::word *values, i64 vs, i64 *at, i64 as, char *scratch) {
  Entry<O> few[FEW], *best = few;
  if (k <= 0) return;
  if (by_counting(n, k)) {
    typename O::word keys[FEW];
    line_keys<O>(x, xs, n, keys);
    sort_by_counting<O>(keys, [](i64 i) OX_LAMBDA { return i; }, n, few);
  } else if (by_insertion(n, k)) {
    best_by_insertion<O>(x, xs, n, k, few);
  } else if (by_sorting(n, k)) {
    best = (Entry<O> *)scratch;
    for (i64 i = 0; i < n; i++) best[i] = entry<O>(O::of(x[i * xs]), i);
    best = sort_by_bytes<O>(best, best + n, n);
  } else {
    best = best_by_halving<O>(x, xs, n, k, scratch);
  }
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
