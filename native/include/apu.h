/* The contract between Python and the native library, and all that the two share.
 *
 * Plain C, 64-bit little-endian hosts. Every struct is fixed-size; apu_engine/_native checks sizes and offsets at
 * import, and its cdef is generated from this file. Functions return a status; apu_last_error() tells the calling
 * thread what failed, which tensor or op, what was expected and what was found.
 * Shape letters: T rows of a step, O output rows, D model, H heads, K kv heads (or the inner dimension of a matrix),
 * d head size, F feed-forward, V vocabulary, N rows of a matrix, E experts, k experts of a row. Shapes are row-major,
 * outermost first.
 */
#ifndef APU_H
#define APU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define APU_ABI_VERSION 1
#define APU_NONE (-1)           /* no tensor, no state */
#define APU_NO_PAGE 0xffffffffu /* a page-table entry whose page was freed (behind a sliding window) */

#ifndef APU_API
#define APU_API __attribute__((visibility("default")))
#endif

/* ---- status -------------------------------------------------------------------------------------------------- */

typedef int32_t apu_status;
enum {
  APU_OK = 0,
  APU_E_INVALID = 1,     /* an argument, a shape, a dtype or an index is wrong */
  APU_E_MEMORY = 2,      /* an allocation failed */
  APU_E_UNSUPPORTED = 3, /* valid, but this device or build cannot do it */
  APU_E_DEVICE = 4,      /* the device or its runtime failed */
  APU_E_MAPPING = 5,     /* a mapped file was truncated or could not be read while in use */
  APU_E_CANCELLED = 6,   /* apu_plan_cancel stopped the submission */
  APU_E_TIMEOUT = 7
};

APU_API uint32_t apu_abi_version(void);
APU_API const char *apu_last_error(void); /* of the calling thread; "" when none */
/* "name size offset offset ...\n" for every struct below, in order: the layout that the import check compares. */
APU_API const char *apu_abi_layout(void);

/* ---- devices ------------------------------------------------------------------------------------------------- */

typedef struct apu_device apu_device;

enum { APU_ISA_AUTO = 0, APU_ISA_PORTABLE = 1, APU_ISA_AVX2 = 2, APU_ISA_AVX512 = 3, APU_ISA_AVX2_VNNI = 4 };

typedef struct apu_device_options {
  uint32_t threads;    /* cpu: workers; 0 = physical cores allowed by affinity and cgroup */
  uint32_t isa;        /* cpu: APU_ISA_*; a level the processor lacks is APU_E_UNSUPPORTED */
  uint32_t pin;        /* cpu: 1 pins each worker to one core */
  uint32_t spin_us;    /* cpu: how long a waiting worker spins before it sleeps; 0 = default */
  const char *kernels; /* hip, cuda: folder of the code objects, <arch>.co or <arch>.cubin */
  const char *runtime; /* hip: file of libamdhip64; NULL = the one in this process, else where the linker looks */
} apu_device_options;

typedef struct apu_device_props {
  char kind[16]; /* "cpu", "hip", "cuda" */
  char name[128];
  char arch[64];       /* "avx512", "gfx1151", "sm_90" */
  uint32_t integrated; /* 1: the device's memory is the host's */
  uint32_t threads;    /* cpu: workers */
  uint32_t isa;        /* cpu: the level in use */
  uint32_t wave_size;
  uint32_t pageable;     /* 1: reads pageable host memory through the host's page tables; host addresses are its own */
  uint32_t ways;         /* 1 << APU_WAY_* for each that the runtime has the functions of */
  uint64_t memory_bytes; /* what the device can address as its own */
  uint64_t driver_version;
} apu_device_props;

APU_API apu_status apu_device_open(const char *kind, int32_t index, const apu_device_options *options,
                                   apu_device **out);
APU_API apu_status apu_device_get_props(apu_device *device, apu_device_props *out);
/* Bytes of the device's own memory that are free now, and all of it; of the cpu the machine's. */
APU_API apu_status apu_device_memory(apu_device *device, uint64_t *free_bytes, uint64_t *total_bytes);
APU_API void apu_device_close(apu_device *device); /* after its plans and regions */

