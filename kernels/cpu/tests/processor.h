// SPDX-License-Identifier: Apache-2.0
// Whether this processor runs an instruction set, asked without the library.
#pragma once

namespace hf_vq::check {

bool processor_runs(const char* isa);

}  // namespace hf_vq::check
