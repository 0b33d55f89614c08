// Elementwise math on whole vectors: v_exp(x), v_tanh(x), ... for V<f32> and V<f64>, and the integer forms
// of v_abs, v_sign, v_min and v_max; vint.h has those of v_mod, v_idiv and v_pow.
//
// f32 has polynomials of its own (bounds in ULP stand beside each function; tests/test_vmath.py checks
// them), and so have exp, log, tanh, sin and cos of f64 (vmath64.h); the rarer functions call libm lane
// by lane through __builtin_ functions, so that nothing is included or declared. Results follow IEEE 754: NaN,
// infinities, -0.0 and denormals included.
//
// Every function has three forms at most: AVX-512 (VL 16), AVX (VL 8), and vector extensions that compile
// anywhere. All rely on a * b + c being contracted to one fused instruction where the machine has it, but
// none needs it to be right. Coefficients are minimax fits of the relative error, rounded to f32.
#pragma once
#include "vec.h"
#if defined(__AVX512F__) && defined(__AVX512DQ__) && ONNXC_VL == 16
#define OX_512 1
#elif defined(__AVX__) && ONNXC_VL == 8
#define OX_256 1
#elif defined(__SSE4_1__) && ONNXC_VL == 4
#define OX_128 1
#endif
#if OX_512
#define OX_ALL ((u16)-1)  // the mask of all lanes
#define OX_CUR 4          // "round as the mode register says": the last argument of most builtins
#endif

template <class T> static constexpr bool is_float = (T)0.5 != 0;

static constexpr f32 F_INF = __builtin_inff();

// ---- bits: signs, tests -------------------------------------------------------------------------------

template <class A> OX A v_signbit(A x) {
  typedef typename int_of<sizeof(elem<A>)>::s I;
  return bits<A>(bits<V<I>>(x) & bc((I)((I)1 << (sizeof(I) * 8 - 1))));
}
template <class A> OX A v_xor(A a, A b) { return bits<A>(bits<mask_of<A>>(a) ^ bits<mask_of<A>>(b)); }
template <class A> OX A v_or(A a, A b) { return bits<A>(bits<mask_of<A>>(a) | bits<mask_of<A>>(b)); }
template <class A> OX A v_neg(A x) {
  typedef elem<A> T;
  if constexpr (is_float<T>) return v_xor(x, bc((T)-0.0));
  else return (x ^ bc((T)-1)) + bc((T)1);
}
template <class A> OX A v_abs(A x) {
  typedef elem<A> T;
  if constexpr (is_float<T>) return v_xor(x, v_signbit(x));
  else if constexpr ((T)-1 > 0) return x;
  else return v_sel(v_lt(x, A{}), v_neg(x), x);
}
template <class A> OX A v_copysign(A magnitude, A sign) { return v_or(v_abs(magnitude), v_signbit(sign)); }
template <class A> OX mask_of<A> v_isnan(A x) { return v_ne(x, x); }
template <class A> OX mask_of<A> v_isinf(A x) { return v_eq(v_abs(x), bc((elem<A>)__builtin_inf())); }

// -1, 0 or 1; a NaN stays, and both zeros give +0.
template <class A> OX A v_sign(A x) {
  typedef elem<A> T;
  const A one = bc((T)1), zero = {};
  A r = v_sel(v_gt(x, zero), one, v_sel(v_lt(x, zero), bc((T)-1), zero));
  if constexpr (is_float<T>) return v_sel(v_ne(x, x), x, r);
  else return r;
}

// ---- minimum, maximum ---------------------------------------------------------------------------------

// One instruction on x86: the second operand where the two are equal or either is NaN.
template <class A> OX A v_max_fast(A a, A b) { return v_sel(v_gt(a, b), a, b); }
template <class A> OX A v_min_fast(A a, A b) { return v_sel(v_lt(a, b), a, b); }
#if OX_512
template <> inline OX_LAMBDA vf v_max_fast(vf a, vf b) {
  return __builtin_ia32_maxps512_mask(a, b, a, OX_ALL, OX_CUR);
}
template <> inline OX_LAMBDA vf v_min_fast(vf a, vf b) {
  return __builtin_ia32_minps512_mask(a, b, a, OX_ALL, OX_CUR);
}
#elif OX_256
template <> inline OX_LAMBDA vf v_max_fast(vf a, vf b) { return __builtin_ia32_maxps256(a, b); }
template <> inline OX_LAMBDA vf v_min_fast(vf a, vf b) { return __builtin_ia32_minps256(a, b); }
#elif OX_128
template <> inline OX_LAMBDA vf v_max_fast(vf a, vf b) { return __builtin_ia32_maxps(a, b); }
template <> inline OX_LAMBDA vf v_min_fast(vf a, vf b) { return __builtin_ia32_minps(a, b); }
#endif