/* ---- memory -------------------------------------------------------------------------------------------------- */

typedef struct apu_region apu_region;

enum { APU_MEMORY_AUTO = 0, APU_MEMORY_REGISTERED = 1, APU_MEMORY_DIRECT = 2, APU_MEMORY_STAGED = 3 };

/* How host pages become readable by the device in place. SVM: hsa_amd_svm_attributes_set, coarse-grained and read-only.
 * ADVISE: hipMemAdvise, coarse grain and then accessed-by. LOCK: hsa_amd_memory_lock. REGISTER: hipHostRegister, mapped
 * and read-only, and then coarse-grained; cuMemHostRegister. */
enum { APU_WAY_AUTO = 0, APU_WAY_SVM = 1, APU_WAY_ADVISE = 2, APU_WAY_LOCK = 3, APU_WAY_REGISTER = 4 };

/* Coherence that the device sees a range with: fine-grained pages may be uncached. */
enum { APU_GRAIN_UNKNOWN = 0, APU_GRAIN_FINE = 1, APU_GRAIN_COARSE = 2 };

typedef struct apu_chunk { /* host bytes [host, host + bytes) are at `device` on the device */
  uint64_t host;
  uint64_t device;
  uint64_t bytes;
} apu_chunk;

typedef struct apu_region_info {
  uint32_t strategy; /* APU_MEMORY_*; AUTO for memory that apu_memory_alloc made */
  uint32_t way;      /* APU_WAY_*; AUTO unless registered */
  uint32_t grain;    /* APU_GRAIN_*, as the runtime says, which need not be what was asked for */
  uint32_t reserved;
  uint64_t device_bytes; /* memory of the device's own that the region holds */
  uint64_t pinned_bytes; /* host bytes that the device reads in place by registration */
} apu_region_info;

/* Makes a host range readable by the device. The range must outlive the region.
 * REGISTERED: in place, by the one `way` named, in one call for exactly these whole pages; kernels may read all of
 * them. DIRECT: in place at the host's own addresses; the cpu, and devices with `pageable`. STAGED: a copy in the
 * device's memory, for bytes that lie in no file (files: apu_stager). AUTO: DIRECT on the cpu, else STAGED. `way` is
 * AUTO unless registered. A private writable mapping is not registered (APU_E_INVALID): each of its pages would be
 * copied. APU_E_UNSUPPORTED where this runtime lacks the way, APU_E_DEVICE with the runtime's error where it refuses;
 * pages of a refused range may be left half registered until they are unmapped. */
APU_API apu_status apu_memory_register(apu_device *device, const void *host, uint64_t bytes, uint32_t strategy,
                                       uint32_t way, apu_region **out);
APU_API apu_status apu_region_get_info(apu_region *region, apu_region_info *out);
/* Device memory, zeroed, committed when first touched where the system allows it. */
APU_API apu_status apu_memory_alloc(apu_device *device, uint64_t bytes, apu_region **out);
/* Chunks in host order, adjoining in host addresses; count in: capacity, out: number. */
APU_API apu_status apu_region_chunks(apu_region *region, apu_chunk *out, uint32_t *count);
APU_API apu_status apu_memory_copy(apu_device *device, uint64_t to, uint64_t from, uint64_t bytes, uint32_t to_host,
                                   uint32_t from_host);
APU_API void apu_region_free(apu_region *region);

/* Copies bytes of files into device memory through a ring of pinned memory, with direct I/O: the page cache keeps
 * none of them. Where the file system refuses that, with plain reads, whose pages are dropped. One thread at a time. */
typedef struct apu_stager apu_stager;

typedef struct apu_stager_info {
  uint64_t direct_bytes; /* read with direct I/O so far */
  uint64_t plain_bytes;  /* read through the page cache */
  uint64_t pinned_bytes; /* of the ring */
} apu_stager_info;

/* At most `ring_bytes` of pinned memory, at least 64 KiB. APU_E_UNSUPPORTED on the cpu, which has no memory of its own.
 */
APU_API apu_status apu_stager_open(apu_device *device, uint64_t ring_bytes, apu_stager **out);
/* Bytes [offset, offset + bytes) of the file open at `fd`, at any alignment, to device address `to`. Returns when all
 * of them are read and queued. `path` is for errors: APU_E_MAPPING where the file is shorter or cannot be read. */
