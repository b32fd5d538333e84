// SPDX-License-Identifier: Apache-2.0
// api_test LIBRARY [REPEATS [ISAS [ONLY]]]: the C ABI of a built library, on every instruction set that this
// processor has.
//
// REPEATS: random problems of each kind. ISAS: what hf_vq_isas() must answer; without it, that follows from
// the processor. ONLY: the one whose kernels are tested; without it, all are.
#include <dlfcn.h>
#include <pthread.h>

#include "../../primitives/numbers.h"
#include "library.h"
#include "../processor.h"

namespace hf_vq::check {

Library library;
Isas isas;
int repeats = 8;

namespace {

template <typename Function> void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) stop(name);
}

void open(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) stop(dlerror());
  find(handle, "hf_vq_abi_version", library.abi_version);
  find(handle, "hf_vq_isas", library.isas);
  find(handle, "hf_vq_use_isa", library.use_isa);
  find(handle, "hf_vq_isa", library.isa);
  find(handle, "hf_vq_use_threads", library.use_threads);
  find(handle, "hf_vq_allocate", library.allocate);
  find(handle, "hf_vq_free", library.free);
  find(handle, "hf_vq_linear_supports", library.linear_supports);
  find(handle, "hf_vq_linear", library.linear);
  find(handle, "hf_vq_decode", library.decode);
  find(handle, "hf_vq_rotate", library.rotate);
  find(handle, "hf_vq_rows_supported", library.rows_supported);
  find(handle, "hf_vq_make_cells", library.make_cells);
  find(handle, "hf_vq_encode_weight", library.encode_weight);
  find(handle, "hf_vq_round_weight", library.round_weight);
  find(handle, "hf_vq_vptq_supports", library.vptq_supports);
  find(handle, "hf_vq_vptq_linear", library.vptq_linear);
  find(handle, "hf_vq_w4a8_supports", library.w4a8_supports);
  find(handle, "hf_vq_w4a8_linear", library.w4a8_linear);
  find(handle, "hf_vq_rotary_table_size", library.rotary_table_size);
  find(handle, "hf_vq_rotary_table", library.rotary_table);
  find(handle, "hf_vq_codes_supported", library.codes_supported);
  find(handle, "hf_vq_append", library.append);
  find(handle, "hf_vq_attention", library.attention);
  find(handle, "hf_vq_step_supports", library.step_supports);
  find(handle, "hf_vq_step", library.step);
  find(handle, "hf_vq_coded_scores", library.coded_scores);
  find(handle, "hf_vq_read_memory", library.read_memory);
  find(handle, "hf_vq_dense_scores", library.dense_scores);
  find(handle, "hf_vq_table_scores", library.table_scores);
}

// The run-time choice: what runs here is offered, best first, and can be forced; nothing else can.
void test_choice(const char* wanted, const char* only) {
  that(library.abi_version() == HF_VQ_ABI_VERSION, "ABI %d", library.abi_version());
  const char* all[] = {"zen4", "avx512", "avx2", "dotprod", "neon", "scalar"};
  char expected[64] = "";
  for (const char* isa : all) {
    const bool runs = processor_runs(isa);
    that(library.use_isa(isa) == (runs ? HF_VQ_OK : HF_VQ_UNSUPPORTED), "use_isa(%s)", isa);
    if (!runs) continue;
    that(strcmp(library.isa(), isa) == 0, "isa() is %s after use_isa(%s)", library.isa(), isa);
    if (expected[0] != '\0') strcat(expected, " ");
    strcat(expected, isa);
  }
  if (wanted == nullptr) wanted = expected;
  that(strcmp(library.isas(), wanted) == 0, "isas() is '%s', not '%s'", library.isas(), wanted);
  that(library.use_isa("mmx") == HF_VQ_UNSUPPORTED && library.use_isa("avx") == HF_VQ_UNSUPPORTED, "use_isa(mmx)");
  const size_t best = strcspn(expected, " ");
  for (const char* name : {static_cast<const char*>(nullptr), ""}) {
    library.use_isa("scalar");
    that(library.use_isa(name) == HF_VQ_OK, "use_isa of the best");
    that(strlen(library.isa()) == best && strncmp(library.isa(), expected, best) == 0, "the best is %s", library.isa());
  }
  const auto add = [&](const char* isa) {
    const bool asked = only == nullptr || strcmp(isa, only) == 0;
    if (asked && library.use_isa(isa) == HF_VQ_OK) strcpy(isas.names[isas.count++], isa);
  };
  add("scalar");
  for (const char* isa : all)
    if (strcmp(isa, "scalar") != 0) add(isa);
  that(isas.count > 0, "there are no kernels for %s", only);
}

void test_memory() {
  for (int64_t bytes : {int64_t(0), int64_t(1), int64_t(4096), int64_t(1) << 21, (int64_t(5) << 20) + 1}) {
    uint8_t* memory = static_cast<uint8_t*>(library.allocate(bytes));
    if (!that(memory != nullptr, "allocate %lld", static_cast<long long>(bytes))) continue;
    uint8_t any = 0;
    for (int64_t i = 0; i < bytes; ++i) any |= memory[i];
    that(any == 0, "allocate %lld: not zero", static_cast<long long>(bytes));
    if (bytes >= 1 << 21) that(reinterpret_cast<uintptr_t>(memory) % (1 << 21) == 0, "allocate: not on a huge page");
    memset(memory, 1, size_t(bytes));
    library.free(memory, bytes);
  }
  library.free(nullptr, 0);
}

