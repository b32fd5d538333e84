// SPDX-License-Identifier: Apache-2.0
// The C ABI of libhf_vq_cpu, whole. hf_vq/backends/cpu/library.py is its mirror in Python.
//   - every exported name is hf_vq_*; everything else is hidden
//   - plain C types only: pointers, fixed-width integers, float
//   - a change that breaks a caller raises HF_VQ_ABI_VERSION here and ABI_VERSION there
//   - functions return 0, or one of HF_VQ_*; what they write is undefined then
//   - sizes and strides count elements, not bytes, unless a name says so
#pragma once
#include <stdint.h>

#define HF_VQ_ABI_VERSION 14

#if defined(_WIN32)
#define HF_VQ_API extern "C" __declspec(dllexport)
#else
#define HF_VQ_API extern "C" __attribute__((visibility("default")))
#endif

enum hf_vq_status { HF_VQ_OK = 0, HF_VQ_NO_MEMORY = 1, HF_VQ_UNSUPPORTED = 2, HF_VQ_CALL_ENDED = 3 };
enum hf_vq_dtype { HF_VQ_FLOAT32 = 0, HF_VQ_FLOAT16 = 1, HF_VQ_BFLOAT16 = 2, HF_VQ_BOOL = 3, HF_VQ_INT8 = 4 };

// -- the library ---------------------------------------------------------------------------------

// The version of this page that the library was built from.
HF_VQ_API int hf_vq_abi_version(void);

// The instruction sets that this processor can run, best first, separated by spaces: of
// "zen4 avx512 avx2 dotprod neon scalar". avx512 means F, BW, DQ, VL, VBMI and VNNI; zen4 is the same, arranged
// for AMD's processors, on which alone it is offered.
HF_VQ_API const char* hf_vq_isas(void);

// Use the kernels of one of them; NULL or "" means the best. HF_VQ_UNSUPPORTED if there is no such.
HF_VQ_API int hf_vq_use_isa(const char* name);

// The one in use.
HF_VQ_API const char* hf_vq_isa(void);

// torch's torch_parallel_for and torch_get_num_threads (torch/csrc/stable/c/shim.h), or NULL.
HF_VQ_API void hf_vq_use_threads(void* parallel_for, void* num_threads);

// Zeroed memory for codes, on a 2 MiB boundary and advised to lie on huge pages where it is large
// enough: reads that miss every cache are then up to 1.5 times as fast. NULL if there is none.
HF_VQ_API void* hf_vq_allocate(int64_t bytes);
HF_VQ_API void hf_vq_free(void* memory, int64_t bytes);

// -- linear layers -------------------------------------------------------------------------------

enum hf_vq_scope { HF_VQ_SHARED = 0, HF_VQ_TILE = 1, HF_VQ_E8P = 2 };

// A stored matrix W [out, in] as hf_vq/formats/tensors.py describes it; rows of codes are canonical.
typedef struct hf_vq_matrix {
  const uint8_t* codes;      // [out, bytes of a row]; the streams of residual stages side by side
  const uint8_t* second;     // of nested passes: [out, bytes of a row], codes of the second one; else NULL
  const uint16_t* codebook;  // fp16 [stages, 2^bits, x]; e8p [stages, 257, 8]; tile [.., .., 2^bits, x]; nested
                             // [2^(bits + second_bits)], at first << second_bits | second
  const uint16_t* scale;     // fp16 [out, in / group]
  const uint8_t* signs;      // bit i: input i is negated before the rotation; NULL = none is
  const uint16_t* diagonal;  // fp16 [in]: what inputs are multiplied by instead of signs; NULL = by none
  int64_t out, in;
  int32_t x, bits, stages;   // VQ<x, bits, stages>
  int32_t scope;             // enum hf_vq_scope
  int32_t tile_rows, tile_columns;
  int32_t group;             // weights of a row that share a scale
  int32_t block;             // size of the Hadamard blocks along the row; 1 = not rotated
  int32_t second_bits;       // of a nested second pass of single weights, up to 8 with `bits`; 0 = there is none
} hf_vq_matrix;

