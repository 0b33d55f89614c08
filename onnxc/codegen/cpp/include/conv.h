// f32 convolution over channels-last activations, by implicit GEMM, with an open epilogue.
//
// An output pixel is a row of a matmul, an output channel a column, a kernel tap of CI channels a run of
// K. The register tile (conv_tile) multiplies MR rows by NR columns; where each row finds its runs is a
// table of pointers, so strides, dilations, pads, and slices of wider buffers cost nothing inside the tile:
// a tap outside the image points to a row of zeros, and where all rows of a tile do so it may be left out.
// conv_dw.h has depthwise, conv_wino.h Winograd.
//
// A volume has one more axis, depth: its planes are more images, and its kernel's planes more runs.
//
// Weights: w[group][panel][kz][ky][kx][ci][NR], output channels zero-padded to whole panels of NR.
#pragma once
#include "tile.h"
#include "vec.h"

// NV vectors by MR rows of accumulators, two vectors of weights, and the broadcast from memory.
#if defined(__AVX512F__) || defined(__aarch64__)
static constexpr int CONV_MR = 14;
#else
static constexpr int CONV_MR = 6;
#endif
static constexpr int CONV_NR = 2 * VL;

// An output pixel: its linear index n*OH*OW + y*OW + x, and its coordinates; in a volume ((n*OD + z)*OH + y)*OW + x.
struct Px { i64 i, n, y, x; };
struct PxVolume { i64 i, n, y, x, z; };

// All sizes of one convolution. Element (n, c, y, x) of the input lies at n*ins + y*irs + x*ips + c*ics
// (in elements): ics is 1 for channels-last; a planar NCHW input (ics = H*W, ips = 1) is repacked in blocks.
// What is generic over shapes is compiled for images as though there were no depth.
struct ConvShape {
  i64 N, H, W, CI, OH, OW, CO;
  i64 KH, KW, SY, SX, DY, DX, PT, PL;  // kernel, strides, dilations, pads at the top and left
  i64 G;                               // groups
  i64 ins, irs, ips, ics;
  static constexpr bool VOLUME = false, SKIPS = false;
  static constexpr i64 D = 1, OD = 1, KD = 1, SZ = 1, DZ = 1, PF = 0, ids = 0;
};

// The same with a long reach beyond the image, as dilations and large kernels have: taps that are zeros for a whole tile
// are left out.
struct ConvDilated : ConvShape { static constexpr bool SKIPS = true; };

// The same with a depth: element (n, c, z, y, x) lies z*ids further on.
struct ConvVolume : ConvShape {
  i64 D, OD, KD, SZ, DZ, PF, ids;  // sizes, kernel, stride, dilation, pad in front
  static constexpr bool VOLUME = true, SKIPS = true;
};

// The pixel at linear index i.
OX Px conv_px(const ConvShape &s, i64 i) { return {i, i / (s.OH * s.OW), i / s.OW % s.OH, i % s.OW}; }
OX PxVolume conv_px(const ConvVolume &s, i64 i) {
  i64 plane = i / (s.OH * s.OW);
  return {i, plane / s.OD, i / s.OW % s.OH, i % s.OW, plane % s.OD};
}
OX i64 conv_z(const Px &) { return 0; }
OX i64 conv_z(const PxVolume &q) { return q.z; }

// To the pixel after q.
OX void conv_next(const ConvShape &s, Px &q) {
  q.i++, q.x++;
  if (q.x == s.OW) q.x = 0, q.y++;
  if (q.y == s.OH) q.y = 0, q.n++;
}
OX void conv_next(const ConvVolume &s, PxVolume &q) {
  q.i++, q.x++;
  if (q.x == s.OW) q.x = 0, q.y++;
  if (q.y == s.OH) q.y = 0, q.z++;
  if (q.z == s.OD) q.z = 0, q.n++;
}

OX i64 cround(i64 a, i64 b) { return ox_up(a, b) * b; }

// ---------------------------------------------------------------------------------------------------
// The register tile.

// The order of a tile's sum. Sums run in fresh accumulators of about `flush` terms, added up in memory:
// one chain over all K would lose two more bits at K = 4608 than onnxruntime does.
struct ConvRuns {
  i64 runs, len;      // a row's K is `runs` runs of `len` contiguous floats
  i64 piece, flush;   // terms at a time (at most a run), terms after which the accumulators are emptied
  bool more;          // there is a sum already, to which this is added
};

static constexpr i64 CONV_FLUSH = 160;

OX ConvRuns conv_runs(i64 runs, i64 len) {
  i64 pieces = ox_max(1, (len + 128) / 256);
  return {runs, len, ox_up(len, pieces), CONV_FLUSH, false};
}

// Weights come from the last cache level or from memory. While the tiles of one piece of weights (a panel, or a point of
// it) are multiplied, the next piece is fetched, a share by each tile, a line now and then: in bursts, or by the first
// tile alone, memory would be awaited and then idle.
// They stop in the second level (2, as __builtin_prefetch counts): what a tile multiplies fills the first, which would
// lose it to them; with 8 lanes, which read weights twice as often as 16, this takes up to a fifth of the time.
// The next piece alone is fetched, and several terms go together, with a line (of pairs two) for all of them:
// instructions that are no multiplications are what limits the tile. Of larger shares some lines are left to hardware. With
// 16 lanes pairs take 5 to 8 % less time than single terms do where weights are in the second level, and 3 to 7 % where they
// come from memory. With 8 lanes fours take 2 to 13 % less alone on a core, and 15 to 25 % less where another thread of the
// core takes its share of the instructions (on Zen 3).
static constexpr int CONV_TERMS = OX_SUMS_STAY ? 4 : VL >= 16 ? 2 : 1;
static constexpr int CONV_AHEAD = 1024;  // floats
static constexpr int CONV_LEVEL = 2;

struct ConvFetch { const f32 *at; i64 step; };  // from where on, and bytes for each term of a sum
// The share of tile t of `tiles`, of the piece that follows K rows of weights at B.
OX ConvFetch conv_fetch(const f32 *B, i64 K, i64 t, i64 tiles) {
  if (tiles < 2) return {B + CONV_AHEAD, 4 * CONV_NR};
  return {B + K * CONV_NR + K * CONV_NR * t / tiles, ox_up(4 * CONV_NR, tiles)};
}

