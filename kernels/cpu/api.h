// SPDX-License-Identifier: Apache-2.0
// The C ABI of libhf_vq_cpu, whole. hf_vq/backends/native.py is its mirror in Python.
//   - every exported name is hf_vq_*; everything else is hidden
//   - plain C types only: pointers, fixed-width integers, float
//   - a change that breaks a caller raises HF_VQ_ABI_VERSION here and ABI_VERSION there
#pragma once

#define HF_VQ_ABI_VERSION 1

#if defined(_WIN32)
#define HF_VQ_API extern "C" __declspec(dllexport)
#else
#define HF_VQ_API extern "C" __attribute__((visibility("default")))
#endif

// The version of this page that the library was built from.
HF_VQ_API int hf_vq_abi_version(void);