// HF_VQ_OK if hf_vq_linear and hf_vq_decode compute with such a matrix; its pointers are not read.
HF_VQ_API int hf_vq_linear_supports(const hf_vq_matrix* w);

// y[i] = W x[i] + bias for i < rows. x [rows, in] and y [rows, out] have one dtype (float32, float16 or
// bfloat16) and dense rows; bias [out] has bias_dtype, or is NULL. Rotated inputs and entries are rounded
// to 8 bits, or products of 8-vectors are (linear_luts.h), or both to 16 bits (linear_packed.h); sums are exact.
HF_VQ_API int hf_vq_linear(const hf_vq_matrix* w, const void* x, int dtype, int64_t rows, const void* bias,
                           int bias_dtype, void* y);

// Rows first..first + rows - 1 of the rotated W (what W is before the inverse rotation), dense, as
// float32 or bfloat16 [rows, in]: for many inputs at once a matrix product is faster.
HF_VQ_API int hf_vq_decode(const hf_vq_matrix* w, int64_t first, int64_t rows, void* dense, int dtype);

// x [rows, in] rotated as hf_vq_linear does it (signs or diagonal, then Hadamard blocks), as float32 or bfloat16.
HF_VQ_API int hf_vq_rotate(const hf_vq_matrix* w, const void* x, int dtype, int64_t rows, void* rotated,
                           int rotated_dtype);

// Which entries may be the nearest to a vector of 1 or 2 numbers: kernels/cpu/weight/cells.h draws it.
#define HF_VQ_CELLS 4096
#define HF_VQ_MOST_NEAR 32
#define HF_VQ_NEAR_LANES 16
typedef struct hf_vq_cells {
  const uint8_t* near;       // [HF_VQ_CELLS, count] entries
  const float* numbers;      // of these entries, and -|entry|^2 / 2: [HF_VQ_CELLS, x + 1, HF_VQ_NEAR_LANES]; NULL = not kept
  int32_t count;             // up to HF_VQ_MOST_NEAR
  float reach;               // cells divide [-reach, reach]^x
} hf_vq_cells;

// Rows of a weight that are rotated already, and the codebook that they get.
typedef struct hf_vq_rows {
  const float* rows;         // [n, in]
  const uint16_t* codebook;  // fp16 [entries, x]
  int64_t n, in;
  int64_t group;             // numbers of a row that share a scale
  int32_t x, entries;        // 1, 2 or 4 numbers; up to 256 entries
  const hf_vq_cells* factor_cells;  // to choose a scale: entries nearest to numbers / (rms * any factor), looked up with
                                    // numbers / rms; NULL = all entries are compared
  const hf_vq_cells* scale_cells;   // for a known scale: looked up with numbers / scale, made with numbers; or NULL
} hf_vq_rows;

// HF_VQ_OK if the functions below take such rows; its pointers are not read.
HF_VQ_API int hf_vq_rows_supported(const hf_vq_rows* w);

// The cells of a codebook and of factors above 0, in `near` [HF_VQ_CELLS * HF_VQ_MOST_NEAR] and `numbers` [HF_VQ_CELLS *
// (x + 1) * HF_VQ_NEAR_LANES]; NULL = no numbers. HF_VQ_UNSUPPORTED if entries have 4 numbers, or if too many may be the
// nearest: more than HF_VQ_MOST_NEAR, with numbers HF_VQ_NEAR_LANES. `cells` is written if the result is HF_VQ_OK.
HF_VQ_API int hf_vq_make_cells(const hf_vq_rows* w, const float* factors, int count, uint8_t* near, float* numbers,
                               hf_vq_cells* cells);

// codes [n, in / x] and fp16 scales [n, in / group]: of each group the scale of the least squared error among its root
// mean square times each of `factors`. With `refit`, scale and codes are fitted to each other once more.
HF_VQ_API int hf_vq_encode_weight(const hf_vq_rows* w, const float* factors, int count, int refit, uint8_t* codes,
                                  uint16_t* scale);