// a where it is no number, else r. Not as a select: of `x != x` for an x that was selected g++ asks the same of both
// sides, which takes exponential time for a chain of maxima.
template <class A> OX A v_nan_or(A a, A r) {
  typedef mask_of<A> M;
  const M nan = v_ne(a, a);
  return bits<A>((bits<M>(a) & nan) | (bits<M>(r) & ~nan));
}
#if OX_512
template <> inline OX_LAMBDA vf v_nan_or(vf a, vf r) {
  return __builtin_ia32_blendmps_512_mask(r, a, __builtin_ia32_cmpps512_mask(a, a, 3, OX_ALL, OX_CUR));
}
#elif OX_256
template <> inline OX_LAMBDA vf v_nan_or(vf a, vf r) {
  return __builtin_ia32_blendvps256(r, a, __builtin_ia32_cmpps256(a, a, 3));
}
#endif

// As numpy.maximum and ONNX Max: a NaN in either gives NaN; of two zeros the second comes out.
template <class A> OX A v_max(A a, A b) {
  if constexpr (is_float<elem<A>>) return v_nan_or(a, v_max_fast(a, b));
  else return v_max_fast(a, b);
}
template <class A> OX A v_min(A a, A b) {
  if constexpr (is_float<elem<A>>) return v_nan_or(a, v_min_fast(a, b));
  else return v_min_fast(a, b);
}
// max(x, 0) as onnxruntime's Relu: NaN and -0.0 pass.
template <class A> OX A v_relu(A x) { return v_max_fast(A{}, x); }
// lo <= x <= hi in two instructions; NaN passes.
template <class A> OX A v_clip(A x, elem<A> lo, elem<A> hi) {
  return v_min_fast(bc(hi), v_max_fast(bc(lo), x));
}

// Whether any lane of a is greater than b's.
OX bool v_any_gt(vf a, vf b) {
#if OX_512
  return __builtin_ia32_cmpps512_mask(a, b, 30, OX_ALL, OX_CUR) != 0;
#elif OX_256
  return __builtin_ia32_movmskps256((vf)(a > b)) != 0;
#elif OX_128
  return __builtin_ia32_movmskps((vf)(a > b)) != 0;
#else
  vi m = a > b;
  i32 any = 0;
  OX_UNROLL for (int i = 0; i < VL; i++) any |= m[i];
  return any != 0;
#endif
}

// ---- rounding -----------------------------------------------------------------------------------------

// Adding and subtracting 2^23 (2^52) rounds half to even; larger values have no fraction. The sign of x
// is put back so that -0.3 gives -0.
template <class A> OX A v_round_any(A x) {
  typedef elem<A> T;
  const A big = bc((T)(sizeof(T) == 4 ? 0x1p23 : 0x1p52)), ax = v_abs(x);
  return v_or(v_sel(v_lt(ax, big), (ax + big) - big, ax), v_signbit(x));
}
template <class A> OX A v_round(A x) { return v_round_any(x); }
template <class A> OX A v_floor(A x) {
  A r = v_round_any(x);
  return v_sel(v_gt(r, x), r - (elem<A>)1, r);
}
template <class A> OX A v_ceil(A x) {
  A r = v_round_any(x);
  return v_or(v_sel(v_lt(r, x), r + (elem<A>)1, r), v_signbit(x));
}
template <class A> OX A v_trunc(A x) { return v_or(v_floor(v_abs(x)), v_signbit(x)); }
#if OX_512 || OX_256 || OX_128
#if OX_512
#define OX_ROUND(x, mode) __builtin_ia32_rndscaleps_mask(x, mode, x, OX_ALL, OX_CUR)
#elif OX_256
#define OX_ROUND(x, mode) __builtin_ia32_roundps256(x, 8 | mode)
#else
#define OX_ROUND(x, mode) __builtin_ia32_roundps(x, 8 | mode)
#endif
template <> inline OX_LAMBDA vf v_round(vf x) { return OX_ROUND(x, 0); }
template <> inline OX_LAMBDA vf v_floor(vf x) { return OX_ROUND(x, 1); }
template <> inline OX_LAMBDA vf v_ceil(vf x) { return OX_ROUND(x, 2); }
template <> inline OX_LAMBDA vf v_trunc(vf x) { return OX_ROUND(x, 3); }
#endif

// ---- square root ----------------------------------------------------------------------------------------

