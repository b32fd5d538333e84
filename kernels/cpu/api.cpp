// SPDX-License-Identifier: Apache-2.0
#include "api.h"

int hf_vq_abi_version(void) { return HF_VQ_ABI_VERSION; }