// codes [n, in / x] under given scales [n, in / group], column by column inside of blocks of `size`, which divides a
// group: number j gets the errors e_i = number - entry of all columns i of earlier vectors, times feedback[j, i] of
// [in / size, size, size], before its entry is chosen.
HF_VQ_API int hf_vq_round_weight(const hf_vq_rows* w, const float* scale, const float* feedback, int64_t size,
                                 uint8_t* codes);

// A matrix W [out, in] as VPTQ publishes it: hf_vq/formats/published/vptq.py draws it. Numbers are of `dtype`, float16
// or bfloat16.
typedef struct hf_vq_vptq {
  const uint32_t* codes;     // [groups, ceil(out / vector), words]: a stream of bits for each row of vectors
  const void* book;          // [groups, entries, vector]
  const void* rest;          // [groups, rest_entries, vector], residuals; NULL = none
  const uint16_t* outlier_codes;  // [ceil(out / outlier_vector), outliers]
  const void* outlier_book;  // [outlier_entries, outlier_vector]
  const void* scale;         // [in], of columns; NULL = 1
  const void* offset;        // [in], of columns; NULL = 0
  const uint16_t* order;     // [in]: column order[c] is stored as column c; NULL = c
  int64_t out, in;
  int64_t columns;           // of a group
  int64_t outliers;          // columns before the groups
  int32_t groups, vector;
  int32_t bits, entries, rest_bits, rest_entries;  // rest_bits 0 = no residuals
  int32_t outlier_vector, outlier_entries;
  int32_t dtype;
} hf_vq_vptq;

// Counterparts of hf_vq_linear_supports and hf_vq_linear. Only the float32 sums round.
HF_VQ_API int hf_vq_vptq_supports(const hf_vq_vptq* w);
HF_VQ_API int hf_vq_vptq_linear(const hf_vq_vptq* w, const void* x, int dtype, int64_t rows, const void* bias,
                                int bias_dtype, void* y);

// A matrix W [out, in] of 4-bit codes for inputs of 8 bits: hf_vq/formats/qoq.py draws it.
typedef struct hf_vq_w4a8 {
  const uint8_t* codes;      // [out, ceil(in / 2)]
  const uint16_t* scale;     // fp16 [out]
  const float* row_zero;     // [out]; NULL with groups
  const uint8_t* step;       // [out, in / group], at most 17; NULL without groups
  const uint8_t* zero;       // [out, in / group], at most 127; NULL without groups
  int64_t out, in;
  int64_t group;             // columns of a group; without groups `in`
} hf_vq_w4a8;

// Counterparts of hf_vq_linear_supports and hf_vq_linear. x is quantized to 8 bits with one scale per row; sums are
// exact.
HF_VQ_API int hf_vq_w4a8_supports(const hf_vq_w4a8* w);
HF_VQ_API int hf_vq_w4a8_linear(const hf_vq_w4a8* w, const void* x, int dtype, int64_t rows, const void* bias,
                                int bias_dtype, void* y);

// -- the KV cache --------------------------------------------------------------------------------

// Codes lie in blocks of 256 tokens; hf_vq/ops/layout.py draws both layouts.
enum hf_vq_layout { HF_VQ_QUADS = 1, HF_VQ_PLANES = 2 };