APU_API apu_status apu_stager_read(apu_stager *stager, int32_t fd, const char *path, uint64_t offset, uint64_t bytes,
                                   uint64_t to);
APU_API apu_status apu_stager_wait(apu_stager *stager); /* until all that was read is in device memory */
APU_API apu_status apu_stager_bytes(apu_stager *stager, apu_stager_info *out);
APU_API void apu_stager_close(apu_stager *stager); /* waits; before its device is closed */

/* A file that shrinks while mapped raises SIGBUS. A guarded range gets a zero page at the fault instead, and every
 * later submit or wait fails with APU_E_MAPPING naming `path`. Handlers that were there before are called for faults
 * elsewhere. */
APU_API apu_status apu_mapping_guard(const void *address, uint64_t bytes, const char *path);
APU_API apu_status apu_mapping_release(const void *address);
APU_API const char *apu_mapping_fault(void); /* path of the first faulted mapping still guarded, or NULL */

/* ---- tensors ------------------------------------------------------------------------------------------------- */

/* dtypes are GGUF's numbers; from 128 on they are this contract's own. */
enum {
  APU_F32 = 0,
  APU_F16 = 1,
  APU_Q4_0 = 2,
  APU_Q4_1 = 3,
  APU_Q5_0 = 6,
  APU_Q5_1 = 7,
  APU_Q8_0 = 8,
  APU_Q2_K = 10,
  APU_Q3_K = 11,
  APU_Q4_K = 12,
  APU_Q5_K = 13,
  APU_Q6_K = 14,
  APU_IQ2_XXS = 16,
  APU_IQ2_XS = 17,
  APU_IQ3_XXS = 18,
  APU_IQ1_S = 19,
  APU_IQ4_NL = 20,
  APU_IQ3_S = 21,
  APU_IQ2_S = 22,
  APU_IQ4_XS = 23,
  APU_I32 = 26,
  APU_IQ1_M = 29,
  APU_BF16 = 30,
  APU_TQ1_0 = 34,
  APU_TQ2_0 = 35,
  APU_MXFP4 = 39,
  APU_NVFP4 = 40,
  APU_F8_E4M3 = 128 /* a byte; no infinities, 0x7f and 0xff are NaN */
};

typedef struct apu_segment { /* rows [row_begin, row_begin + row_count) of a plane; a row is the last dimension */
  uint64_t address;          /* device address; any byte alignment */
  uint64_t row_begin;
  uint64_t row_count;
  uint64_t row_stride; /* bytes */
  uint64_t padding;    /* bytes that may be read past the last row */
} apu_segment;

enum { APU_PLANE_DATA = 0, APU_PLANE_SCALE = 1, APU_PLANE_GLOBAL_SCALE = 2 };

/* A weight has a data plane. F8_E4M3 may have a scale plane behind it, F32, F16 or BF16: one scale for block_rows rows
 * by block_columns columns, ceil(K / block_columns) of them side by side. Its segments count rows of the weight too:
 * row r of a segment has its scales at address + (r - row_begin) / block_rows * row_stride. So a segment begins with a
 * block, or holds no more than the rest of one; stacked matrices whose last blocks are cut have one segment each. */

typedef struct apu_plane {
  uint32_t kind;
  uint32_t dtype;
  uint32_t segment_begin; /* into apu_plan_desc.segments; segments adjoin and cover all rows */
  uint32_t segment_count;
  uint32_t block_rows; /* of a scale; 0 in other planes */
  uint32_t block_columns;
} apu_plane;

enum { APU_TENSOR_WEIGHT = 0, APU_TENSOR_SCRATCH = 1, APU_TENSOR_BOUNDARY = 2 };
enum { APU_ROWS_FIXED = 0, APU_ROWS_STEP = 1, APU_ROWS_OUTPUT = 2 }; /* what shape[0] of a scratch tensor counts */

