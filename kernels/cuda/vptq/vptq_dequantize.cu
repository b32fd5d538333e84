// SPDX-License-Identifier: Apache-2.0
// Published VPTQ codes to a dense matrix, for products with many tokens:
//
//     W[i v + r, j] = (book[main(i, c)] + rest[residual(i, c)])[r] * s[j] + b[j]        c = place[j]
//
// Tile of a block: one vector of v rows. A thread decodes Plan::each adjacent columns j per iteration. Their codes are at
// the permuted columns c, which come from L1 after the first access. A warp stores whole lines of each of the v rows.
//
// Bytes: the rows once, codes once, entries from L2.
// Bottleneck: writing the rows; L2 if the codebook has 65536 entries. Sums and products are float32, in the order of the
// formula and rounded one by one, like the reference.
#include "vptq/vptq.cuh"

struct Arguments {
  const uint32_t* codes;          // int32 [groups, vectors, words]
  const char* book;               // [groups, entries, v] of Plan::dtype
  const char* rest;               // [groups, rest_entries, v]; not read without residuals
  const uint16_t* outlier_codes;  // [vectors of outliers, outliers]
  const char* outlier_book;       // [outlier_entries, outlier_vector]
  const char* scale;              // s [in] of Plan::dtype; not read without norm
  const char* offset;             // b, the same
  const int* place;               // [in]; not read without an order
  char* out;                      // [.., in] of Plan::out; its first row is row `first` * v of the matrix
  int first;                      // row of vectors of the first block
  int rows;                       // of the matrix
  int in;
  int columns;                    // of a group
  int groups;
  int outliers;
};

constexpr int each = Plan::each;

// Rows of vector i in columns j, j + 1, ..
__device__ inline void decode_columns(const Arguments& a, int i, int j, int vectors, int64_t stream_words) {
  float value[each][v];
#pragma unroll
  for (int n = 0; n < each; ++n) {
    int c = j + n;
    if constexpr (Plan::order) c = min(max(__ldg(a.place + c), 0), a.in - 1);
    if (Plan::outlier_vector > 0 && c < a.outliers) {
#pragma unroll
      for (int r = 0; r < v; ++r)
        value[n][r] = i * v + r < a.rows ? outlier(a.outlier_codes, a.outlier_book, a.outliers, i * v + r, c) : 0.0f;
    } else {
      const int group = (c - a.outliers) / a.columns, column = (c - a.outliers) % a.columns;
      Codes<code_bits, 1> code;
      code.load(a.codes, (int64_t(group) * vectors + i) * stream_words * 32 + int64_t(column) * code_bits);
      load_entry(a.book + int64_t(group) * Plan::entries * entry_bytes, main_code(code, 0), value[n]);
      if constexpr (Plan::rest_bits > 0) {
        float more[v];
        load_entry(a.rest + int64_t(group) * Plan::rest_entries * entry_bytes, rest_code(code, 0), more);
#pragma unroll
        for (int r = 0; r < v; ++r) value[n][r] += more[r];
      }
    }
    if constexpr (Plan::norm) {
      float scale[1], offset[1];
      load_floats<Plan::dtype>(a.scale + int64_t(j + n) * size_of<Plan::dtype>, scale);
      load_floats<Plan::dtype>(a.offset + int64_t(j + n) * size_of<Plan::dtype>, offset);
#pragma unroll
      for (int r = 0; r < v; ++r) value[n][r] = __fadd_rn(__fmul_rn(value[n][r], scale[0]), offset[0]);
    }
  }
  char* out = a.out + (int64_t(i - a.first) * v * a.in + j) * size_of<Plan::out>;
#pragma unroll
  for (int r = 0; r < v; ++r) {
    if (i * v + r >= a.rows) break;
    float part[each];
#pragma unroll
    for (int n = 0; n < each; ++n) part[n] = value[n][r];
    store_floats<Plan::out>(out + int64_t(r) * a.in * size_of<Plan::out>, part);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) vptq_dequantize(const Arguments a) {
  const int vectors = (a.rows + v - 1) / v, i = a.first + blockIdx.x;
  const int64_t stream_words = (int64_t(a.columns) * code_bits + 31) / 32;
  for (int j = threadIdx.x * each; j < a.in; j += Plan::threads * each) decode_columns(a, i, j, vectors, stream_words);
}