// What a tile fetches for CONV_TERMS terms.
OX void conv_fetch_lines(const char *far) {
  __builtin_prefetch(far, 0, CONV_LEVEL);
  if constexpr (CONV_TERMS == 2) __builtin_prefetch(far + 64, 0, CONV_LEVEL);
}

#define CONV_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define CONV_DECL(i) vf c##i = {}, d##i = {};
#define CONV_PTR(i) const f32 *a##i; if constexpr (i < MR) a##i = A[i] + off;
#define CONV_FMA(i) if constexpr (i < MR) { vf s = bc(a##i[k]); add_product(c##i, b, s); \
  if constexpr (NV > 1) add_product(d##i, e, s); }
#define CONV_TERM() { \
  vf b = ld(B), e; \
  if constexpr (NV > 1) e = ld(B + VL); \
  CONV_ROWS(CONV_FMA) \
  B += CONV_NR, k++; }
#define CONV_SET(i) if constexpr (i < MR) { f32 *o = D + i * ds; st(o, c##i); \
  if constexpr (NV > 1) st(o + VL, d##i); }
#define CONV_ADD(i) if constexpr (i < MR) { f32 *o = D + i * ds; st(o, ld(o) + c##i), c##i = vf{}; \
  if constexpr (NV > 1) st(o + VL, ld(o + VL) + d##i), d##i = vf{}; }
#define CONV_CLEAR(i) c##i = vf{}, d##i = vf{};

// D[i][j] = sum over k of row i's k-th input times B[k][j], for MR rows and NV vectors of columns.
// A[r * CONV_MR + i] + off is the start of row i's run r; B has NR columns a row; ds is D's row stride. `next` is
// fetched meanwhile.
// Never inlined: one copy serves every convolution of a program, whatever its epilogue.
template <int MR, int NV>
__attribute__((noclone)) OX_APART void conv_tile(
    const f32 *const *A, i64 off, ConvRuns R, const f32 *B, f32 *D, i64 ds, ConvFetch next) {
  CONV_ROWS(CONV_DECL)
  const char *far = (const char *)next.at;
  bool first = !R.more;
  i64 have = 0;
  for (i64 r = 0; r < R.runs; r++, A += CONV_MR) {
    CONV_ROWS(CONV_PTR)
    for (i64 k = 0; k < R.len;) {
      i64 end = k + R.piece < R.len ? k + R.piece : R.len;
      have += end - k;
      for (; k + CONV_TERMS <= end; far += CONV_TERMS * next.step) {
        conv_fetch_lines(far);
        OX_UNROLL for (int i = 0; i < CONV_TERMS; i++) CONV_TERM()
      }
      while (k < end) CONV_TERM()
      if (have < R.flush && !(k == R.len && r + 1 == R.runs)) continue;
      have = 0;
      if (first) {
        CONV_ROWS(CONV_SET)
        if (k == R.len && r + 1 == R.runs) return;
        CONV_ROWS(CONV_CLEAR)
        first = false;
      } else {
        CONV_ROWS(CONV_ADD)
      }
    }
  }
}
#undef CONV_SET
#undef CONV_ADD
#undef CONV_CLEAR

// Counts of rows that have a tile of their own: all from half of CONV_MR on, which is what conv_tiles makes
// (unless there are fewer rows in all); of narrow and of small tiles the even ones.
template <int NV> constexpr bool conv_has_tile(int m) {
  return m <= CONV_MR && (m % 2 == 0 || m == 1 || (NV > 1 && m >= CONV_MR / 2));
}
#ifdef ONNXC_APART
#define CONV_APART(m, nv) \
  ONNXC_APART void conv_tile<m, nv>(const f32 *const *, i64, ConvRuns, const f32 *, f32 *, i64, ConvFetch);
#define CONV_APART_BOTH(m) CONV_APART(m, 1) CONV_APART(m, 2)
CONV_APART_BOTH(1) CONV_APART_BOTH(2) CONV_APART_BOTH(4) CONV_APART_BOTH(6)
#ifdef __AVX512F__
CONV_APART_BOTH(8) CONV_APART_BOTH(10) CONV_APART_BOTH(12) CONV_APART_BOTH(14)
CONV_APART(7, 2) CONV_APART(9, 2) CONV_APART(11, 2) CONV_APART(13, 2)
#else
CONV_APART(3, 2) CONV_APART(5, 2)
#endif
#undef CONV_APART
#undef CONV_APART_BOTH
#endif

// The tile for `rows` rows, rounded up to a count that has one: the table repeats a pointer for the others, and
// their sums go unused. So D has room for CONV_MR rows, and A has pointers for as many.
template <int NV>
OX void conv_tile_rows(int rows, const f32 *const *A, i64 off, const ConvRuns &R, const f32 *B, f32 *D, i64 ds,
                       ConvFetch next) {
#define CONV_CASE(m) case m: if constexpr (conv_has_tile<NV>(m)) return conv_tile<m, NV>(A, off, R, B, D, ds, next);
  switch (rows) {  // a count without a tile falls through to the next, which has one
    CONV_CASE(1) CONV_CASE(2) CONV_CASE(3) CONV_CASE(4) CONV_CASE(5) CONV_CASE(6) CONV_CASE(7)
    CONV_CASE(8) CONV_CASE(9) CONV_CASE(10) CONV_CASE(11) CONV_CASE(12) CONV_CASE(13) CONV_CASE(14)
  }
#undef CONV_CASE
}

// Which tiles are compiled, for that takes most of the time that a convolution does: the wide ones serve any panel, for
// the weights are padded; narrow ones serve panels of VL columns or fewer, at half the cost.
enum ConvWidths { CONV_NARROW = 1, CONV_WIDE = 2, CONV_BOTH = 3 };

// What the panels of so many output channels (of a group) want.
constexpr ConvWidths conv_widths(i64 channels) {
  return channels <= VL ? CONV_NARROW : (channels - 1) % CONV_NR < VL ? CONV_BOTH : CONV_WIDE;
}

// The tile for `cols` columns of a panel.
template <ConvWidths W>
OX void conv_tile_any(int rows, i64 cols, const f32 *const *A, i64 off, const ConvRuns &R, const f32 *B, f32 *D,
                      i64 ds, ConvFetch next) {
  if constexpr (W == CONV_NARROW) return conv_tile_rows<1>(rows, A, off, R, B, D, ds, next);
  if constexpr (W == CONV_BOTH) if (cols <= VL) return conv_tile_rows<1>(rows, A, off, R, B, D, ds, next);
  if constexpr (W != CONV_NARROW) conv_tile_rows<2>(rows, A, off, R, B, D, ds, next);
}

// ---------------------------------------------------------------------------------------------------
// Direct convolution.

// What follows from a shape: how K falls into runs, and how the work is divided. The division depends on
// the shape alone, never on the number of threads; an output's sum does not depend on the division at all.
struct ConvPlan {
  bool repack;        // rows are copied channels-last, with their halo, into the scratch: planar input, or collisions
  bool gather;        // the pixels of a 1x1 kernel are copied there: collisions
  bool rows;          // a run is a kernel row (KW * CI); otherwise it is a tap (CI / G)
  ConvRuns R;
  i64 cig, cog, panels;      // per group
  i64 pixels, blocks;        // output pixels, and blocks of them
  i64 parts;                 // parts into which a block's panels (of all groups) are divided
  i64 max_rows;              // output rows a block touches at most
  i64 unit;                  // pixels: blocks are multiples of it
  i64 apart;                 // floats from one repacked pixel to the next
  i64 left, right;           // columns of zeros at the sides of repacked rows
  bool bands;                // repacked are the rows that each kernel row reads, not what lies between them too
  i64 tiles;                 // of a block, at most
  i64 some;                  // runs whose weights a block passes over together: all, or as many as a cache holds
  i64 zero, patch, repacked, kept, table;  // floats, four times, and pointers of the scratch
};

// The fewest pixels of a block. Blocks of fewer would pass over the weights too often; of more, two threads would not
// share what they read from memory.
static constexpr i64 CONV_FEW = CONV_MR > 6 ? 48 : 24;

// The least number of work items aimed at: blocks of pixels, divided further by panels where blocks are few.
static constexpr i64 CONV_ITEMS = 16;

// How many blocks of about `best` rows: enough for CONV_ITEMS with the panels' help, but no block under `least`.
OX i64 conv_blocks(i64 rows, i64 best, i64 least, i64 panels) {
  return ox_max(ox_max(1, ox_up(rows, best)), ox_min(ox_up(CONV_ITEMS, ox_max(panels, 1)), rows / least));
}

// The first pixel of block b: whole units, so that only the last block has a remainder.
OX i64 conv_block_begin(const ConvPlan &p, i64 b) { return ox_min(p.pixels, ox_up(p.pixels, p.unit) * b / p.blocks * p.unit); }

// Whether the rows of a tile collide: the L1 cache has places for 8 or 12 lines at addresses that are equal modulo 4096,
// and a tile walks along all of its rows at once. At 1024 channels this costs up to a third of the time.
OX bool conv_collide(i64 bytes) {
  i64 sets = bytes % 4096 == 0 ? 1 : bytes % 2048 == 0 ? 2 : CONV_MR;
  return ox_up(CONV_MR, sets) > 8;
}

// Floats from one copied pixel to the next, where they would collide otherwise.
OX i64 conv_apart(i64 CI) { return cround(CI, 16) + 16; }

// Bytes of a panel's weights that stay in the second-level cache while the tiles of a block are multiplied by them. Those
// of more are multiplied a few runs at a time, and their sums wait in memory meanwhile: each tile would read them all from
// farther away. (Sums are emptied into memory between runs in any case, if these are not short: the bits are the same.)
static constexpr i64 CONV_PASS = VL >= 16 ? 512 * 1024 : 256 * 1024;

template <class S> static ConvPlan conv_plan(const S &s) {
  ConvPlan p = {};
  bool planar = s.ics != 1 && s.CI != 1, collide = !planar && s.CI >= 64 && conv_collide(4 * s.SX * s.ips);
  bool one = s.KD * s.KH * s.KW == 1;
  p.gather = collide && one, p.repack = planar || (collide && !one && !S::VOLUME);
  p.apart = collide ? conv_apart(s.CI) : s.CI;
  p.cig = s.CI / s.G, p.cog = s.CO / s.G, p.panels = ox_up(p.cog, CONV_NR);
  bool dense = s.G == 1 && s.DX == 1 && (p.repack || s.ips == s.CI);
  p.rows = dense && s.KW > 1 && s.CI < 64;
  p.R = p.rows ? conv_runs(s.KD * s.KH, s.KW * s.CI) : conv_runs(s.KD * s.KH * s.KW, p.cig);
  p.pixels = s.N * s.OD * s.OH * s.OW;
  // A block's inputs should stay in half of a 512 KB cache while the panels pass over them.
  i64 bytes = 4 * s.CI * ox_min(s.SX, s.KW) * ox_min(s.SY, s.KH) * s.KD;
  if (s.KD > 1) bytes += 8 * p.R.runs;  // of the table
  i64 block = ox_max(CONV_FEW, ox_min(480, 192 * 1024 / ox_max(bytes, 1)));
  p.unit = 1;
  if (p.repack) {  // whole rows, and many of them, since a block also repacks what its last kernel reaches into
    p.unit = ox_max(s.OW, 1);
    block = ox_max(1, ox_min(16, 192 * 1024 / ox_max(4 * s.CI * s.SY * s.W * s.KD, 1))) * p.unit;
    if (collide) block = ox_max(block, cround(CONV_FEW, p.unit));
  }
  p.blocks = conv_blocks(p.pixels, block, CONV_FEW, p.panels * s.G);
  p.parts = ox_max(1, ox_min(p.panels * s.G, ox_up(CONV_ITEMS, p.blocks)));
  i64 most = cround(ox_up(p.pixels, p.blocks), p.unit) + p.unit;
  p.max_rows = ox_min(s.N * s.OD * s.OH, (most + s.OW - 2) / ox_max(s.OW, 1) + 1);
  p.zero = cround(ox_max(p.R.len, s.CI), 16);
  // Pixels of an output row whose kernel rows leave the image at the left or the right.
  i64 left = ox_up(s.PL, s.SX), inside = s.W + s.PL >= s.KW ? (s.W + s.PL - s.KW) / s.SX + 1 : 0;
  i64 edge = ox_min(s.OW, ox_min(left, s.OW) + ox_max(0, s.OW - inside));
  // Where taps beyond the image are looked for, they are no columns of zeros (but in runs of whole kernel rows).
  if (p.rows || !S::SKIPS) p.left = s.PL, p.right = ox_max(0, (s.OW - 1) * s.SX - s.PL + (s.KW - 1) * s.DX + 1 - s.W);
  p.patch = p.rows && !p.repack ? p.max_rows * edge * p.R.runs * cround(p.R.len, 16) : 0;
  if (p.gather) p.patch = (most + CONV_MR) * p.apart;
  i64 planes = ox_min(s.N * s.OD, (most - 1) / ox_max(s.OH * s.OW, 1) + 2);
  i64 in_rows = s.KD * ox_min(planes * s.H, ox_max(p.max_rows - 1, 0) * s.SY + planes * ((s.KH - 1) * s.DY + 1));
  p.bands = S::SKIPS && p.max_rows * s.KD * s.KH < in_rows;
  if (p.bands) in_rows = p.max_rows * s.KD * s.KH;
  p.repacked = p.repack ? in_rows * ((p.left + s.W + p.right) * p.apart) + 4 * VL : 0;
  p.tiles = ox_up(most, CONV_MR) + 1;
  p.some = p.R.len < CONV_FLUSH ? p.R.runs : ox_up(p.R.runs, ox_up(4 * p.R.runs * p.R.len * CONV_NR, CONV_PASS));
  p.kept = p.some < p.R.runs ? p.tiles * CONV_MR * CONV_NR : 0;
  p.table = p.tiles * p.R.runs * CONV_MR;
  return p;
}

// Work items of a convolution, and bytes of scratch that a thread needs for any number of them (64-byte
// aligned). Items next to each other share a block's table, also when a thread gets them in several pieces: so each
// thread's scratch has to be made fresh before the first item.
static void conv_fresh(void *scratch) { *(i64 *)scratch = -1; }
template <class S> static i64 conv_items_count(const S &s) {
  ConvPlan p = conv_plan(s);
  return p.pixels > 0 ? p.blocks * p.parts : 0;
}
static constexpr i64 CONV_STATE = 16;  // floats of scratch before everything else: the block of the table
template <class S> static i64 conv_scratch(const S &s) {
  ConvPlan p = conv_plan(s);
  i64 floats = CONV_STATE + CONV_MR * CONV_NR + p.zero + p.patch + p.repacked + p.kept + 64;
  return 4 * floats + 8 * (p.R.runs + p.tiles + p.table);
}

// A thread's scratch, divided.
struct ConvScratch { f32 *D, *zero, *patch, *repacked, *kept; i64 *offsets; u64 *live; const f32 **table; };

OX ConvScratch conv_divide(const ConvPlan &p, void *scratch) {
  f32 *D = (f32 *)scratch + CONV_STATE, *zero = D + CONV_MR * CONV_NR, *patch = zero + p.zero, *rep = patch + p.patch;
  f32 *kept = rep + cround(p.repacked, 16);
  i64 *offsets = (i64 *)(kept + p.kept);
  u64 *live = (u64 *)(offsets + p.R.runs);
  return {D, zero, patch, rep, kept, offsets, live, (const f32 **)(live + p.tiles)};
}

// How n pixels fall into tiles: as evenly as it goes, since a tile of one row costs half of a full one.
struct ConvTiles {
  i64 count, rows, more;  // the first `more` tiles have one row more
  OX_LAMBDA int size(i64 t) const { return int(rows + (t < more)); }
};
OX ConvTiles conv_tiles(i64 n) {
  i64 count = ox_up(n, CONV_MR);
  return {count, count ? n / count : 0, count ? n % count : 0};
}

// VL pixels of C planes as C vectors of whole pixels: vector J has elements J * VL to J * VL + VL - 1.
template <int... I> struct ConvLanes {};
template <int C, int J, int... I> OX vf conv_mixed(const vf *x, ConvLanes<I...>) {
  vf v = __builtin_shufflevector(x[0], x[1], ((J * VL + I) % C == 1 ? VL : 0) + (J * VL + I) / C...);
  if constexpr (C > 2) v = __builtin_shufflevector(v, x[2], (J * VL + I) % C == 2 ? VL + (J * VL + I) / C : I...);
  if constexpr (C > 3) v = __builtin_shufflevector(v, x[3], (J * VL + I) % C == 3 ? VL + (J * VL + I) / C : I...);
  return v;
}
// W pixels of C planes (a distance of ics), channels-last. May write up to VL elements more than W * C.
template <int C> OX void conv_interleave(const f32 *x, i64 ics, i64 W, f32 *d) {
  const ConvLanes<__integer_pack(VL)...> lanes;
  for (i64 i = 0; i < W; i += VL, d += C * VL) {
    vf p[C];
    int n = (int)ox_min(VL, W - i);
    OX_UNROLL for (int c = 0; c < C; c++) p[c] = n == VL ? ld(x + c * ics + i) : ldn(x + c * ics + i, n);
    st(d, conv_mixed<C, 0>(p, lanes));
    if (n * C > VL) st(d + VL, conv_mixed<C, 1>(p, lanes));
    if constexpr (C > 2) if (n * C > 2 * VL) st(d + 2 * VL, conv_mixed<C, 2>(p, lanes));
    if constexpr (C > 3) if (n * C > 3 * VL) st(d + 3 * VL, conv_mixed<C, 3>(p, lanes));
  }
}

// Copies n pixels of an input row channels-last, `apart` floats from one to the next. May write as conv_interleave does.
template <class S> OX void conv_copy_row(const S &s, const f32 *row, i64 n, i64 apart, f32 *d) {
  if (s.ips == s.CI && apart == s.CI && (s.ics == 1 || s.CI == 1)) __builtin_memcpy(d, row, 4 * s.CI * n);
  else if (s.ics == 1)
    for (i64 i = 0; i < n; i++) __builtin_memcpy(d + i * apart, row + i * s.ips, 4 * s.CI);
  else if (s.ips == 1 && s.CI == 3) conv_interleave<3>(row, s.ics, n, d);
  else if (s.ips == 1 && s.CI == 4) conv_interleave<4>(row, s.ics, n, d);
  else if (s.ips == 1 && s.CI == 2) conv_interleave<2>(row, s.ics, n, d);
  else
    for (i64 c = 0; c < s.CI; c++)
      for (i64 i = 0; i < n; i++) d[i * s.CI + c] = row[c * s.ics + i * s.ips];
}

// Copies input rows [y0, y1) of an image, or each `step`-th of them, channels-last, with zeros at the left and the right.
template <class S>
static void conv_repack(const S &s, const ConvPlan &p, const f32 *x, i64 y0, i64 y1, i64 step, f32 *d) {
  for (i64 y = y0; y < y1; y += step) {
    const f32 *row = x + y * s.irs;
    for (i64 i = 0; i < p.left * p.apart; i++) *d++ = 0;
    conv_copy_row(s, row, s.W, p.apart, d);
    d += s.W * p.apart;
    for (i64 i = 0; i < p.right * p.apart; i++) *d++ = 0;
  }
}

// Copies a kernel row that leaves the image at the left or the right, with zeros where it is outside.
template <class S> OX void conv_patch(const S &s, const f32 *row, i64 ix, f32 *d) {
  i64 full = s.CI / VL * VL;
  int rest = int(s.CI - full);
  for (i64 k = 0; k < s.KW; k++, d += s.CI) {
    bool in = (u64)(ix + k) < (u64)s.W;
    const f32 *p = row + (ix + k) * s.CI;
    for (i64 c = 0; c < full; c += VL) st(d + c, in ? ld(p + c) : vf{});
    if (rest) stn(d + full, in ? ldn(p + full, rest) : vf{}, rest);
  }
}

// Kernel planes [first, last) of an output plane that lie inside the volume.
struct ConvPlanes { i64 first, last; };
template <class S> OX ConvPlanes conv_planes(const S &s, i64 z) {
  if (!S::VOLUME) return {0, 1};
  i64 iz = z * s.SZ - s.PF, first = iz < 0 ? ox_min(s.KD, ox_up(-iz, s.DZ)) : 0;
  return {first, ox_max(first, ox_min(s.KD, iz < s.D ? ox_up(s.D - iz, s.DZ) : 0))};
}

// What the table sees of an output plane: what output row y reads at kernel plane kz and row ky is, at column x and
// channel c, base[kz * iks + y * ors + ky * irs + x * ips + c], for left <= x < right and the planes kz inside the volume.
struct ConvImage { const f32 *base; i64 iks, ors, irs, ips, left, right; ConvPlanes planes; };

// Pointers to the runs of an output pixel in row y at the image's edge, whose columns begin at ix: t[r * CONV_MR].
template <class S> static void conv_edge(const S &s, const ConvPlan &p, const ConvImage &m, i64 y, i64 ix, const f32 *zero,
                      f32 *&patch, const f32 **t) {
  bool inside = ix >= m.left && ix + s.KW <= m.right;
  for (i64 kz = 0; kz < s.KD; kz++) {
    bool beyond = kz < m.planes.first || kz >= m.planes.last;
    for (i64 ky = 0, iy = y * s.SY - s.PT; ky < s.KH; ky++, iy += s.DY) {
      const f32 *row = m.base + kz * m.iks + y * m.ors + ky * m.irs;
      bool out = beyond || (u64)iy >= (u64)s.H;
      if (p.rows) {
        if (out) *t = zero;
        else if (inside) *t = row + ix * m.ips;
        else conv_patch(s, row, ix, patch), *t = patch, patch += cround(p.R.len, 16);
        t += CONV_MR;
      } else {
        for (i64 kx = 0, i = ix; kx < s.KW; kx++, i += s.DX, t += CONV_MR)
          *t = out || i < m.left || i >= m.right ? zero : row + i * m.ips;
      }
    }
  }
}

// Distance of every run from an inner pixel's first one.
template <class S> OX void conv_offsets(const S &s, const ConvPlan &p, const ConvImage &m, i64 *d) {
  for (i64 kz = 0; kz < s.KD; kz++)
    for (i64 ky = 0; ky < s.KH; ky++)
      for (i64 kx = 0; kx < (p.rows ? 1 : s.KW); kx++) *d++ = kz * m.iks + ky * m.irs + kx * s.DX * m.ips;
}

// Copies what output rows [y0, y1) of a plane read, and has the image point there.
template <class S>
static void conv_repacked(const S &s, const ConvPlan &p, const f32 *base, i64 y0, i64 y1, f32 *&rep, ConvImage &m) {
  i64 row = (p.left + s.W + p.right) * p.apart, from = y0 * s.SY - s.PT, reach = (y1 - y0 - 1) * s.SY + 1;
  i64 first = ox_min(s.H, ox_max(0, from)), end = ox_min(s.H, from + reach + (s.KH - 1) * s.DY);
  i64 band = (y1 - y0) * row, plane = p.bands ? s.KH * band : ox_max(0, end - first) * row;
  for (i64 kz = m.planes.first; kz < m.planes.last; kz++) {
    const f32 *x = base + kz * m.iks;
    f32 *d = rep + (kz - m.planes.first) * plane;
    if (!p.bands) conv_repack(s, p, x, first, end, 1, d);
    else
      for (i64 ky = 0, y = from; ky < s.KH; ky++, y += s.DY, d += band) {
        i64 above = y < 0 ? ox_min(y1 - y0, ox_up(-y, s.SY)) : 0;  // rows that are not in the image
        conv_repack(s, p, x, y + above * s.SY, ox_min(s.H, y + reach), s.SY, d + above * row);
      }
  }
  m.base = rep + p.left * p.apart - m.planes.first * plane - (p.bands ? y0 * row : (first + s.PT) * row);
  m.iks = plane, m.ors = p.bands ? row : s.SY * row, m.irs = p.bands ? band : s.DY * row;
  m.ips = p.apart, m.left = -p.left, m.right = s.W + p.right;
  rep += (m.planes.last - m.planes.first) * plane;
}

// The image of output pixel q's plane, for the pixels of a block up to p1, and its offsets; a planar image is
// repacked as far as needed.
template <class S, class P>
static ConvImage conv_image(const S &s, const ConvPlan &p, const f32 *x, const P &q, i64 p1, f32 *&rep, i64 *offsets) {
  const f32 *base = x + q.n * s.ins + (conv_z(q) * s.SZ - s.PF) * s.ids;
  ConvImage m = {base - s.PT * s.irs, s.DZ * s.ids, s.SY * s.irs, s.DY * s.irs, s.ips, 0, s.W, conv_planes(s, conv_z(q))};
  if (p.repack) conv_repacked(s, p, base, q.y, ox_min(s.OH, q.y + (q.x + p1 - 1 - q.i) / s.OW + 1), rep, m);
  conv_offsets(s, p, m, offsets);
  return m;
}

// Pointers to the runs of `rows` neighbours in a row of the image, from a on at a distance of `step`, no run of which
// leaves the image: t[run * CONV_MR + row].
template <class S> OX void conv_inner(const S &s, const ConvPlan &p, const ConvImage &m, const ConvScratch &w, const f32 *a,
                   int rows, i64 step, const f32 **t) {
  if (!S::VOLUME) {
    for (i64 k = 0; k < p.R.runs; k++)
      for (int r = 0; r < rows; r++) t[k * CONV_MR + r] = a + w.offsets[k] + r * step;
    return;
  }
  i64 each = p.R.runs / s.KD, first = m.planes.first * each, last = m.planes.last * each;
  for (i64 k = first; k < last; k++)
    for (int r = 0; r < rows; r++) t[k * CONV_MR + r] = a + w.offsets[k] + r * step;
  if (last - first == p.R.runs) return;
  for (i64 k = 0; k < p.R.runs; k++)
    for (int r = 0; r < rows; r++) if (k < first || k >= last) t[k * CONV_MR + r] = w.zero;
}

// Runs of a tile that are not zeros in all of its rows, a bit each. Short runs are no gain, and counts beyond a word's
// bits have no place: then all are.
OX u64 conv_live(const ConvPlan &p, const f32 *const *t, int rows, const f32 *zero) {
  if (p.R.runs > 64 || p.R.len < 16) return ~0ull;
  u64 live = 0;
  for (i64 k = 0; k < p.R.runs; k++, t += CONV_MR)
    for (int r = 0; r < rows; r++)
      if (t[r] != zero) { live |= 1ull << k; break; }
  return live ? live : 1;  // the sum of none is zero, too
}

// Neighbouring live runs, the first ones in [from, end); none where count is 0.
struct ConvSpan { i64 first, count; };
OX ConvSpan conv_span(u64 live, i64 from, i64 end) {
  if (live == ~0ull) return {from, end - from};  // perhaps of more runs than there are bits
  u64 rest = from < end ? live >> from : 0;
  if (!rest) return {from, 0};
  i64 first = from + __builtin_ctzll(rest), count = __builtin_ctzll(~(live >> first));  // never of all bits
  return {first, ox_max(0, ox_min(end - first, count))};
}

// Copies the pixels of a tile, and has the table point to the copies.
template <class S> static void conv_gather(const S &s, const ConvPlan &p, int rows, const f32 **t, f32 *&d) {
  for (int r = 0; r < rows; r++, d += p.apart) {
    __builtin_memcpy(d, t[r], 4 * s.CI);
    t[r] = d;
  }
}

// Fills the table of pixels [p0, p1): table[tile][run][row].
template <class S>
__attribute__((noinline)) static void conv_table(
    const S &s, const ConvPlan &p, const f32 *x, i64 p0, i64 p1, const ConvScratch &m) {
  ConvTiles T = conv_tiles(p1 - p0);
  const f32 **t = m.table;
  f32 *patch = m.patch, *rep = m.repacked;
  auto q = conv_px(s, p0);
  ConvImage image = conv_image(s, p, x, q, p1, rep, m.offsets);
  i64 ylast = s.H - (s.KH - 1) * s.DY, xlast = image.right - (s.KW - 1) * s.DX;
  for (i64 j = 0; j < T.count; j++, t += p.R.runs * CONV_MR) {
    int rows = T.size(j);
    i64 iy = q.y * s.SY - s.PT, ix = q.x * s.SX - s.PL, step = s.SX * image.ips;
    bool inner = iy >= 0 && iy < ylast && ix >= image.left && ix + (rows - 1) * s.SX < xlast && q.x + rows < s.OW;
    if (inner) {
      conv_inner(s, p, image, m, image.base + q.y * image.ors + ix * image.ips, rows, step, t);
      q.i += rows, q.x += rows;
    }
    for (int r = inner ? rows : 0; r < rows; r++) {
      iy = q.y * s.SY - s.PT, ix = q.x * s.SX - s.PL;
      if (iy >= 0 && iy < ylast && ix >= image.left && ix < xlast)
        conv_inner(s, p, image, m, image.base + q.y * image.ors + ix * image.ips, 1, 0, t + r);
      else
        conv_edge(s, p, image, q.y, ix, m.zero, patch, t + r);
      conv_next(s, q);
      if (q.y == 0 && q.x == 0 && q.i < p1) image = conv_image(s, p, x, q, p1, rep, m.offsets);
    }
    if (p.gather) conv_gather(s, p, rows, t, patch);
    for (int r = rows; r < CONV_MR; r++)
      for (i64 k = 0; k < p.R.runs; k++) t[k * CONV_MR + r] = t[k * CONV_MR + rows - 1];
    if (S::SKIPS) m.live[j] = conv_live(p, t, rows, m.zero);
  }
}

#include "conv_packing.h"

// ---------------------------------------------------------------------------------------------------
// Hands `rows` pixels from q on by `cols` channels of finished sums (row stride ds) to the epilogue. Never
// inlined, and with a copy of the epilogue: its pointers stay in registers, since no store can alias them.
template <class S, class P, class E>
__attribute__((noinline)) static void conv_finish(
    const S &s, const f32 *D, i64 ds, P q, i64 rows, i64 c, i64 cols, const E &call) {
  const E epi = call;
  i64 full = cols / VL * VL;
  if (cols == CONV_NR) {  // a whole panel: the loop over its vectors would take longer than these do
    for (i64 r = 0; r < rows; r++, D += ds) {
      epi(q, c, ld(D), Full{});
      epi(q, c + VL, ld(D + VL), Full{});
      conv_next(s, q);
    }
    return;
  }
  for (i64 r = 0; r < rows; r++, D += ds) {
    for (i64 j = 0; j < full; j += VL) epi(q, c + j, ld(D + j), Full{});
    if (full < cols) epi(q, c + full, ld(D + full), Part{int(cols - full)});
    conv_next(s, q);
  }
}

#include "conv_across.h"

// A matrix that the epilogue writes or reads: a row of floats for each pixel. Only a hint: its lines are fetched while
// the tile is computed; without it the epilogue waits for them.
struct ConvLines { const f32 *p; i64 row; };
template <int N> struct ConvNear { ConvLines at[N > 0 ? N : 1]; };
template <int N> OX void conv_near(const ConvNear<N> &x, i64 i, i64 rows, i64 c, i64 cols) {
  for (int k = 0; k < N; k++) {
    const f32 *p = x.at[k].p + i * x.at[k].row + c;
    for (i64 r = 0; r < rows; r++, p += x.at[k].row)
      for (i64 j = 0; j < cols; j += 16) __builtin_prefetch(p + j, 0, 2);
  }
}

// Sums of few terms: conv_tile for whole panels, of NV vectors, whose sums go to the epilogue from where they were added
// up. At 16 terms the way through D takes a quarter of the time. The same bits.
#define CONV_END(i) if constexpr (i < MR) { epi(q, c, c##i, Full{}); \
  if constexpr (NV > 1) epi(q, c + VL, d##i, Full{}); conv_next(s, q); }
template <int MR, int NV, class S, class E>
__attribute__((noinline)) static void conv_tile_short(
    const S &s, const f32 *const *A, i64 off, const ConvRuns &R, const f32 *B, ConvFetch next, i64 i, i64 c, const E &call) {
  CONV_ROWS(CONV_DECL)
  const char *far = (const char *)next.at;
  for (i64 r = 0; r < R.runs; r++, A += CONV_MR) {
    CONV_ROWS(CONV_PTR)
    i64 k = 0;
    if constexpr (CONV_TERMS > 2)
      for (; k + CONV_TERMS <= R.len; far += CONV_TERMS * next.step) {
        conv_fetch_lines(far);
        OX_UNROLL for (int t = 0; t < CONV_TERMS; t++) CONV_TERM()
      }
    while (k < R.len) {
      __builtin_prefetch(far, 0, CONV_LEVEL);
      far += next.step;
      CONV_TERM()
    }
  }
  const E epi = call;
  auto q = conv_px(s, i);
  CONV_ROWS(CONV_END)
}
#undef CONV_DECL
#undef CONV_PTR
#undef CONV_FMA
#undef CONV_TERM
#undef CONV_END

// Whether there are such tiles for so many output channels (of a group), and terms of a sum.
constexpr bool conv_short(i64 channels, i64 terms) {
  return terms <= CONV_FLUSH && (channels >= CONV_NR || channels % CONV_NR == VL);
}

// A tile of `rows` pixels from i on by `cols` channels from c on, if there is one of its kind: the common ones alone.
template <ConvWidths W, class S, class E>
OX bool conv_tile_to_end(const S &s, int rows, i64 cols, const f32 *const *A, i64 off, const ConvRuns &R, const f32 *B,
                         ConvFetch next, i64 i, i64 c, const E &epi) {
#define CONV_CASE(m, nv) if (rows == (m) && cols == nv * VL) return conv_tile_short<m, nv>(s, A, off, R, B, next, i, c, epi), true;
  if constexpr (W != CONV_NARROW) { CONV_CASE(CONV_MR, 2) CONV_CASE(CONV_MR - 1, 2) }
  if constexpr (W != CONV_WIDE) { CONV_CASE(CONV_MR, 1) CONV_CASE(CONV_MR - 1, 1) }
#undef CONV_CASE
  return false;
}

// A tile's live runs in [from, end), added to D where earlier ones were.
template <ConvWidths W>
__attribute__((noinline)) static void conv_spans(int rows, i64 cols, u64 live, const f32 *const *A, i64 off,
                                                 const ConvPlan &p, i64 from, i64 end, const f32 *B, f32 *D) {
  ConvRuns R = p.R;
  R.more = conv_span(live, 0, from).count > 0;
  for (ConvSpan k = conv_span(live, from, end); k.count; k = conv_span(live, k.first + k.count, end)) {
    R.runs = k.count;
    const f32 *some = B + k.first * R.len * CONV_NR;
    conv_tile_any<W>(rows, cols, A + k.first * CONV_MR, off, R, some, D, CONV_NR, {some, 0});
    R.more = true;
  }
}

// Runs [from, end) of tile t; of all runs, those that are live.
template <ConvWidths W, class S>
OX void conv_runs_of(const ConvPlan &p, const ConvScratch &m, const ConvTiles &T, i64 t, i64 cols, const f32 *const *A, i64 off,
                     i64 from, i64 end, const f32 *B, f32 *D, ConvFetch next) {
  if constexpr (S::SKIPS) return conv_spans<W>(T.size(t), cols, m.live[t], A, off, p, from, end, B, D);
  ConvRuns R = p.R;
  R.runs = end - from, R.more = from > 0;
  conv_tile_any<W>(T.size(t), cols, A + from * CONV_MR, off, R, B + from * R.len * CONV_NR, D, CONV_NR, next);
}

// All passes of a block over a panel's weights but the last one: a tile's sums are kept for it. The first run of the last.
template <ConvWidths W, class S>
__attribute__((noinline)) static i64 conv_passes(
    const ConvPlan &p, const ConvScratch &m, const ConvTiles &T, i64 cols, i64 off, const f32 *B) {
  i64 from = 0;
  for (; from + p.some < p.R.runs; from += p.some)
    for (i64 t = 0; t < T.count; t++) {
      const ConvFetch next = conv_fetch(B + from * p.R.len * CONV_NR, p.some * p.R.len, t, T.count);
      conv_runs_of<W, S>(p, m, T, t, cols, m.table + t * p.R.runs * CONV_MR, off, from, from + p.some, B,
                         m.kept + t * CONV_MR * CONV_NR, next);
    }
  return from;
}

// Where inputs and results have so many bytes that they come from memory, a tile is multiplied by several panels in turn,
// whose weights stay in the second-level cache: so results are written, and residuals read, in longer runs than a panel's.
static constexpr i64 CONV_FAR = 6 << 20, CONV_KEPT = VL >= 16 ? 128 * 1024 : 64 * 1024;
template <class S> OX i64 conv_in_turn(const S &s, const ConvPlan &p, i64 K) {
  if (4 * (s.N * s.D * s.H * s.W * s.CI + p.pixels * s.CO) < CONV_FAR) return 1;
  return ox_max(1, CONV_KEPT / ox_max(1, 4 * K * CONV_NR));
}

// What a tile fetches while it is multiplied by panel `n` of `panels` in turn: the first one of a block the panel after it,
// others their share of the next tile's input, where this lies side by side.
template <class S>
OX ConvFetch conv_fetch_in_turn(const S &s, const ConvPlan &p, const f32 *const *A, const f32 *B, i64 K, bool first, bool last,
                                int rows, i64 n, i64 panels) {
  if (first) return {B + K * CONV_NR, n + 1 < panels ? 4 * CONV_NR : 0};
  if (last || p.R.runs > 1 || p.gather || s.SX > 1) return {B, 0};
  i64 step = 4 * rows * s.ips / (panels * K);
  return {A[CONV_MR] + n * K * step / 4, step};
}

// Pixels [p0, p1), of which the table has been filled, by panels [n0, n1) of all groups.
template <ConvWidths W, bool SHORT, class S, class E, int N>
OX void conv_panels(const S &s, const ConvPlan &p, const ConvScratch &m, const f32 *w, i64 p0, i64 p1, i64 n0, i64 n1,
                    const E &epi, const ConvNear<N> &near) {
  ConvTiles T = conv_tiles(p1 - p0);
  ConvSums<conv_is_across<E>> sums = {m.D};
  i64 K = p.R.runs * p.R.len, most = conv_is_across<E> || p.kept ? 1 : conv_in_turn(s, p, K), from = 0;
  for (i64 m0 = n0, m1; m0 < n1; m0 = m1) {
    m1 = ox_min(n1, m0 + most);
    if (p.kept) {
      i64 cols = ox_min(CONV_NR, p.cog - m0 % p.panels * CONV_NR);
      from = conv_passes<W, S>(p, m, T, cols, m0 / p.panels * p.cig, w + m0 * K * CONV_NR);
    }
    for (i64 t = 0, i = p0; t < T.count; i += T.size(t++))
      for (i64 n = m0; n < m1; n++) {
        i64 g = n / p.panels, c = n % p.panels * CONV_NR, cols = ox_min(CONV_NR, p.cog - c);
        conv_near(near, i, T.size(t), g * p.cog + c, cols);
        const f32 *const *A = m.table + t * p.R.runs * CONV_MR, *B = w + n * K * CONV_NR;
        const ConvFetch next = m1 - m0 == 1 ? conv_fetch(B + from * p.R.len * CONV_NR, K - from * p.R.len, t, T.count)
            : conv_fetch_in_turn(s, p, A, B, K, t == 0, t + 1 == T.count, T.size(t), n - m0, m1 - m0);
        if constexpr (SHORT && !S::SKIPS && !conv_is_across<E>)
          if (conv_tile_to_end<W>(s, T.size(t), cols, A, g * p.cig, p.R, B, next, i, g * p.cog + c, epi)) continue;
        if (from) __builtin_memcpy(sums.next(), m.kept + t * CONV_MR * CONV_NR, 4 * CONV_NR * T.size(t));
        conv_runs_of<W, S>(p, m, T, t, cols, A, g * p.cig, from, p.R.runs, B, sums.next(), next);
        sums.finish(s, i, T.size(t), t + 1 == T.count, g * p.cog + c, cols, epi);
      }
  }
}

// Work items [first, last) of a convolution of x with packed weights w. For every output pixel and vector of
// output channels, epi(Px pixel, i64 channel, vf sum, Full or Part lanes) is called once: it adds the bias
// and whatever follows, and stores.
template <ConvWidths W = CONV_BOTH, bool SHORT = false, class S, class E, int N = 0>
static void conv_items(
    const S &s, const f32 *x, const f32 *w, i64 first, i64 last, void *scratch, const E &epi,
    const ConvNear<N> &near = {}) {
  ConvPlan p = conv_plan(s);
  ConvScratch m = conv_divide(p, scratch);
  i64 &built = *(i64 *)scratch;
  for (i64 i = 0; i < p.zero; i++) m.zero[i] = 0;
  i64 all = p.panels * s.G;
  for (i64 item = first; item < last; item++) {
    i64 block = item / p.parts, part = item % p.parts;
    i64 p0 = conv_block_begin(p, block), p1 = conv_block_begin(p, block + 1);
    if (built != block) conv_table(s, p, x, p0, p1, m), built = block;
    conv_panels<W, SHORT>(s, p, m, w, p0, p1, all * part / p.parts, all * (part + 1) / p.parts, epi, near);
  }
}

// Output rows [y0, y1) of image n, with the scratch and the epilogue of conv_items.
template <ConvWidths W = CONV_BOTH, bool SHORT = false, class E>
static void conv_rows(
    const ConvShape &s, const f32 *x, const f32 *w, i64 n, i64 y0, i64 y1, void *scratch, const E &epi) {
  ConvPlan p = conv_plan(s);
  ConvScratch m = conv_divide(p, scratch);
  for (i64 i = 0; i < p.zero; i++) m.zero[i] = 0;
  i64 end = (n * s.OH + y1) * s.OW, step = ox_max(1, ox_up(p.pixels, p.blocks));
  for (i64 p0 = (n * s.OH + y0) * s.OW, p1; p0 < end; p0 = p1) {
    p1 = ox_min(end, p0 + step);
    conv_table(s, p, x, p0, p1, m);
    conv_panels<W, SHORT>(s, p, m, w, p0, p1, 0, p.panels * s.G, epi, ConvNear<0>{});
  }
}