template <class A> OX A v_sqrt(A x) {
  A r;
  OX_UNROLL for (int i = 0; i < VL; i++) {
    if constexpr (sizeof(elem<A>) == 4) r[i] = __builtin_sqrtf(x[i]);
    else r[i] = __builtin_sqrt(x[i]);
  }
  return r;
}
#if OX_512
template <> inline OX_LAMBDA vf v_sqrt(vf x) { return __builtin_ia32_sqrtps512_mask(x, x, OX_ALL, OX_CUR); }
#elif OX_256
template <> inline OX_LAMBDA vf v_sqrt(vf x) { return __builtin_ia32_sqrtps256(x); }
#elif OX_128
template <> inline OX_LAMBDA vf v_sqrt(vf x) { return __builtin_ia32_sqrtps(x); }
#endif
template <class A> OX A v_rsqrt(A x) { return (elem<A>)1 / v_sqrt(x); }

// ---- exponentials -------------------------------------------------------------------------------------

// p 2^n for n in [-300, 300], given as q = n + 1.5 * 2^23 (its low bits are n), rounded once: results may
// be denormal, zero or infinite. In two steps because 2^n may not be a normal number: the first is exact.
OX vf v_scale(vf p, vf q) {
#if OX_512
  return __builtin_ia32_scalefps512_mask(p, q - 0x1.8p23f, p, OX_ALL, OX_CUR);
#else
  vi k = bits<vi>(q), h = k >> 1;
  return p * bits<vf>((h << 23) + 0x3f800000) * bits<vf>(((k - h) << 23) + 0x3f800000);
#endif
}

// Functions of AVX2 have a short form for arguments that need no care: so many instructions wait for each other that
// the processor's schedulers, not its units, bound how many vectors are under way at once. Where a lane needs more, a
// call replaces it and leaves the others as they are: what a lane gives depends on nothing but its own argument.
#if OX_256 && defined(__AVX2__) && defined(__FMA__)
#define OX_SHORT 1
#define OX_SELDOM static __attribute__((noinline, cold, unused))
#define OX_OUTSIDE(m) __builtin_expect(__builtin_ia32_movmskps256((vf)(m)), 0)  // whether any lane is marked
#endif

// e^x, 1.3 ULP, denormal results included; NaN passes. x = n ln2 + r: adding 1.5 * 2^23 rounds x / ln2 to a whole
// number (or less, to eighths or sixteenths), and of the two parts of ln2 the first times n is exact.
#if OX_512
static const f32 EXP2_16TH[16] __attribute__((aligned(64))) = {  // 2^(k/16)
    1.0f,        1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
    1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f};
OX vf v_exp(vf x) {
  // n in sixteenths: 2^(k/16) comes from a register, r is so small that degree 3 does, and scalef floors n.
  x = v_clip(x, -104.0f, 89.0f);
  vf q = x * 0x1.715476p0f + 0x1.8p19f, n = q - 0x1.8p19f;
  vf r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  vf t = __builtin_shuffle(*(const vf *)EXP2_16TH, bits<vi>(q));
  vf p = (r * 0.16666839f + 0.50001627f) * (r * r) + r;
  return __builtin_ia32_scalefps512_mask(p * t + t, n, n, OX_ALL, OX_CUR);
}
#elif OX_SHORT
// The bits of 2^(i/8), less i in the place that the low bits of q << 20 have.
static const u32 EXP2_8TH[8] __attribute__((aligned(32))) = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                                             0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
// n in eighths, as q = 8 n + 1.5 * 2^23, s = 2^n and p = e^r - 1.
struct ExpNear { vf q, s, p; };
OX ExpNear v_exp_near(vf x) {
  vf q = x * 0x1.715476p3f + 0x1.8p23f, n = q - 0x1.8p23f;
  vf r = (x - n * 0x1.62e4p-4f) - n * 0x1.7f7d1cp-23f, t = r * r;
  vf p = (t * 0.04167063534259796f + (r * 0.16668027639389038f + 0.5f)) * t + r;
  vf power = __builtin_ia32_permvarsf256(bits<vf>(ld(EXP2_8TH)), bits<vi>(q));
  return {q, bits<vf>(bits<V<u32>>(power) + (bits<V<u32>>(q) << 20)), p};
}
// Beyond 87 on either side 2^n may be no normal number. Masks make -infinity frequent, so that what is surely zero or
// infinite is told from the rest.
OX_SELDOM vf v_exp_far(vf x, vf near) {
  const vi low = x < -104.0f, high = x > 89.0f, edge = ~((v_abs(x) <= 87.0f) | low | high);
  near = high ? bc(F_INF) : low ? vf{} : near;
  if (__builtin_ia32_movmskps256((vf)edge) == 0) return near;
  const ExpNear e = v_exp_near((low | high) ? vf{} : x);
  const vi n = (bits<vi>(e.q) - bits<vi>(bc(0x1.8p23f))) >> 3;
  const vf s = bits<vf>(bits<vi>(e.s) - (n << 23));
  return edge ? v_scale(e.p * s + s, bits<vf>(n)) : near;
}
OX vf v_exp(vf x) {
  const ExpNear e = v_exp_near(x);
  const vf r = e.p * e.s + e.s;
  return OX_OUTSIDE(~(v_abs(x) <= 87.0f)) ? v_exp_far(x, r) : r;
}
#else
OX vf v_exp(vf x) {
  x = v_clip(x, -104.0f, 89.0f);
  vf q = x * 0x1.715476p0f + 0x1.8p23f, n = q - 0x1.8p23f;
  vf r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, t = r * r;
  vf p = (t * 0.0013818938750773668f + (r * 0.008368703536689281f + 0.04166828840970993f)) * t +
         (r * 0.1666652113199234f + 0.4999999403953552f);
  return v_scale(p * t + (r + 1.0f), q);
}
#endif