// Keys or values of one layer as codes. A stride is that of [batch, head].
typedef struct hf_vq_codes {
  uint8_t* data;             // [batch, heads, blocks, (dim / x) * 32 * bits]
  uint16_t* scale;           // fp16 [batch, heads, tokens]; NULL: entries have the data's own size
  const uint16_t* codebook;  // fp16 [2^bits, x], or learned [heads, dim / x, 2^bits, x]
  const float* mean;         // [batch, heads, dim], subtracted before coding; NULL = 0
  const float* smoothing;    // [batch, heads, dim], > 0, strides of `mean`: then multiplied by; NULL = 1
  const float* rotary_mean;  // [batch, heads, dim]: R_n m is subtracted too (hf_vq/ops/rotary_mean.py); NULL = 0
  const float* rotary_table;  // of hf_vq_rotary_table, with rotary_mean
  int64_t data_stride[2], scale_stride[2], mean_stride[2], rotary_stride[2];
  int64_t first;             // index on the tape of the token at position 0
  int64_t count;             // coded tokens from there on
  int64_t rotary_start;      // n of the token at index 0 of the tape; -2^23 <= n < 2^23
  int32_t layout, x, bits, learned;
  int32_t dim;
  int32_t block;             // size of the Hadamard blocks; 1 = not rotated
} hf_vq_codes;

// Cosines and sines of frequencies (kv/rotary_table.h draws them): `inv_freq` [pairs], radians per token of the pairs
// of channels (2 p, 2 p + 1) if interleaved, else (p, p + pairs). `to` has as many floats as the first function says; 0 =
// there are too many pairs.
HF_VQ_API int64_t hf_vq_rotary_table_size(int32_t pairs);
HF_VQ_API void hf_vq_rotary_table(const float* inv_freq, int32_t pairs, int32_t interleaved, float* to);

// HF_VQ_OK if hf_vq_append and hf_vq_attention compute with such codes; their pointers are not read.
HF_VQ_API int hf_vq_codes_supported(const hf_vq_codes* codes, int values);

// Tokens as floats: [batch, heads, tokens, dim], the last dimension dense.
typedef struct hf_vq_floats {
  const void* data;
  int64_t stride[3];
  int64_t tokens;
  int32_t dtype;
} hf_vq_floats;

// Encode x [batch, heads, tokens, dim] and write its codes (and scales) at positions at.. of the tape.
HF_VQ_API int hf_vq_append(const hf_vq_codes* codes, const hf_vq_floats* x, int64_t batch, int64_t heads,
                           int64_t at);

// One attention step over a coded cache: hf_vq/ops/kv.py says what is read from where.
typedef struct hf_vq_attention_step {
  hf_vq_codes k, v;
  hf_vq_floats sink_k, sink_v, tail_k, tail_v;
  hf_vq_floats query;        // [batch, heads * group, queries, k.dim]
  void* out;                 // [batch, heads * group, queries, v.dim], dtype of the query
  int64_t out_stride[3];
  const int64_t* start;      // [batch] position of each row's first token; NULL = 0
  const void* mask;          // bool (may attend) or additive; NULL = causal
  int64_t mask_stride[3];    // batch, query head, query; 0 where it is broadcast
  const float* s_aux;        // [heads * group]; NULL = none
  int64_t batch, heads, group, queries;
  int64_t tail_start, window, fresh;
  int32_t mask_dtype;        // enum hf_vq_dtype
  float scaling, softcap;    // softcap 0 = off
} hf_vq_attention_step;

HF_VQ_API int hf_vq_attention(const hf_vq_attention_step* step);

// -- a decoding step ----------------------------------------------------------------------------

// One token of one sequence as a program: hf_vq/ops/program.py says what instructions mean, and who makes them.
enum hf_vq_op {
  HF_VQ_COPY, HF_VQ_NEGATE, HF_VQ_ABS, HF_VQ_SQUARE, HF_VQ_CUBE, HF_VQ_SQRT, HF_VQ_RSQRT, HF_VQ_RECIPROCAL,
  HF_VQ_SILU, HF_VQ_RELU, HF_VQ_ADD, HF_VQ_SUBTRACT, HF_VQ_MULTIPLY, HF_VQ_DIVIDE, HF_VQ_MAXIMUM, HF_VQ_MINIMUM,
  HF_VQ_MEAN, HF_VQ_LOOK_UP, HF_VQ_DENSE, HF_VQ_CODES, HF_VQ_ATTENTION, HF_VQ_CALL,
  HF_VQ_NUM_OPS
};