// The baselines of the benchmarks read their arguments and nothing else.
void test_baselines() {
  for (int64_t bytes : {0, 1, 63, 255, 256, 257, 1000}) {
    Guarded<uint8_t> memory{size_t(bytes)};
    memset(memory.get(), 0, memory.bytes());
    that(library.read_memory(memory.get(), bytes) == 0, "read_memory");
  }
  Guarded<float> keys(3 * 128), query(128), score(3);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = random_normal();
  for (size_t i = 0; i < query.size(); ++i) query[i] = random_normal();
  const int status = library.dense_scores(keys.get(), HF_VQ_FLOAT32, query.get(), 3, 128, score.get());
  if (!that(status == HF_VQ_OK, "dense_scores: status %d", status)) return;
  for (size_t t = 0; t < 3; ++t) {
    double want = 0;
    for (size_t i = 0; i < 128; ++i) want += double(keys[t * 128 + i]) * query[i];
    that(__builtin_fabs(score[t] - want) < 1e-4, "dense_scores: %g, not %g", double(score[t]), want);
  }
  for (int x : {1, 2, 4}) {
    const size_t vectors = 32 / size_t(x);
    Guarded<uint8_t> codes(3 * vectors);
    Guarded<uint16_t> codebook(vectors * 256 * size_t(x));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(random_int(0, 255));
    for (size_t i = 0; i < codebook.size(); ++i) codebook[i] = float_to_half(random_normal());
    const int status = library.table_scores(codes.get(), codebook.get(), x, query.get(), 3, 32, score.get());
    if (!that(status == HF_VQ_OK, "table_scores: status %d", status)) return;
    for (size_t t = 0; t < 3; ++t) {
      double want = 0;
      for (size_t i = 0; i < 32; ++i) {
        const size_t s = i / size_t(x), entry = s * 256 + codes[t * vectors + s];
        want += double(half_to_float(codebook[entry * size_t(x) + i % size_t(x)])) * query[i];
      }
      that(__builtin_fabs(score[t] - want) < 1e-4, "table_scores: %g, not %g", double(score[t]), want);
    }
  }
  that(library.table_scores(nullptr, nullptr, 3, nullptr, 3, 96, nullptr) == HF_VQ_UNSUPPORTED, "table_scores of x 3");
}

// -- pools in the form of torch_parallel_for ----------------------------------------------------

using Range = void (*)(int64_t, int64_t, void*);

int32_t three_threads(uint32_t* count) {
  *count = 3;
  return 0;
}

// Pieces of at least `grain`, the last one first.
int32_t backwards(int64_t begin, int64_t end, int64_t grain, Range range, void* context) {
  const int64_t piece = random_int(grain > 1 ? grain : 1, (grain > 1 ? grain : 1) + 2);
  int64_t from = end;
  while (from > begin) {
    const int64_t to = from;
    from = to - begin >= 2 * piece ? to - piece : begin;
    range(from, to, context);
  }
  return 0;
}

struct Half {
  int64_t begin, end;
  Range range;
  void* context;
};

void* run_half(void* half) {
  const Half* h = static_cast<Half*>(half);
  h->range(h->begin, h->end, h->context);
  return nullptr;
}

int32_t at_once(int64_t begin, int64_t end, int64_t grain, Range range, void* context) {
  const int64_t middle = end - begin >= 2 * grain ? begin + (end - begin) / 2 : end;
  Half other{middle, end, range, context};
  pthread_t thread;
  if (middle == end || pthread_create(&thread, nullptr, run_half, &other) != 0) {
    range(begin, end, context);
    return 0;
  }
  range(begin, middle, context);
  pthread_join(thread, nullptr);
  return 0;
}

// A pool that cannot: the library computes in the calling thread.
int32_t failing(int64_t, int64_t, int64_t, Range, void*) { return 1; }

}  // namespace

void use_some_threads() {
  int32_t (*const pools[])(int64_t, int64_t, int64_t, Range, void*) = {backwards, at_once, failing};
  const int64_t kind = random_int(0, 3);
  if (kind == 3) library.use_threads(nullptr, nullptr);
  else library.use_threads(reinterpret_cast<void*>(pools[kind]), reinterpret_cast<void*>(three_threads));
}

}  // namespace hf_vq::check

int main(int count, char** arguments) {
  using namespace hf_vq::check;
  if (count < 2) stop("api_test LIBRARY [REPEATS [ISAS [ONLY]]]");
  if (count > 2) repeats = atoi(arguments[2]);
  start("api_test");
  open(arguments[1]);
  test_choice(count > 3 ? arguments[3] : nullptr, count > 4 ? arguments[4] : nullptr);
  test_memory();
  for (int i = 0; i < isas.count; ++i) {
    library.use_isa(isas.names[i]);
    test_baselines();
  }
  test_linear();
  test_weight();
  test_vptq();
  test_w4a8();
  test_rotary_table();
  test_append();
  test_attention();
  test_step();
  char names[64] = "";
  for (int i = 0; i < isas.count; ++i) strcat(strcat(names, i > 0 ? " " : ""), isas.names[i]);
  return finish("api_test", names);
}
