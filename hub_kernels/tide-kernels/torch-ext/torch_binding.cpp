// Registers the CUDA implementations. The schemas are defined from Python (torch-ext/tide_kernels), together with the
// Triton implementations that these take precedence over.

#include <torch/csrc/stable/library.h>

#include "torch_binding.h"

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("norm_route", TORCH_BOX(&tide::norm_route));
}

#if __has_include("registration.h")  // kernel-builder's, which makes the library importable from Python
#include "registration.h"
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
#endif
