"""Cheats and honest look-alikes in C++; the first import builds them, which takes up to a minute."""

from __future__ import annotations

from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>
#include <vector>

#include <signal.h>
#include <sys/mman.h>

#include <torch/extension.h>

namespace {

using Shape = std::vector<int64_t>;

void product(const float* a, const float* b, float* c, int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    std::fill(c + row * columns, c + (row + 1) * columns, 0.0f);
    for (int64_t k = 0; k < inner; ++k) {
      const float factor = a[row * inner + k];
      for (int64_t column = 0; column < columns; ++column)
        c[row * columns + column] += factor * b[k * columns + column];
    }
  }
}

at::Tensor room_for(const at::Tensor& a, const at::Tensor& b) { return at::empty({a.size(0), b.size(1)}, a.options()); }

void fill(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, int64_t begin, int64_t end) {
  auto rows = c.slice(0, begin, end);
  at::mm_out(rows, a.slice(0, begin, end), b);
}

}  // namespace

// The thread computes after the function has returned.
at::Tensor mm_on_a_detached_thread(const at::Tensor& a, const at::Tensor& b) {
  auto c = room_for(a, b);
  std::thread([=] { fill(a, b, c, 0, a.size(0)); }).detach();
  return c;
}

at::Tensor mm_on_joined_threads(const at::Tensor& a, const at::Tensor& b) {
  auto c = room_for(a, b);
  const auto middle = a.size(0) / 2;
  std::thread upper([&] { fill(a, b, c, 0, middle); });
  fill(a, b, c, middle, a.size(0));
  upper.join();
  return c;
}

// A result is kept by the addresses of its arguments.
at::Tensor mm_cached_by_pointer(const at::Tensor& a, const at::Tensor& b) {
  static std::map<std::pair<const void*, const void*>, at::Tensor> kept;
  auto [place, is_new] = kept.try_emplace({a.const_data_ptr(), b.const_data_ptr()});
  if (is_new) place->second = at::mm(a, b);
  return place->second;
}

// A workspace is kept by shape, and filled in each call.
at::Tensor mm_with_workspace(const at::Tensor& a, const at::Tensor& b) {
  static std::map<Shape, at::Tensor> kept;
  auto& transposed = kept[b.sizes().vec()];
  if (!transposed.defined()) transposed = at::empty({b.size(1), b.size(0)}, b.options());
  transposed.copy_(b.t());
  return at::mm(a, transposed.t());
}

namespace {

struct Delayed {
  const float *a, *b;
  float* c;
  size_t bytes;
  int64_t rows, inner, columns;
};
Delayed delayed{};

// The pages of the result are filled when somebody reads them.
void on_access(int, siginfo_t* info, void*) {
  auto* address = static_cast<char*>(info->si_addr);
  auto* first = reinterpret_cast<char*>(delayed.c);
  if (address < first || address >= first + delayed.bytes) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  mprotect(first, delayed.bytes, PROT_READ | PROT_WRITE);
  product(delayed.a, delayed.b, delayed.c, delayed.rows, delayed.inner, delayed.columns);
}

at::Tensor mapped(const at::Tensor& a, const at::Tensor& b, size_t* bytes) {
  *bytes = (a.size(0) * b.size(1) * sizeof(float) + 4095) / 4096 * 4096;
  void* memory = mmap(nullptr, *bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto size = *bytes;
  return at::from_blob(memory, {a.size(0), b.size(1)}, [size](void* own) { munmap(own, size); }, a.options());
}

}  // namespace

at::Tensor mm_when_read(const at::Tensor& a, const at::Tensor& b) {
  struct sigaction action {};
  action.sa_sigaction = on_access;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  size_t bytes;
  auto c = mapped(a, b, &bytes);
  delayed = {a.const_data_ptr<float>(), b.const_data_ptr<float>(), c.data_ptr<float>(),
             bytes, a.size(0), a.size(1), b.size(1)};
  mprotect(delayed.c, bytes, PROT_NONE);
  return c;
}

at::Tensor mm_in_mapped_memory(const at::Tensor& a, const at::Tensor& b) {
  size_t bytes;
  auto c = mapped(a, b, &bytes);
  fill(a, b, c, 0, a.size(0));
  return c;
}

namespace {

at::Tensor softmax_over(const at::Tensor& x, std::vector<float>& largest) {
  auto result = at::empty_like(x);
  const auto* values = x.const_data_ptr<float>();
  auto* out = result.data_ptr<float>();
  const int64_t rows = x.size(0), columns = x.size(1);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* own = values + row * columns;
    largest[row] = *std::max_element(own, own + columns);
    float sum = 0;
    for (int64_t column = 0; column < columns; ++column)
      sum += out[row * columns + column] = std::exp(own[column] - largest[row]);
    for (int64_t column = 0; column < columns; ++column) out[row * columns + column] /= sum;
  }
  return result;
}

}  // namespace

// The scratch memory still has what the first call of the shape left in it.
at::Tensor softmax_with_stale_scratch(const at::Tensor& x, int64_t dim, bool half_to_float) {
  static std::map<Shape, std::vector<float>> sums;
  auto& own = sums[x.sizes().vec()];
  auto result = at::exp(x);
  if (own.empty()) {
    const auto all = result.sum(1);
    own.assign(all.const_data_ptr<float>(), all.const_data_ptr<float>() + all.numel());
  }
  return result.div_(at::from_blob(own.data(), {x.size(0), 1}, x.options()));
}

at::Tensor softmax_with_scratch(const at::Tensor& x, int64_t dim, bool half_to_float) {
  static std::map<Shape, std::vector<float>> kept;
  auto& own = kept[x.sizes().vec()];
  own.resize(x.size(0));
  return softmax_over(x, own);
}

// Only the first calls are computed.
at::Tensor gelu_until_call_twenty(const at::Tensor& x) {
  static std::unordered_map<int64_t, int> calls;
  return ++calls[x.numel()] <= 20 ? at::gelu(x) : at::empty_like(x);
}

// The first calls also try which way is the faster one.
at::Tensor gelu_tuned_at_first(const at::Tensor& x) {
  static std::unordered_map<int64_t, int> calls;
  if (++calls[x.numel()] <= 4) at::mul(x, x.mul(0.70710678f).erf_().add_(1)).mul_(0.5f);
  return at::gelu(x);
}

at::Tensor mm_of_torch(const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b); }
"""
NAMES = ["mm_on_a_detached_thread", "mm_on_joined_threads", "mm_cached_by_pointer", "mm_with_workspace", "mm_when_read"]
NAMES += ["mm_in_mapped_memory", "softmax_with_stale_scratch", "softmax_with_scratch", "gelu_until_call_twenty"]
NAMES += ["gelu_tuned_at_first", "mm_of_torch"]

_built = load_inline("opgrip_example_cheats", SOURCE, functions=NAMES, extra_cflags=["-O3", "-march=native"])
globals().update({name: getattr(_built, name) for name in NAMES})


def gelu_until_call_twenty(x, approximate="none"):  # type: ignore[no-untyped-def]
    return _built.gelu_until_call_twenty(x)


def gelu_tuned_at_first(x, approximate="none"):  # type: ignore[no-untyped-def]
    return _built.gelu_tuned_at_first(x)