typedef struct apu_tensor {
  uint32_t kind;
  uint32_t dtype; /* logical: of the data plane for weights; scratch is F32, or I32 for ids of experts */
  uint32_t rows;  /* APU_ROWS_*; shape[0] is then the maximum */
  uint32_t ndim;  /* 1 to 4 */
  uint64_t shape[4];
  uint32_t plane_begin; /* weights */
  uint32_t plane_count;
  uint64_t offset; /* scratch: byte offset in the arena, a multiple of 64 */
  uint64_t name;   /* offset in apu_plan_desc.names */
} apu_tensor;

/* ---- states: what a sequence carries between steps ------------------------------------------------------------- */

enum { APU_STATE_PAGED = 0, APU_STATE_FIXED = 1 };

typedef struct apu_state {
  uint32_t kind;
  uint32_t dtype;
  int32_t layer;
  uint32_t group; /* states of one group share page tables or slots: a page id is valid in all of them */
  /* paged: a page spans 128 tokens and holds `heads` parts of rows_per_page rows of head_size elements. The order of
   * the elements in a part is the device's own, which is to say its ops' (CPU: native/cpu/attention_kernels.h); Q8_0
   * has 34 bytes for 32 elements, as in a file. */
  uint32_t rows_per_page;
  uint32_t window; /* tokens a query may look back, itself included; 0 = all */
  uint32_t heads;
  uint32_t head_size;
  uint64_t address;    /* of page or slot 0, device */
  uint64_t page_bytes; /* stride between pages, or between versions of fixed slots */
  uint32_t page_count; /* pages or slots */
  uint32_t versions;   /* fixed: versions per slot */
  uint64_t name;
} apu_state;

/* ---- ops ------------------------------------------------------------------------------------------------------- */

