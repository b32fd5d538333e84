// SPDX-License-Identifier: Apache-2.0
// The library as a caller sees it: loaded from its file, called through api.h.
#pragma once
#include "../../api.h"
#include "../check.h"

namespace hf_vq::check {

struct Library {
  decltype(&hf_vq_abi_version) abi_version;
  decltype(&hf_vq_isas) isas;
  decltype(&hf_vq_use_isa) use_isa;
  decltype(&hf_vq_isa) isa;
  decltype(&hf_vq_use_threads) use_threads;
  decltype(&hf_vq_allocate) allocate;
  decltype(&hf_vq_free) free;
  decltype(&hf_vq_linear_supports) linear_supports;
  decltype(&hf_vq_linear) linear;
  decltype(&hf_vq_decode) decode;
  decltype(&hf_vq_rotate) rotate;
  decltype(&hf_vq_rows_supported) rows_supported;
  decltype(&hf_vq_make_cells) make_cells;
  decltype(&hf_vq_encode_weight) encode_weight;
  decltype(&hf_vq_round_weight) round_weight;
  decltype(&hf_vq_vptq_supports) vptq_supports;
  decltype(&hf_vq_vptq_linear) vptq_linear;
  decltype(&hf_vq_w4a8_supports) w4a8_supports;
  decltype(&hf_vq_w4a8_linear) w4a8_linear;
  decltype(&hf_vq_rotary_table_size) rotary_table_size;
  decltype(&hf_vq_rotary_table) rotary_table;
  decltype(&hf_vq_codes_supported) codes_supported;
  decltype(&hf_vq_append) append;
  decltype(&hf_vq_attention) attention;
  decltype(&hf_vq_step_supports) step_supports;
  decltype(&hf_vq_step) step;
  decltype(&hf_vq_coded_scores) coded_scores;
  decltype(&hf_vq_read_memory) read_memory;
  decltype(&hf_vq_dense_scores) dense_scores;
  decltype(&hf_vq_table_scores) table_scores;
};
extern Library library;

// The instruction sets under test. Where scalar is one of them it is the first, and others are compared with it.
struct Isas {
  char names[8][16];
  int count;
};
extern Isas isas;

// Random problems of each kind.
extern int repeats;

// Compute the next problems on some pool: none, pieces in a surprising order, or two real threads.
void use_some_threads();

// Problems of one op that kernels computed, and that they refused. Refusing them all is a failure.
struct Tally {
  const char* op;
  int64_t ran = 0, refused = 0;

  // True if a status means that the problem was computed.
  bool computed(int status) {
    that(status == HF_VQ_OK || status == HF_VQ_UNSUPPORTED, "%s: status %d", op, status);
    ++(status == HF_VQ_OK ? ran : refused);
    return status == HF_VQ_OK;
  }
  void report() const {
    that(ran > 0, "%s: every problem was refused", op);
    printf("  %-12s %lld problems, %lld refused\n", op, static_cast<long long>(ran), static_cast<long long>(refused));
  }
};

void test_linear();
void test_weight();
void test_vptq();
void test_w4a8();
void test_rotary_table();
void test_append();
void test_attention();
void test_step();

}  // namespace hf_vq::check