// 1.1 ULP. As exp, but r is exact.
OX vf v_exp2(vf x) {
  x = v_clip(x, -151.0f, 129.0f);
  vf q = x + 0x1.8p23f, r = x - (q - 0x1.8p23f);
  vf p = r * 0.0001532926398795098f + 0.0013390969252213836f;
  p = p * r + 0.00961849931627512f;
  p = p * r + 0.05550359562039375f;
  p = p * r + 0.24022647738456726f;
  p = p * r + 0.6931471824645996f;
  return v_scale(p * r + 1.0f, q);
}

// 1.7 ULP. 2^n (e^r - 1) + (2^n - 1), with 2^(n-1) in place of 2^n so that n = 128 does not overflow.
OX vf v_expm1(vf x) {
  vf y = v_clip(x, -18.0f, 89.0f), q = y * 0x1.715476p0f + 0x1.8p23f, n = q - 0x1.8p23f;
  vf r = (y - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, t = r * r;
  vf p = (t * 0.0013868435053154826f + (r * 0.008366432040929794f + 0.04166746139526367f)) * t +
         (r * 0.1666654497385025f + 0.4999999701976776f);
  vf s = bits<vf>((bits<vi>(q) + 126) << 23);
  y = s * (p * t + r) + (s - 0.5f);
  return v_or(y + y, v_signbit(x));
}

// 3 ULP. With 2 |x| = n ln2 + 2 r: (2^n e^2r - 1) / (2^n e^2r + 1), and p = e^2r - 1 so that small results
// keep their digits. An error of r matters the less the larger n is, so ln2 needs no second part. Beyond
// 9.02 the nearest float is 1, and at 10 the quotient is 1.
OX vf v_tanh(vf x) {
  vf a = v_min_fast(bc(10.0f), v_abs(x)), q = a * 0x1.715476p1f + 0x1.8p23f;
  vf r = a - (q - 0x1.8p23f) * 0x1.62e43p-2f, h = bits<vf>((bits<vi>(q) + 128) << 23), t = r * r;
  vf p = r * (16 * 0.008366432040929794f) + 8 * 0.04166746139526367f;
  p = (t * (32 * 0.0013868435053154826f) + p) * t + (r * (4 * 0.1666654497385025f) + 2 * 0.4999999701976776f);
  p = p * t + r;
  vf s = h * 0.5f;
  return v_or((h * p + (s - 1.0f)) / (h * p + (s + 1.0f)), v_signbit(x));
}

// erf, 2.3 ULP: x times a polynomial for the nearest column, which adding a power of two finds; beyond 3.84 the nearest
// float is 1.
#if OX_SHORT
// 8 columns, which one instruction looks up (16 take three): coefficients of t^0 .. t^7 around x = 17/32 k.
static const f32 ERF8[8][8] __attribute__((aligned(32))) = {
    {1.12837911f, 1.03064179f, 0.816054821f, 0.612265229f, 0.469339281f, 0.376405716f, 0.313723445f, 0.268907517f},
    {0.0f, -0.338311315f, -0.424613595f, -0.328330994f, -0.215058103f, -0.141339287f, -0.0984093472f, -0.0723109543f},
    {-0.376119196f, -0.21409443f, 0.0347356535f, 0.117024787f, 0.088862896f, 0.0522374362f, 0.0308287703f,
     0.0194456447f},
    {0.0f, 0.170458704f, 0.111302502f, 0.00251130038f, -0.0262705032f, -0.0180644765f, -0.00958373491f,
     -0.00522651011f},
    {0.112615146f, 0.0246046502f, -0.0596727282f, -0.0324567109f, -4.06939544e-05f, 0.00498230616f, 0.00291214976f,
     0.00127857795f},
    {0.0f, -0.0498991162f, -0.00625094865f, 0.0172244608f, 0.00589254079f, -0.000441951008f, -0.000774925051f,
     -0.000525223149f},
    {-0.0245956331f, 0.00173779018f, 0.0161956325f, -0.000556383515f, -0.00362274144f, -0.000507868419f,
     -0.00012565247f, 0.0026260023f},
    {0.0f, 0.0106087355f, -0.00328929303f, -0.00313199544f, 0.000861148234f, 0.000446711696f, 6.97062351e-05f,
     0.00655827392f}};
OX vf v_erf(vf x) {
  vf a = v_min_fast(bc(3.87f), v_abs(x)), q = a * (32.0f / 17) + 0x1.8p23f;
  vf t = a - (q - 0x1.8p23f) * (17.0f / 32), t2 = t * t, c[8];
  OX_UNROLL for (int i = 0; i < 8; i++) c[i] = __builtin_ia32_permvarsf256(*(const vf *)ERF8[i], bits<vi>(q));
  vf p = (c[7] * t2 + (c[6] * t + c[5])) * (t2 * t2) + ((c[4] * t + c[3]) * t2 + (c[2] * t + c[1]));
  return v_or(v_min_fast(bc(1.0f), (p * t + c[0]) * a), v_signbit(x));
}
#else
// erf(x) / x around x = k/4: coefficients of t^5 .. t^0 for |t| <= 1/8, one column for each k.
static const f32 ERF[6][16] __attribute__((aligned(64))) = {
    {2.03030198e-15f, -0.0357078947f, -0.0500637889f, -0.0375849456f, -0.0123185515f, 0.00835331623f,
     0.0170487668f, 0.0150990691f, 0.00870202389f, 0.00358962477f, 0.000353632524f, -0.000686486019f,
     -0.00101531367f, -0.000632408308f, -0.00042018597f, -0.00049887452f},
    {0.110270672f, 0.0883619413f, 0.0328263864f, -0.0249738172f, -0.0567243509f, -0.0574448183f,
     -0.0407755189f, -0.020023562f, -0.00437648874f, 0.00252048904f, 0.00522502046f, 0.00482112262f,
     0.00405779388f, 0.00246767607f, 0.0014546141f, 0.00181051402f},
    {7.35249077e-15f, 0.104720481f, 0.166903481f, 0.169339746f, 0.125880465f, 0.0663278252f,
     0.0161921158f, -0.013679591f, -0.0251767412f, -0.0255060382f, -0.0212373938f, -0.0162390359f,
     -0.0120286215f, -0.00889473129f, -0.00665137032f, -0.00505195651f},
    {-0.376092553f, -0.335345119f, -0.229921237f, -0.100212216f, 0.0124904048f, 0.0846241787f,
     0.114469461f, 0.11409907f, 0.0985764787f, 0.0791144818f, 0.0614440143f, 0.0474138334f, 0.0368752666f,
     0.0291014351f, 0.0233245064f, 0.018954685f},
    {-1.66829839e-17f, -0.181165725f, -0.32443437f, -0.407035261f, -0.427593291f, -0.40143919f,
     -0.350093216f, -0.292021364f, -0.238497078f, -0.194067568f, -0.159063578f, -0.132004902f,
     -0.111062244f, -0.0946651623f, -0.0816310495f, -0.0711108744f},
    {1.12837911f, 1.10530555f, 1.04099977f, 0.948207498f, 0.842700779f, 0.738320112f, 0.644070089f,
     0.563812375f, 0.497661144f, 0.44379434f, 0.399837226f, 0.363599777f, 0.333325982f, 0.307690978f,
     0.28571406f, 0.266666651f},
};

// row[index mod 16] in each lane.
OX vf v_lookup(const f32 *row, vi index) {
#if OX_512
  return __builtin_shuffle(*(const vf *)row, index);
#else
  vf r;
  OX_UNROLL for (int i = 0; i < VL; i++) r[i] = row[index[i] & 15];
  return r;
#endif
}
OX vf v_erf(vf x) {
  vf a = v_min_fast(bc(3.87f), v_abs(x)), q = a + 0x1.8p21f, t = a - (q - 0x1.8p21f);
  vi k = bits<vi>(q);
  vf p = v_lookup(ERF[0], k);
  OX_UNROLL for (int i = 1; i < 6; i++) p = p * t + v_lookup(ERF[i], k);
  return v_or(v_min_fast(bc(1.0f), p * a), v_signbit(x));
}
#endif

// ---- logarithms ---------------------------------------------------------------------------------------

// log(1 + f) + e ln2 for f in [-1/4, 1/2].
OX vf v_log_poly(vf f, vf e) {
  vf p = f * -0.04511205479502678f + 0.10468878597021103f;
  p = p * f + -0.13163873553276062f;
  p = p * f + 0.14478321373462677f;
  p = p * f + -0.1664699912071228f;
  p = p * f + 0.19990819692611694f;
  p = p * f + -0.25000104308128357f;
  p = p * f + 0.3333345055580139f;
  vf s = f * f, y = (p * f) * s + e * 0x1.7f7d1cp-20f;
  return e * 0x1.62e4p-1f + ((y - s * 0.5f) + f);
}

// 0.9 ULP. x = m 2^e with m in [3/4, 3/2).
#if OX_512
OX vf v_log(vf x) {
  // getexp and getmant do denormals, zero, infinity and (as sign control says) negatives by themselves.
  vf m = __builtin_ia32_getmantps512_mask(x, 11, x, OX_ALL, OX_CUR);
  vf e = __builtin_ia32_getexpps512_mask(x, x, OX_ALL, OX_CUR);
  e -= __builtin_ia32_getexpps512_mask(m, m, OX_ALL, OX_CUR);
  return v_log_poly(m - 1.0f, e);
}
#else
OX vf v_log_bits(vi b, vi less) {
  return v_log_poly(bits<vf>((b & 0x7fffff) + 0x3f400000) - 1.0f, conv<f32, i32>((b >> 23) - less));
}
OX vf v_log_any(vf x) {
  vi tiny = x < 0x1p-126f;
  vf r = v_log_bits(bits<vi>(tiny ? x * 0x1p23f : x) - 0x3f400000, tiny & 23);
  r = x < F_INF ? r : x;  // infinity and NaN
  return x > 0.0f ? r : x == 0.0f ? bc(-F_INF) : bc(__builtin_nanf(""));
}
#if OX_SHORT
OX_SELDOM vf v_log_far(vf x, vf near) { return (x >= 0x1p-126f) & (x < F_INF) ? near : v_log_any(x); }
OX vf v_log(vf x) {
  const vf r = v_log_bits(bits<vi>(x) - 0x3f400000, vi{});
  const V<u32> b = bits<V<u32>>(x) - 0x800000u;  // below 0x7f000000 for positive normal numbers
  return OX_OUTSIDE(bits<vf>(b | (b + 0x1000000u))) ? v_log_far(x, r) : r;
}
#else
OX vf v_log(vf x) { return v_log_any(x); }
#endif
#endif

// 1.3 ULP. 1 + x = m 2^e; m - 1 is computed as x 2^-e + (2^-e - 1), which rounds once. Beyond 2^60 the 1 does
// not count, and x is brought down so that 2^-e stays a normal number.
OX vf v_log1p_sum(vf x, vf y, vf one, vi more) {
  vi k = (bits<vi>(y + one) - 0x3f400000) >> 23;
  vf s = bits<vf>((127 - k) << 23);
  return v_or(v_log_poly(y * s + (one * s - 1.0f), conv<f32, i32>(k + more)), v_signbit(x));
}
OX vf v_log1p_any(vf x) {
  vi big = x > 0x1p60f;
  vf r = v_log1p_sum(x, big ? x * 0x1p-64f : x, big ? vf{} : bc(1.0f), big & 64);
  r = x < F_INF ? r : x;
  return x > -1.0f ? r : x == -1.0f ? bc(-F_INF) : bc(__builtin_nanf(""));
}
#if OX_SHORT
OX vi v_log1p_is_near(vf x) { return (x > -1.0f) & (x <= 0x1p60f); }
OX_SELDOM vf v_log1p_far(vf x, vf near) { return v_log1p_is_near(x) ? near : v_log1p_any(x); }
OX vf v_log1p(vf x) {
  const vf r = v_log1p_sum(x, x, bc(1.0f), vi{});
  return OX_OUTSIDE(~v_log1p_is_near(x)) ? v_log1p_far(x, r) : r;
}
#else
OX vf v_log1p(vf x) { return v_log1p_any(x); }
#endif

// ---- lane by lane -------------------------------------------------------------------------------------

// v_NAME for f64 (F64) or both types (BOTH) through libm. Not inlined: VL calls in a row are long.
#define OX_LANES(NAME)                                                                      \
  template <class A> static __attribute__((noinline)) A lanes_##NAME(A x) {                 \
    for (int i = 0; i < VL; i++) {                                                          \
      if constexpr (sizeof(elem<A>) == 4) x[i] = __builtin_##NAME##f(x[i]);                 \
      else x[i] = __builtin_##NAME(x[i]);                                                   \
    }                                                                                       \
    return x;                                                                               \
  }