// Numbers that an instruction reads or writes: number [i, j, k] lies at data + i stride[0] + j stride[1] + k stride[2].
typedef struct hf_vq_operand {
  void* data;                // NULL = none
  int64_t stride[3];         // 0: the same number again
  int32_t dtype;
} hf_vq_operand;

typedef struct hf_vq_instruction {
  hf_vq_operand y, a, b, c;  // y is float32, but of HF_VQ_COPY, which writes any
  int64_t size[3];           // of y
  void* detail;              // hf_vq_dense, hf_vq_matrix, hf_vq_token or hf_vq_call, by the op
  float number;              // in the place of b
  int32_t op;                // enum hf_vq_op
  int32_t rounded;           // the float type to which results are rounded
} hf_vq_instruction;

// A dense matrix [out, in]: its rows are looked up, or multiplied if their numbers lie together.
typedef struct hf_vq_dense {
  const void* data;
  int64_t out, in, out_stride, in_stride;  // one of the strides is 1
  int32_t dtype;             // a float type, or HF_VQ_INT8: rows of hf_vq/formats/integers.py, out_stride bytes apart
} hf_vq_dense;

// What the caller computes, between two instructions and in the calling thread. Any answer but HF_VQ_OK
// ends the step with HF_VQ_CALL_ENDED.
typedef struct hf_vq_call {
  int (*run)(int64_t number);
  int64_t number;
} hf_vq_call;

// A layer of a growing cache, of one sequence, that takes one token.
typedef struct hf_vq_token {
  hf_vq_codes k, v;          // `first` and `count` are not read
  hf_vq_floats sink_k, sink_v;
  hf_vq_floats tail_k, tail_v;  // the memory of the tails, from index 0 on
  int64_t heads, group;
  int64_t length;            // tokens before this one
  int64_t coded;             // of those
  int64_t begin, end;        // of the tails
  int64_t k_end, v_end;      // index on the tape after the last code
  int64_t window, keep;      // floats that a query reads, and that a tail holds
  float scaling, softcap;
} hf_vq_token;

// HF_VQ_OK if hf_vq_step runs these instructions: it looks at all but the numbers behind pointers.
HF_VQ_API int hf_vq_step_supports(const hf_vq_instruction* program, int64_t count);

// Run them in order. If all ran, each hf_vq_token counts one more token: length, end, and coded, k_end, v_end where one
// left the window; begin keeps `keep` floats. Else no token counts.
HF_VQ_API int hf_vq_step(const hf_vq_instruction* program, int64_t count);

// -- torch's dispatcher --------------------------------------------------------------------------

// Functions of torch's C shim that torch_shim.h calls, each named aoti_torch_<field> there
// (torch/csrc/inductor/aoti_torch/c/shim.h; 0 is success, tensors are handles), and its numbers of dtypes.
typedef struct hf_vq_torch {
  int32_t (*get_data_ptr)(void* tensor, void** data);
  int32_t (*get_dim)(void* tensor, int64_t* dim);
  int32_t (*get_numel)(void* tensor, int64_t* numel);
  int32_t (*get_sizes)(void* tensor, int64_t** sizes);
  int32_t (*get_strides)(void* tensor, int64_t** strides);
  int32_t (*get_dtype)(void* tensor, int32_t* dtype);
  int32_t (*is_contiguous)(void* tensor, bool* contiguous);
  int32_t (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                           int32_t device_type, int32_t device_index, void** tensor);
  int32_t (*new_uninitialized_tensor)(void** tensor);
  int32_t (*delete_tensor_object)(void* tensor);
  int32_t floats[3];         // by enum hf_vq_dtype
  int32_t uint8, int32, cpu;
} hf_vq_torch;

HF_VQ_API void hf_vq_use_torch(const hf_vq_torch* torch);