enum {
  /* out0 (T,D) = f0 * table[token]; w0 table (V,D). i0 > 0: out0 (T,i0,D), so many copies. */
  APU_OP_EMBED = 1,
  /* out0 = rms(in0; f0 = eps) * w0, plus in1 when present; in0, in1, out0 (T,D). */
  APU_OP_RMS_NORM = 2,
  /* in0 (T,K) -> up to four matrices that share it. w0 norm weight (K) or none, with f0 = eps; w1..w4 matrices (N,K),
   * w5..w8 their biases (N) or none; out0..out3 (T,N). in1: residual added to out0, may be out0 itself.
   * i0: APU_ACT_* of a gated pair: w1 gate, w2 up, out0 = act(gate) * up, no other matrix. i1: APU_PRECISION_*.
   * f1: soft cap of out0, 0 for none. f2 > 0: gate is at most f2, up between -f2 and f2. */
  APU_OP_MATMUL = 3,
  /* Per-head norm and rotary embedding of q in place (in0 = out0, (T,H,d)) and k (in1 (T,K,d)), then k and v (in2) go
   * to the pages of state0 and state1. w0, w1 q and k norm weights (d) or none, f0 = eps; w2 frequency factors
   * (i0 / 2) or none. i0 rotary dims, i1 APU_ROPE_*, i2 original context of YaRN, i4 = 1: the dimensions between which
   * it mixes are not rounded to whole ones; f1 base, f2 frequency scale, f3 YaRN extrapolation mix (0: none), f4
   * magnitude, f5 beta_fast, f6 beta_slow. */
  APU_OP_ROPE_STORE = 4,
  /* out0 (T,H*d) = softmax(f0 * q k^T) v over the row's sequence up to its position. in0 q (T,H,d), state0 k, state1 v,
   * F32, F16 or Q8_0.
   * f1 soft cap of the scores, 0 for none; w0 sinks (H) or none. The window is the state's. */
  APU_OP_ATTENTION = 5,
  /* out0 (O,D) = rms(in0[row of each output]; f0 = eps) * w0; copied to apu_output.hidden where asked. */
  APU_OP_GATHER_NORM = 6,
  /* in0 logits (O,V): fills the result of every apu_output. */
  APU_OP_SAMPLE = 7,
  /* Chooses experts: in0 (T,D), w0 norm weight (D) or none with f0 = eps, w1 router (E,D), in float whatever its type.
   * Scores (T,E) are i0 = APU_SCORE_* of the products, to which w4 (E) or none is added. out0 (T,k) I32: ids of the k
   * best, of equal scores the lowest, ascending in each row. out1 (T,k): their scores, where i1 = 1 divided by their
   * sum or f2 if that is more, times f1. For the choice alone, w2 (E) or none is added to the scores, and where i2 > 0
   * a row chooses among i3 of i2 groups of experts that lie together: those of the best i4 = APU_GROUP_*, of equal ones
   * the lowest. With w3 (V,k) I32 there is no choice: a row goes to its token's k experts, and w2 and i2 are absent. */
  APU_OP_ROUTE = 8,
  /* The chosen experts' matrices, (E,N,K) each as files stack them. in1 (T,k) I32: out0 of an earlier ROUTE over E.
   * i1: APU_PRECISION_DEFAULT or _EXACT.
   * First half, i0 = APU_ACT_*: in0 (T,K), w0 norm weight (K) or none with f0 = eps, w1 gate, w2 up;
   * w3 and w4 their biases (E*N) or none; out0 (T,k,N) = act(gate) * up. f1: as f2 of MATMUL.
   * Second half, i0 = APU_ACT_NONE: in0 (T,k,K), w1, w3 its bias (E*N) or none; in2 (T,k) the slots' weights; in3
   * residual (T,N) or none, may be out0 itself; out0 (T,N) = residual + weight * (product + bias) of slot 0, + of slot
   * 1, ... in this order. */
  APU_OP_EXPERTS = 9,
  /* Latent attention: a token's row of state0 (one head of r + i0 elements) serves all heads as key, and its beginning
   * as value. Rotary embedding of the last i0 elements of each of the i3 heads of q in place (in0 = out0, (T,H,d)); in1
   * (T, r + i0): rms(first r; f0 = eps) * w0 (r), then the others rotated, go to the page. w2, i1, i2, i4, f1 to f6 as
   * in ROPE_STORE. */
  APU_OP_LATENT_STORE = 10,
  /* Each head by a matrix of its own: in0 (T,H,K+i2), out0 (T,H,N+i2): N products of the head's first K elements, then
   * its last i2 as they are. w0 (H,N,K), or (H,K,N) where i0 = 1, whose rows times the K elements are added in order,
   * in float whatever its type. i1: APU_PRECISION_DEFAULT or _EXACT. */
  APU_OP_HEAD_MATMUL = 11,
  /* out0 (T,H*i0) = softmax(f0 * q c^T) c[first i0 elements] over the row's sequence up to its position, c the rows of
   * state0, one head of d elements in F32, F16 or Q8_0; in0 q (T,H,d). f1, w0 and the window as in ATTENTION. */
  APU_OP_LATENT_ATTENTION = 12,
  /* Hyper-connections, i0 = S streams. Opens a block: in0 (T,S,D); w0 (S*(S+2),S*D), w1 (3), w2 (S*(S+2)). The products
   * of w0 with the streams, divided by the rms of all of them (f0 = eps), are S of the input, S of the output and S*S
   * of the mix; each part times its element of w1, plus w2. out0 (T,D) = sum of (sigmoid(input) + f1) * stream. out1
   * (T,S+S*S): 2 * sigmoid(output); then the mix, softmax of its rows, + f1, whose columns are divided by their sums
   * + f1 i1 times, and its rows between. Without out1 w0 is (S,S*D), w1 (1), w2 (S): the input alone, after the last
   * block. */
  APU_OP_STREAMS_IN = 13,
  /* Closes a block: out0 (T,S,D), may be in0: stream s = in2[s] * in1 + sum over j of in2[S + j*S + s] * in0's stream
   * j. in0 (T,S,D), in1 (T,D) what the block made, in2 out1 of STREAMS_IN. i0 = S. */
  APU_OP_STREAMS_OUT = 14,
  /* One head that is key and value of all H: q in place (in0 = out0, (T,H,d)): each head divided by its rms (f0 = eps);
   * in1 (T,d): rms(in1; f0) * w0 (d). Rotary embedding of the last i0 elements of both; in1's others as i3 =
   * APU_ROUND_*; then in1 goes to the page of state0. w2, i1, i2, i4, f1 to f6 as in ROPE_STORE. */
  APU_OP_SHARED_STORE = 15,
  /* Compresses m tokens to one row. in0 (T,C*d), in1 (T,C*d) its gate, to which the row of w0 (m,C*d) of position mod m
   * is added; both go to the page of state0, one head of 2*C*d elements in F32. A row that ends m tokens makes row
   * position / m of state1, whose pages hold 128 / m rows of one head of d: C = 1: the tokens' in0, weighted by a
   * softmax over the tokens of each element's gate; C = 2: over the m tokens before, where there are any, with the
   * first d elements, and the m tokens, with the last d. Then rms(f0 = eps) * w1 (d), rotary embedding of the last i0
   * elements at the first token's position, and i3 = APU_ROUND_*. w2, i1, i2, i4, f1 to f6 as in ROPE_STORE. */
  APU_OP_COMPRESS = 16,
  /* Chooses compressed rows. q in place (in0 = out1, (T,H,d)): rotary embedding of the last i0 elements of each head,
   * then i3 = APU_ROUND_*. Score of row r of state0, as COMPRESS makes them: f7 * sum over heads of in1 (T,H) *
   * max(q . r, 0). out0 (T,k) I32: of the rows whose tokens all lie up to the row's position, those of the k best
   * scores, of equal ones the lowest, ascending; then -1. w2, i1, i2, i4, f1 to f6 as in ROPE_STORE. */
  APU_OP_INDEX = 17,
  /* Attention over the window of state0, as SHARED_STORE fills it, and compressed rows of state1, or none: those of in1
   * (T,k) I32, as INDEX makes them, or without in1 all whose tokens lie up to the row's position. in0 q (T,H,d); out0
   * (T,H,d) = softmax(f7 * q c^T) c over these rows c, its last i0 elements then rotated back. w0 sinks (H) or none;
   * w2, i1, i2, i4, f1 to f6 as in ROPE_STORE. */
  APU_OP_SPARSE_ATTENTION = 18
};