#define OX_F64(NAME) OX_LANES(NAME) template <class A> OX A v_##NAME(A x) { return lanes_##NAME(x); }
OX_F64(exp) OX_F64(exp2) OX_F64(expm1) OX_F64(log) OX_F64(log1p) OX_F64(tanh) OX_F64(erf)
OX_F64(sin) OX_F64(cos) OX_F64(tan) OX_F64(asin) OX_F64(acos) OX_F64(atan)
OX_F64(sinh) OX_F64(cosh) OX_F64(asinh) OX_F64(acosh) OX_F64(atanh)

#define OX_LANES2(NAME)                                                                     \
  template <class A> static __attribute__((noinline)) A lanes_##NAME(A x, A y) {            \
    for (int i = 0; i < VL; i++) {                                                          \
      if constexpr (sizeof(elem<A>) == 4) x[i] = __builtin_##NAME##f(x[i], y[i]);           \
      else x[i] = __builtin_##NAME(x[i], y[i]);                                             \
    }                                                                                       \
    return x;                                                                               \
  }
OX_LANES2(pow) OX_LANES2(fmod) OX_LANES2(atan2)
template <class A> OX A v_atan2(A y, A x) { return lanes_atan2(y, x); }

// ---- sine, cosine -------------------------------------------------------------------------------------

