// The kernels of a stand-in GPU: each operator that torch has for CUDA, computed by the CPU's kernel.
//
// torch's own CUDA code runs, with its checks, allocations, copies, waits and launches; the launches compute
// nothing. The CPU's kernel saw the same memory before, and its result is then written into what that code
// allocated. Operators that need a number in the middle, or a library that is not here, are replaced: the CPU's
// result is put into new memory of the device. An operator that no CPU kernel computes is refused.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <regex>

#include "standin.h"

namespace {
using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using MaybeTensor = std::optional<Tensor>;

struct Announced {  // launches meanwhile are computed by us
  Announced() { standin_announce(1); }
  ~Announced() { standin_announce(-1); }
};

Tensor host(const Tensor& t) {  // the same bytes, as a tensor of the CPU
  if (!t.defined() || !t.is_cuda() || t.layout() != at::kStrided) return t;
  auto s = t.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), s.nbytes(),
                    c10::DataPtr(s.mutable_data(), c10::Device(c10::kCPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  out._set_conj(t.is_conj());
  out._set_neg(t.is_neg());
  return out;
}
Tensor on(const Tensor& cpu, c10::Device device) {  // a new tensor of the device with these numbers
  if (!cpu.defined()) return cpu;
  if (cpu.layout() == at::kSparse)
    return at::sparse_coo_tensor(on(cpu._indices(), device), on(cpu._values(), device), cpu.sizes())._coalesced_(cpu.is_coalesced());
  auto out = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device));
  host(out).copy_(cpu);
  return out;
}
template <class F>  // of each tensor in a value; other values stay
IValue mapped(const IValue& v, F f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<MaybeTensor> out;
    for (const MaybeTensor& t : v.toOptionalTensorVector()) out.push_back(t && t->defined() ? MaybeTensor(f(*t)) : t);
    return out;
  }
  return v;
}

struct Call {  // an operator's arguments for the CPU's kernel
  struct Written { Tensor there, cpu; };
  std::optional<c10::Device> device, first;
  bool is_mixed = false;   // tensors of several devices: torch's own code says whether that is an error
  bool is_sparse = false;
  std::vector<Written> written;
  std::vector<IValue> args;
  at::Generator generator;
  int generator_at = -1;

  Tensor tensor(const Tensor& t, bool is_written) {
    if (t.is_cuda() && !device) device = t.device();
    if (!first) first = t.device();
    is_mixed |= *first != t.device();
    is_sparse |= t.layout() != at::kStrided;
    auto cpu = host(t);
    if (!is_written || is_sparse) return cpu;
    for (auto& w : written)
      if (w.there.is_same(t)) return w.cpu;
    written.push_back({t, cpu.clone()});
    return written.back().cpu;
  }
  void add(const IValue& v, const c10::Argument& argument) {
    auto* alias = argument.alias_info();
    bool is_written = alias && alias->isWrite();
    if (argument.name() == "generator") generator_at = args.size();
    if (v.isGenerator() && v.toGenerator().device().is_cuda()) generator = v.toGenerator();
    bool is_gpu = v.isDevice() && v.toDevice().is_cuda();
    if (is_gpu && !device) device = v.toDevice();
    args.push_back(is_gpu ? IValue(c10::Device(c10::kCPU)) : mapped(v, [&](const Tensor& t) { return tensor(t, is_written); }));
  }
};

struct CpuSeed {  // the CPU's generator gives other numbers meanwhile, and continues as if nothing had been drawn
  at::Generator g;
  Tensor state;
  CpuSeed(bool needed, uint64_t seed) {
    if (!needed) return;
    g = at::detail::getDefaultCPUGenerator();
    state = g.get_state();
    g.set_current_seed(seed);
  }
  ~CpuSeed() { if (g.defined()) g.set_state(state); }
};

