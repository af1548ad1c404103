"""ReLU in place as a C++ extension; the first import builds it, which takes up to a minute."""

from __future__ import annotations

from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/extension.h>

at::Tensor& relu_(at::Tensor& x) {
  if (!x.is_non_overlapping_and_dense()) return x.clamp_min_(0);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "relu_", [&] {
    scalar_t* values = x.data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t place = begin; place < end; ++place) {
        // the comparison keeps NaN
        if (values[place] < scalar_t(0)) values[place] = scalar_t(0);
      }
    });
  });
  return x;
}
"""

relu_ = load_inline("opgrip_example_relu", SOURCE, functions=["relu_"], extra_cflags=["-O3", "-march=native"]).relu_