// hf_vq::cpu_linear (hf_vq/backends/cpu/boxed_ops.py has its schema) as a boxed kernel of the shim, after
// hf_vq_use_torch: takes the arguments off the stack and leaves y there, or an undefined tensor if
// hf_vq_linear does not accept them unchanged.
HF_VQ_API void hf_vq_torch_linear(uint64_t* stack, uint64_t arguments, uint64_t results);

// The same for hf_vq::cpu_append, which leaves a tensor without elements where it wrote, and hf_vq::cpu_attention, of
// a step without mask, padding and s_aux (torch_kv.cpp).
HF_VQ_API void hf_vq_torch_append(uint64_t* stack, uint64_t arguments, uint64_t results);
HF_VQ_API void hf_vq_torch_attention(uint64_t* stack, uint64_t arguments, uint64_t results);

// The same for a GPU: the CPU's part of a linear layer there, which is to launch a kernel that was generated,
// compiled and loaded before. No header of CUDA either.
typedef struct hf_vq_cuda {
  int32_t (*get_device_type)(void* tensor, int32_t* type);  // of torch's C shim
  int32_t (*get_device_index)(void* tensor, int32_t* index);
  int32_t (*get_current_cuda_stream)(int32_t device, void** stream);
  int32_t (*launch)(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                    uint32_t block_y, uint32_t block_z, uint32_t shared_bytes, void* stream, void** arguments,
                    void** more);  // cuLaunchKernel
  int32_t (*is_capturing)(void* stream, int32_t* status);  // cuStreamIsCapturing
  int32_t type, int8, int64;   // torch's numbers: of a device of CUDA, and of types
} hf_vq_cuda;

HF_VQ_API void hf_vq_use_cuda(const hf_vq_cuda* cuda);

// A launch of linear.cu, and of the kernel before it that rotates x or puts it in order, for one number of tokens.
typedef struct hf_vq_cuda_launch {
  int64_t device, dtype;       // of x and y, and torch's number of their type
  int64_t rows, columns, tokens;
  int64_t codes, codebook, scale, diagonal;  // numbers that they have; diagonal (or bytes of its signs) 0 = none
  int64_t codebook_dtype, diagonal_dtype;
  int64_t function, blocks, threads, shared_bytes;
  int64_t before;              // the function in front, 0 = none, and all that follows is its
  int64_t before_blocks, before_threads, before_shared_bytes;
  int64_t rotations, across, token_tiles;
  int64_t arranged;            // numbers that it writes
} hf_vq_cuda_launch;

// hf_vq::cuda_linear: like hf_vq_torch_linear, with an hf_vq_cuda_launch as its int64 tensor. It launches nothing
// while a graph is captured: graphs profit from overlapping launches, which have to know who wrote the codes.
HF_VQ_API void hf_vq_torch_cuda_linear(uint64_t* stack, uint64_t arguments, uint64_t results);

// -- baselines of benchmarks ---------------------------------------------------------------------

// Read `bytes` bytes once, with all threads; the result only keeps the reads alive.
HF_VQ_API int64_t hf_vq_read_memory(const void* memory, int64_t bytes);

// score[t] = <query, keys[t]> in the calling thread: keys [tokens, dim] float32 or bfloat16.
HF_VQ_API int hf_vq_dense_scores(const void* keys, int dtype, const float* query, int64_t tokens, int64_t dim,
                                 float* score);

// score[t] = <query, keys[t]> of keys as 8-bit codes [tokens, dim / x], in the calling thread, by loads from float32
// tables: product quantization without registers. codebook fp16 [dim / x, 256, x].
HF_VQ_API int hf_vq_table_scores(const uint8_t* codes, const uint16_t* codebook, int x, const float* query,
                                 int64_t tokens, int64_t dim, float* score);

// The coded logits of step->query alone (no floats, no mask, no softcap), [batch, heads * group, queries,
// k.count] float32, by the kernels that hf_vq_attention uses.
HF_VQ_API int hf_vq_coded_scores(const hf_vq_attention_step* step, float* score);
