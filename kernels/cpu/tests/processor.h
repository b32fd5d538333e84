// SPDX-License-Identifier: Apache-2.0
// Query of this processor's instruction sets, without the library.
#pragma once

namespace hf_vq::check {

bool processor_runs(const char* isa);

}  // namespace hf_vq::check