enum { APU_SCORE_SOFTMAX = 0, APU_SCORE_SIGMOID = 1, APU_SCORE_SQRT_SOFTPLUS = 2 };
/* Rounding of a row to what a narrow type holds, and back (native/quant/rounding.h). E4M3: the elements before the
 * rotated ones, 64 with a scale. FP4: all of them, by a Hadamard matrix first, then E2M1, 32 with a scale. */
enum { APU_ROUND_NONE = 0, APU_ROUND_E4M3 = 1, APU_ROUND_FP4 = 2 };
enum { APU_GROUP_MAX = 0, APU_GROUP_SUM2 = 1 }; /* of a group's scores: the largest, the two largest added */

/* What a gated pair gives: act(gate) * up; SWIGLU_OAI: gate * sigmoid(1.702 * gate) * (up + 1). */
enum { APU_ACT_NONE = 0, APU_ACT_SILU = 1, APU_ACT_GELU_TANH = 2, APU_ACT_GELU_ERF = 3, APU_ACT_SWIGLU_OAI = 4 };
/* Activations that meet quantised weights. DEFAULT: int8, one scale for 16. EXACT: float. FINE: twice int8, the second
 * time of what the first lost (15 bits), the two products added; for one row half as slow again as DEFAULT. */
enum { APU_PRECISION_DEFAULT = 0, APU_PRECISION_EXACT = 1, APU_PRECISION_FINE = 2 };
enum { APU_ROPE_PAIRS = 0, APU_ROPE_HALVES = 1 }; /* rotate (2i, 2i+1), or (i, i + dims/2) */

typedef struct apu_op {
  uint32_t kind;
  int32_t layer; /* -1 outside the layers */
  int32_t in[4]; /* tensor ids or APU_NONE */
  int32_t out[4];
  int32_t w[10];
  int32_t state[4];
  int32_t i[8];
  float f[8];
} apu_op;

/* ---- plans ----------------------------------------------------------------------------------------------------- */

typedef struct apu_plan apu_plan;

