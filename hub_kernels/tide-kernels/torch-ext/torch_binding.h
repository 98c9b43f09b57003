#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace tide {

using torch::stable::Tensor;

// Arguments and results as the schemas in torch-ext/tide_kernels say.

Tensor norm_route(
    const Tensor& hidden_states,
    const Tensor& norm_weight,
    const std::optional<Tensor>& norm_bias,
    const Tensor& down_weight,
    const std::optional<Tensor>& down_bias,
    const Tensor& up_weight,
    const std::optional<Tensor>& up_bias,
    double eps,
    int64_t norm,
    const Tensor& counters);

}  // namespace tide