// sin(x + quarter pi/2): 1.6 ULP up to SINCOS_LIMIT, libm beyond. x = n pi/2 + r by Cody and Waite: with a
// fused multiply the first subtraction is exact; without, pi/2 needs parts so short that n times each is. All parts are
// positive, so that -0 stays -0.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define OX_FMA 1
#else
#define OX_FMA 0
#endif
static constexpr f32 SINCOS_LIMIT = OX_FMA ? 48000.0f : 10000.0f;
OX vf v_sincos(vf x, i32 quarter) {
  const vf magic = bc(0x1.8p23f);
  vf q = x * 0x1.45f306p-1f + magic, n = q - magic;
#if OX_FMA
  vf r = ((x - n * 0x1.921fb4p0f) - n * 0x1.4442dp-24f) - n * 0x1.846988p-48f;
#else
  vf r = (((x - n * 0x1.92p0f) - n * 0x1.fb4p-12f) - n * 0x1.444p-24f) - n * 0x1.68c234p-39f;
#endif
  vi k = bits<vi>(q) + quarter;
  vf t = r * r;
  vf s = (t * -0.00019517907639965415f + 0.008332187309861183f) * t + -0.16666655242443085f;
  s = v_or(s * (t * r) + r, v_signbit(r));  // the sign matters for -0 alone
  vf c = (t * 2.44323346123565e-05f + -0.0013887309469282627f) * t + 0.04166664555668831f;
  c = (c * t + -0.5f) * t + 1.0f;
  vf y = (k & 1) != 0 ? c : s;
  return bits<vf>(bits<vi>(y) ^ ((k & 2) << 30));
}
OX vf v_sin(vf x) {
  const vf r = v_sincos(x, 0), a = v_abs(x);
  if (__builtin_expect(!v_any_gt(a, bc(SINCOS_LIMIT)), 1)) return r;
  return a > SINCOS_LIMIT ? lanes_sin(x) : r;
}
OX vf v_cos(vf x) {
  const vf r = v_sincos(x, 1), a = v_abs(x);
  if (__builtin_expect(!v_any_gt(a, bc(SINCOS_LIMIT)), 1)) return r;
  return a > SINCOS_LIMIT ? lanes_cos(x) : r;
}