const std::regex replaced_names(
    "aten::(nonzero|_unique2?|unique_.*|embedding_dense_backward|_embedding_bag.*|(_|slow_)?conv.*|_slow_conv.*|"
    "_?linalg_.*|_?cholesky.*|lu_.*|triangular_solve|ormqr|geqrf|_fft_.*|_scaled_mm|_int_mm|_fused_sdp_choice|"
    "cudnn_batch_norm.*|_scaled_dot_product_efficient_attention.*)(\\..*)?");
const std::regex waiting_names("aten::(nonzero|_unique2?|unique_.*)(\\..*)?");  // the host needs a size from the device
// Memory, views and single numbers: torch's own code is right as it is.
const std::regex kept_names(
    "aten::(empty|empty_strided|resize_|set_|as_strided|view|view_as_real|view_as_complex|_reshape_alias|unfold|"
    "record_stream|_local_scalar_dense|is_set_to|_nested_view_from_buffer|copy_|_cudnn_rnn_flatten_weight)(\\..*)?");
const std::regex missing_library(
    "CUBLAS|cuBLAS|CUDNN|cuDNN|CUSOLVER|cusolver|CUFFT|cuFFT|CUSPARSE|NVRTC|CUDA driver error|no kernel image|operation not supported");
const std::regex out_of_bounds("out of (bounds|range)");

bool is_assert(const std::exception_ptr& wrong) {  // CUDA's kernel would have asserted
  try {
    std::rethrow_exception(wrong);
  } catch (const std::exception& e) {
    return std::regex_search(e.what(), out_of_bounds);
  }
}

struct Kernel final : c10::OperatorKernel {
  c10::KernelFunction own;
  bool replaced, waits, random;
  Kernel(c10::KernelFunction k, const std::string& name, bool is_random)
      : own(std::move(k)), replaced(std::regex_match(name, replaced_names)),
        waits(std::regex_match(name, waiting_names)), random(is_random) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size();
    const std::vector<IValue> given(stack->end() - n, stack->end());
    Call call;
    for (size_t i = 0; i < n; i++) call.add(given[i], schema.arguments()[i]);
    const bool has_cpu = op.hasComputedKernelForDispatchKey(DispatchKey::CPU);
    // Sparse tensors: composed of operators that are computed, or else a launch is refused. Within an operator whose
    // result is known, those that only CUDA has need no numbers.
    if (call.is_sparse || (!has_cpu && standin_announced())) return own.callBoxed(op, keys, stack);
    const auto device = call.device.value_or(c10::Device(c10::kCUDA, c10::cuda::current_device()));

