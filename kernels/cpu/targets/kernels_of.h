// SPDX-License-Identifier: Apache-2.0
// Function table of all ops, compiled over the SIMD set that the including file selected.
#pragma once
#include "../kv/append.h"
#include "../kv/attention.h"
#include "../kernels.h"
#include "../linear/linear.h"
#include "../step/step.h"
#include "../vptq/vptq.h"
#include "../w4a8/w4a8.h"
#include "../weight/encode.h"
#include "../kv/baselines.h"

#define HF_VQ_KERNELS(isa) \
  {isa, linear_supports, linear, decode, rotate, rows_supported, make_cells, encode_weight, \
   round_weight, vptq_supports, vptq_linear, w4a8_supports, w4a8_linear, codes_supported, append, attention, step_supports, run_step, coded_scores, \
   read_memory, dense_scores, table_scores}