// ---- arcus functions ------------------------------------------------------------------------------------

// 1.9 ULP. atan(x) = pi/2 - atan(1/x) beyond 1.
OX vf v_atan(vf x) {
  vf a = v_abs(x);
  vi far = a > 1.0f;
  vf t = far ? -1.0f / a : a, z = t * t;
  vf p = z * 0.002920688595622778f - 0.016367914155125618f;
  p = p * z + 0.043211836367845535f;
  p = p * z - 0.07552212476730347f;
  p = p * z + 0.10666003823280334f;
  p = p * z - 0.14211055636405945f;
  p = p * z + 0.19993773102760315f;
  p = p * z - 0.33333152532577515f;
  vf r = (p * z) * t + (far ? t - 0x1.777a5cp-25f : t);
  return v_or(far ? 0x1.921fb6p0f + r : r, v_signbit(x));
}
// asin(t) - t for 0 <= t <= 1/2, from t and t^2.
OX vf v_asin_rest(vf t, vf z) {
  vf p = z * 0.04216630756855011f + 0.02417951636016369f;
  p = p * z + 0.04547037556767464f;
  p = p * z + 0.07495297491550446f;
  p = p * z + 0.16666752099990845f;
  return (p * z) * t;
}
// 1.9 ULP. asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)) beyond 1/2; NaN beyond 1.
OX vf v_asin(vf x) {
  vf a = v_abs(x);
  vi far = a > 0.5f;
  vf z = far ? 0.5f - 0.5f * a : a * a, t = far ? v_sqrt(z) : a;
  vf rest = v_asin_rest(t, z), high = (0x1.921fb6p0f - 2.0f * t) - (2.0f * rest + 0x1.777a5cp-25f);
  return v_or(far ? high : t + rest, v_signbit(x));
}
// 1.9 ULP. 2 asin(sqrt((1 - x) / 2)) beyond 1/2, pi less that below -1/2, and pi/2 - asin(x) between.
OX vf v_acos(vf x) {
  vf a = v_abs(x);
  vi far = a > 0.5f;
  vf z = far ? 0.5f - 0.5f * a : a * a, t = far ? v_sqrt(z) : a;
  vf rest = v_asin_rest(t, z);
  vf near = 0x1.921fb6p0f - (v_or(t, v_signbit(x)) + (v_or(rest, v_signbit(x)) + 0x1.777a5cp-25f));
  vf high = 2.0f * (t + rest);
  return far ? (x < 0.0f ? 0x1.921fb6p1f - (high + 0x1.777a5cp-24f) : high) : near;
}