    // The CPU first: an in-place operator that is made of others would else run twice.
    torch::jit::Stack cpu;
    auto wrong = computed(op, call, device, has_cpu, cpu);
    const bool is_replaced = !run_own(op, keys, stack, call, wrong);
    if (wrong && is_assert(wrong)) return standin_plant(cudaErrorAssert, 0);  // found after the call returned
    if (wrong) std::rethrow_exception(wrong);

    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [there, result] : call.written) {
      if (there.sizes() != result.sizes()) there.resize_(result.sizes());
      host(there).copy_(result);
    }
    if (is_replaced) imitate(schema.name(), device, call);
    const size_t m = schema.returns().size();
    torch::jit::Stack out;
    for (size_t i = 0; i < m; i++) {
      const IValue& result = cpu[cpu.size() - m + i];
      auto* alias = schema.returns()[i].alias_info();
      if (alias && alias->isWrite()) out.push_back(argument_with(schema, given, alias));
      else if (is_replaced) out.push_back(mapped(result, [&](const Tensor& t) { return on(t, device); }));
      else out.push_back(filled((*stack)[stack->size() - m + i], result, device));
    }
    if (is_replaced) torch::jit::drop(*stack, stack->size() >= n ? n : 0);
    else torch::jit::drop(*stack, m);
    for (auto& v : out) stack->push_back(std::move(v));
  }

  std::exception_ptr computed(const c10::OperatorHandle& op, Call& call, c10::Device device, bool has_cpu, torch::jit::Stack& cpu) {
    if (!has_cpu)
      return std::make_exception_ptr(c10::NotImplementedError(
          {__func__, __FILE__, 0}, "stand-in GPU: no CPU kernel computes " + toString(op.operator_name())));
    uint64_t seed = 0;
    if (random || call.generator_at >= 0) {
      if (!call.generator.defined()) call.generator = at::globalContext().defaultGenerator(device);
      seed = call.generator.current_seed() + 0x9E3779B97F4A7C15ull * call.generator.get_offset();
      if (call.generator_at >= 0) call.args[call.generator_at] = at::detail::createCPUGenerator(seed);
    }
    CpuSeed swapped(random && call.generator_at < 0, seed);
    at::AutoDispatchBelowADInplaceOrView below;
    cpu = call.args;
    try {
      op.callBoxed(&cpu);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  // torch's CUDA code; false if it is to be replaced. Its errors come before the CPU's.
  bool run_own(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, Call& call, std::exception_ptr wrong) {
    if (replaced && !wrong && !call.is_mixed) return false;
    Announced announced;
    try {
      own.callBoxed(op, keys, stack);
      return true;
    } catch (const std::exception& e) {
      if (wrong || !std::regex_search(e.what(), missing_library)) throw;
      cudaGetLastError();
      return false;
    }
  }

  // One launch and, where torch's code reads a size from the device, one copy home.
  void imitate(const std::string& name, c10::Device device, Call& call) {
    c10::cuda::CUDAGuard guard(device);
    auto stream = c10::cuda::getCurrentCUDAStream();
    Announced announced;
    C10_CUDA_CHECK((cudaError_t)standin_launch(name.c_str(), stream));  // the schema's name, which stays
    if (waits) {
      auto number = at::empty({1}, at::TensorOptions().dtype(at::kInt).device(device));
      int there;
      c10::cuda::memcpy_and_sync(&there, number.data_ptr(), sizeof there, cudaMemcpyDeviceToHost, stream);
    }
    if (call.generator.defined()) call.generator.set_offset(call.generator.get_offset() + 4);
  }

  static IValue argument_with(const c10::FunctionSchema& schema, const std::vector<IValue>& given, const c10::AliasInfo* alias) {
    for (size_t i = 0; i < given.size(); i++) {
      auto* a = schema.arguments()[i].alias_info();
      if (a && a->isWrite() && a->beforeSets() == alias->beforeSets()) return given[i];
    }
    TORCH_INTERNAL_ASSERT(false, "no argument is what ", schema.name(), " returns");
  }
  static Tensor filled(const Tensor& to, const Tensor& from, c10::Device device) {
    if (!to.defined() || !from.defined() || to.layout() != at::kStrided) return to;
    if (to.sizes() == from.sizes()) host(to).copy_(from);
    // Results that only CUDA's kernel has (statistics, scratch) are empty on the CPU, or the other way round.
    else if (from.numel() && to.numel()) return on(from, device);
    return to;
  }
  static IValue filled(const IValue& to, const IValue& from, c10::Device device) {
    if (to.isTensor() && from.isTensor()) return filled(to.toTensor(), from.toTensor(), device);
    if (!to.isTensorList()) return from;
    auto a = to.toTensorVector(), b = from.toTensorVector();
    c10::List<Tensor> out;
    for (size_t i = 0; i < a.size(); i++) out.push_back(filled(a[i], b[i], device));
    return out;
  }
};

// Copies are torch's own; a kernel that converts or gathers between tensors of devices is computed here.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!(to.is_cuda() && from.is_cuda())) return at::native::copy_(to, from, non_blocking);
  auto expected = host(from).clone();
  {
    Announced announced;
    at::native::copy_(to, from, non_blocking);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  host(to).copy_(expected);
  return to;
}

// Recurrent nets: cuDNN's code asks cuDNN before any operator, so torch is to take its native cells.
struct WithoutCudnn final : c10::OperatorKernel {
  c10::KernelFunction own;
  explicit WithoutCudnn(c10::KernelFunction k) : own(std::move(k)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    struct Off {
      bool before = at::globalContext().userEnabledCuDNN();
      Off() { at::globalContext().setUserEnabledCuDNN(false); }
      ~Off() { at::globalContext().setUserEnabledCuDNN(before); }
    } off;
    own.callBoxed(op, keys, stack);
  }
};
Tensor flat_weights(at::TensorList w, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool) {
  int64_t n = 0, begin = 0;
  for (auto& t : w) n += t.numel();
  auto all = at::empty({n}, w[0].options());
  for (auto& t : w) {
    all.narrow(0, begin, t.numel()).view(t.sizes()).copy_(t);
    t.set_(all.storage(), begin, t.sizes(), t.dim() == 2 ? std::vector<int64_t>{t.size(1), 1} : std::vector<int64_t>{1});
    begin += t.numel();
  }
  return all;
}

// ---- The CPU's kernels of operators that torch has for CUDA alone.
Tensor or_none(const MaybeTensor& t) { return t ? *t : Tensor(); }
Tensor plus(Tensor gates, const MaybeTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& x, const Tensor& h, const Tensor& c, const MaybeTensor& b, const MaybeTensor& d) {
  auto g = plus(plus(x + h, b), d).chunk(4, 1);
  auto i = g[0].sigmoid(), f = g[1].sigmoid(), n = g[2].tanh(), o = g[3].sigmoid();
  auto next = f * c + i * n;
  return {o * next.tanh(), next, at::cat({i, f, n, o}, 1)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& gh, const MaybeTensor& gc, const Tensor& c,
                                                      const Tensor& next, const Tensor& saved, bool has_bias) {
  if (!or_none(gh).defined() && !or_none(gc).defined()) return {};
  auto s = saved.chunk(4, 1);
  auto i = s[0], f = s[1], n = s[2], o = s[3], t = next.tanh();
  auto h = or_none(gh).defined() ? *gh : at::zeros_like(next);
  auto k = h * o * (1 - t * t) + (or_none(gc).defined() ? *gc : at::zeros_like(next));
  auto gates = at::cat({k * n * i * (1 - i), k * c * f * (1 - f), k * i * (1 - n * n), h * t * o * (1 - o)}, 1);
  return {gates, k * f, has_bias ? gates.sum(0) : Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& x, const Tensor& h, const Tensor& hx, const MaybeTensor& b, const MaybeTensor& d) {
  auto a = plus(x, b).chunk(3, 1), c = plus(h, d).chunk(3, 1);
  auto r = (a[0] + c[0]).sigmoid(), z = (a[1] + c[1]).sigmoid(), n = (a[2] + r * c[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, c[2]}, 1)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gh, const Tensor& saved, bool has_bias) {
  auto s = saved.chunk(5, 1);
  auto r = s[0], z = s[1], n = s[2], hx = s[3], hn = s[4];
  auto gn = gh * (1 - z) * (1 - n * n), gr = gn * hn * r * (1 - r), gz = gh * (hx - n) * z * (1 - z);
  auto x = at::cat({gr, gz, gn}, 1), h = at::cat({gr, gz, gn * r}, 1);
  return {x, h, gh * z, has_bias ? x.sum(0) : Tensor(), has_bias ? h.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const Tensor& w, const MaybeTensor& b, const MaybeTensor& mean,
                                                      const MaybeTensor& var, bool training, double momentum, double eps) {
  auto [y, m, v] = at::native_batch_norm(x, w, b, mean, var, training, momentum, eps);
  return {y, m, v, at::empty({0}, x.options().dtype(at::kByte))};
}
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& x, const Tensor& dy, const Tensor& w, const MaybeTensor& mean,
    const MaybeTensor& var, const MaybeTensor& m, const MaybeTensor& v, double eps, const Tensor&) {
  return at::native_batch_norm_backward(dy, x, w, mean, var, m, v, true, eps, {true, true, true});
}

// Memory-efficient attention. Its output lies with the heads next to last; the seed makes the same dropout twice.
Tensor attend(const std::vector<Tensor>& t, double dropout, int64_t seed, bool causal, std::optional<double> scale) {
  CpuSeed swapped(dropout > 0, seed);
  auto bias = t[3].defined() ? MaybeTensor(t[3]) : std::nullopt;
  return std::get<0>(at::_scaled_dot_product_attention_math(t[0], t[1], t[2], bias, dropout, causal, {}, scale));
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias,
                                                     bool keeps, double dropout, bool causal, std::optional<double> scale) {
  auto seed = at::randint(1l << 62, {}, at::kLong);
  auto out = attend({q, k, v, or_none(bias)}, dropout, seed.item<int64_t>(), causal, scale);
  auto sums = at::empty({q.size(0), q.size(1), keeps ? (q.size(2) + 31) / 32 * 32 : 0}, q.options().dtype(at::kFloat));
  return {out.transpose(1, 2).contiguous().transpose(1, 2), sums, seed, at::zeros({}, at::kLong)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& bias, const Tensor&, const Tensor&, const Tensor& seed, const Tensor&, double dropout, std::array<bool, 4>,
    bool causal, std::optional<double> scale) {
  c10::impl::ForceDispatchKeyGuard autograd{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  at::AutoGradMode enabled(true);
  std::vector<Tensor> in{q.detach(), k.detach(), v.detach(), bias.defined() ? bias.detach() : bias}, asked;
  for (auto& t : in)
    if (t.defined()) asked.push_back(t.requires_grad_());
  auto g = torch::autograd::grad({attend(in, dropout, seed.item<int64_t>(), causal, scale)}, asked, {grad});
  g.resize(4);
  return {g[0], g[1], g[2], g[3]};
}

// Of GRU's cell torch has no shapes without data either.
TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("cudnn_batch_norm", batch_norm);
  m.impl("cudnn_batch_norm_backward", batch_norm_backward);
  m.impl("_scaled_dot_product_efficient_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", attention_backward);
}

std::vector<std::unique_ptr<torch::Library>> libraries;
torch::Library& library(DispatchKey key) {
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
  return *libraries.back();
}
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
}  // namespace

extern "C" void standin_install() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);  // torch warns of each kernel that is overridden
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA);
  // Composite operators whose own code asks a library.
  for (auto* name : {"convolution", "convolution_backward", "kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"})
    names.push_back(torch::jit::parseName(std::string("aten::") + name));
  auto& cuda = library(DispatchKey::CUDA);
  for (auto& name : names) {
    auto whole = toString(name);
    auto op = dispatcher.findSchema(name);
    if (!op || whole.rfind("aten::", 0) || std::regex_match(whole, kept_names)) continue;
    auto own = op->getComputedKernelForDispatchKey(DispatchKey::CUDA).kernelFunction();
    bool is_random = op->hasTag(at::Tag::nondeterministic_seeded);
    cuda.impl(whole.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(own, whole, is_random)));
  }
  cuda.impl("_cudnn_rnn_flatten_weight", flat_weights);
  // Where torch has it: an extension that overrides it at CUDA's key finds ours below.
  library(DispatchKey::CompositeExplicitAutograd).impl("copy_", copy_);
  auto& autograd = library(DispatchKey::AutogradCUDA);
  for (std::string net : {"lstm", "gru", "rnn_tanh", "rnn_relu"})
    for (std::string overload : {"input", "data"}) {
      auto op = dispatcher.findSchemaOrThrow(("aten::" + net).c_str(), overload.c_str());
      auto own = op.getComputedKernelForDispatchKey(DispatchKey::AutogradCUDA).kernelFunction();
      for (auto* at : {&autograd, &cuda})
        at->impl((net + "." + overload).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WithoutCudnn>(own)));
    }
  // Flash attention and cuDNN's have no counterpart on the CPU: memory-efficient attention is used instead.
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseCuDNN(false);
}