typedef struct apu_plan_desc {
  const apu_tensor *tensors;
  const apu_plane *planes;
  const apu_segment *segments;
  const apu_state *states;
  const apu_op *ops;
  const char *names; /* NUL-terminated strings, addressed by offset */
  uint64_t names_bytes;
  uint32_t tensor_count;
  uint32_t plane_count;
  uint32_t segment_count;
  uint32_t state_count;
  uint32_t op_count;
  uint32_t group_count; /* page-table groups */
  uint64_t arena_bytes; /* scratch that tensors' offsets lie in */
  uint32_t max_rows;    /* T */
  uint32_t max_sequences;
  uint32_t max_outputs;   /* O */
  uint32_t vocabulary;    /* V */
  uint32_t max_positions; /* positions are below this */
  uint32_t flags;         /* APU_PLAN_* */
} apu_plan_desc;

/* hip, cuda: every kernel is launched by itself instead of in a captured graph: slower, but a fault names it. */
enum { APU_PLAN_NO_GRAPH = 1 };

APU_API apu_status apu_plan_create(apu_device *device, const apu_plan_desc *desc, apu_plan **out);
/* Bytes of the arena plus the kernels' own workspace. */
APU_API uint64_t apu_plan_scratch_bytes(apu_plan *plan);
APU_API void apu_plan_destroy(apu_plan *plan); /* cancels and waits first */

/* ---- steps ----------------------------------------------------------------------------------------------------- */

typedef struct apu_row {
  int32_t token; /* or -1: the token sampled for output `previous` of the step before */
  int32_t previous;
  uint32_t position;
  uint32_t sequence; /* index into apu_step.sequences */
} apu_row;

typedef struct apu_sequence { /* its rows lie together, positions ascending by one */
  uint32_t row_begin;
  uint32_t row_count;
} apu_sequence;

typedef struct apu_slot { /* one per (sequence, group) */
  uint32_t page_begin;    /* paged: into apu_step.pages; entry p holds tokens [128 p, 128 p + 128) */
  uint32_t page_count;
  uint32_t read_slot; /* fixed */
  uint32_t write_slot;
} apu_slot;

enum { APU_OUT_SAMPLE = 1, APU_OUT_TOP = 2, APU_OUT_LOGITS = 4, APU_OUT_HIDDEN = 8 };

typedef struct apu_output {
  uint32_t row;
  uint32_t want;           /* APU_OUT_* */
  float temperature;       /* 0: the most probable token */
  uint32_t top_k;          /* 0: all */
  float top_p;             /* 1: all */
  float min_p;             /* 0: all */
  float repeat_penalty;    /* 1: none; divides positive and multiplies negative logits of tokens in `history` */
  float frequency_penalty; /* times the token's count */
  float presence_penalty;
  uint32_t top_n; /* APU_OUT_TOP: how many log-probabilities */
  uint64_t seed;  /* random numbers are a function of (seed, position, draw) */
  uint32_t draw;
  uint32_t history_count;
  uint32_t bias_count;
  uint32_t reserved;
  const int32_t *history_ids;    /* (history_count) distinct tokens */
  const int32_t *history_counts; /* (history_count) */
  const int32_t *bias_ids;       /* (bias_count) */
  const float *bias_values;      /* (bias_count) added to the logits */
  const uint32_t *mask;          /* (ceil(V / 32)) a set bit allows the token; or NULL */
  /* results; log-probabilities are of the plain softmax, before penalties, bias, mask and temperature */
  int32_t *token;      /* (1) */
  float *logprob;      /* (1) of the sampled token, or NULL */
  int32_t *top_ids;    /* (top_n) descending */
  float *top_logprobs; /* (top_n) */
  float *logits;       /* (V) */
  float *hidden;       /* (D) */
} apu_output;

typedef struct apu_step {
  const apu_row *rows;           /* (row_count) */
  const apu_sequence *sequences; /* (sequence_count) */
  const apu_slot *slots;         /* (sequence_count, group_count) */
  const uint32_t *pages;         /* (page_count) */
  const apu_output *outputs;     /* (output_count) */
  uint32_t row_count;
  uint32_t sequence_count;
  uint32_t page_count;
  uint32_t output_count;
} apu_step;

/* Runs ops [first, last) on one step. Everything in `step` is checked and copied before it returns; result pointers
 * and masks must live until the event is waited for. Submissions of a plan run in order. A later slice of the same
 * step is submitted with the same `step`; `previous` refers to the last submission that ran APU_OP_SAMPLE. */