// ---- power --------------------------------------------------------------------------------------------

// Half the lanes, as doubles: one register of them has the size of a vf.
struct Half {
  typedef f32 f __attribute__((vector_size(2 * VL)));
  typedef f64 d __attribute__((vector_size(4 * VL)));
  typedef u64 u __attribute__((vector_size(4 * VL)));
  struct pair { f lo, hi; };
};

// |x|^y for x finite and not 0 in double precision: 2^(y log2 x), log2 through atanh of (m - 1) / (m + 1).
OX Half::f v_pow_half(Half::f x, Half::f y) {
  const u64 base = 0x3fe8000000000000;  // 3/4
  Half::u b = bits<Half::u>(__builtin_convertvector(x, Half::d)) - (base - (1024ull << 52));
  Half::d e = bits<Half::d>((b >> 52) | 0x4330000000000000) - (0x1p52 + 1024);
  Half::d m = bits<Half::d>((b & 0xfffffffffffff) + base);
  Half::d s = (m - 1.0) / (m + 1.0), t = s * s;
  Half::d p = t * 0.2908749296263974 + 0.31928109452751396;
  p = p * t + 0.41222629688933593;
  p = p * t + 0.5770777540298152;
  p = p * t + 0.9617966948323314;
  p = p * t + 2.88539008177742;
  Half::d z = (p * s + e) * __builtin_convertvector(y, Half::d);
  z = z < -400.0 ? z - z - 400.0 : z;
  z = z > 400.0 ? z - z + 400.0 : z;
  Half::d magic = z - z + 0x1.8p52, k = z + magic, r = z - (k - magic);
  p = r * 0.0001534578412203308 + 0.0013399957589354482;
  p = p * r + 0.009618489262446453;
  p = p * r + 0.05550328711922478;
  p = p * r + 0.2402264688591292;
  p = p * r + 0.6931472057670669;
  p = p * r + 1.0;
  Half::d scale = bits<Half::d>((bits<Half::u>(k) + 1023) << 52);
  return __builtin_convertvector(p * scale, Half::f);
}

// 0.6 ULP, with the special values of C's pow.
OX vf v_pow(vf x, vf y) {
  vf ax = v_abs(x), ay = v_abs(y);
  Half::pair hx = bits<Half::pair>(ax), hy = bits<Half::pair>(y);
  vf r = bits<vf>(Half::pair{v_pow_half(hx.lo, hy.lo), v_pow_half(hx.hi, hy.hi)});
  // Where the logarithm or y is infinite: 0 or infinity, by whether |x| > 1 and y > 0 agree.
  vi edge = (ax == 0.0f) | (ax == F_INF) | (ay == F_INF), grows = (ax > 1.0f) ^ (y < 0.0f);
  r = edge ? (grows ? bc(F_INF) : vf{}) : r;
  vf half = y * 0.5f;
  vi whole = v_trunc(y) == y, odd = whole & (v_trunc(half) != half);
  r = v_or(r, bits<vf>(odd & bits<vi>(v_signbit(x))));
  r = (x < 0.0f) & (x != -F_INF) & (whole == 0) ? bc(__builtin_nanf("")) : r;
  r = (x != x) | (y != y) ? x + y : r;
  vi one = (y == 0.0f) | (x == 1.0f) | ((x == -1.0f) & (ay == F_INF));
  return one ? bc(1.0f) : r;
}
OX vd v_pow(vd x, vd y) { return lanes_pow(x, y); }

#include "vint.h"
#include "vmath64.h"