typedef struct apu_event apu_event;
APU_API apu_status apu_plan_submit(apu_plan *plan, const apu_step *step, uint32_t first, uint32_t last,
                                   apu_event **out);
/* Waits, returns the submission's status and frees the event; APU_E_TIMEOUT keeps it. timeout_us < 0: for ever. */
APU_API apu_status apu_event_wait(apu_event *event, int64_t timeout_us);
/* Submissions that have not ended stop at the next op and end with APU_E_CANCELLED. Any thread. */
APU_API apu_status apu_plan_cancel(apu_plan *plan);
/* Copies a scratch tensor's current rows to the host: tests compare backends op by op with it. */
APU_API apu_status apu_plan_read(apu_plan *plan, uint32_t tensor, void *out, uint64_t bytes);
/* Nanoseconds spent per op over the last submission, (op_count), when profiling is on. */
APU_API apu_status apu_plan_profile(apu_plan *plan, uint32_t enable, uint64_t *nanoseconds);

/* Paged and fixed states between submissions. export and import move one page (or slot) of every state of the group,
 * in state order, `bytes` in all. */
APU_API apu_status apu_state_copy(apu_plan *plan, uint32_t group, uint32_t from, uint32_t to);
APU_API apu_status apu_state_reset(apu_plan *plan, uint32_t group, uint32_t page);
APU_API apu_status apu_state_export(apu_plan *plan, uint32_t group, uint32_t page, void *out, uint64_t bytes);
APU_API apu_status apu_state_import(apu_plan *plan, uint32_t group, uint32_t page, const void *in, uint64_t bytes);

/* ---- kernels alone, for tests and benchmarks --------------------------------------------------------------------- */

/* y (T,N) = x (T,K) w(N,K)^T by the kernels of a plan; w is one segment of `dtype`, `precision` APU_PRECISION_*. All of
 * them are host memory, which a GPU copies. */
APU_API apu_status apu_kernel_matmul(apu_device *device, uint32_t dtype, uint32_t precision, const void *w,
                                     uint64_t row_stride, const float *x, float *y, uint32_t rows, uint32_t n,
                                     uint32_t k);
/* out (rows, k) f32 from rows of `dtype`. */
APU_API apu_status apu_kernel_dequantize(uint32_t dtype, const void *in, float *out, uint64_t rows, uint64_t k);
/* Plain reads of a range by all workers, each its contiguous part, or by a kernel of 16-byte loads: the read limit of
 * products with weights that lie there. `in` is a device address. GB/s (1e9 bytes) of the best of `repeats` passes. */
APU_API apu_status apu_kernel_read(apu_device *device, const void *in, uint64_t bytes, uint32_t repeats,
                                   double *gb_per_s);
/* The same for `count` parts of `bytes` each that lie anywhere, as the experts of a step do: one pass reads them all,
 * on a GPU in one launch. `parts` are device addresses. Best of `repeats` passes; a GPU has made one before. */
APU_API apu_status apu_kernel_gather(apu_device *device, const uint64_t *parts, uint32_t count, uint64_t bytes,
                                     uint32_t repeats, double *gb_per_s);
/* A sum over the range's little-endian words w[i] of 4 bytes, zeros behind the last byte: of (w[i] + 1) * ((2 i + 1) *
 * 0x9e3779b97f4a7c15) modulo 2^64. The device computes it from what it reads at `address`, at any alignment; of the
 * cpu a host address. */
APU_API apu_status apu_kernel_checksum(apu_device *device, uint64_t address, uint64_t bytes, uint64_t *out);
/* Nanoseconds of one such product on a GPU: one graph holds a product with each of `count` copies of w, one after the
 * other, the quantised input is made before; the median of `repeats` runs. Where x is NULL, of plain reads of w
 * instead: what the product's speed is a share of. */
APU_API apu_status apu_kernel_time(apu_device *device, uint32_t dtype, uint32_t precision, const void *w,
                                   uint64_t row_stride, const float *x, uint32_t rows, uint32_t n, uint32_t k,
                                   uint32_t count, uint32_t repeats, double *nanoseconds);

#ifdef __cplusplus
}
#endif

#endif /* APU_H */
